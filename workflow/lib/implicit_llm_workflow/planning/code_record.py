"""What the code behind a digest was, module by module and function by function, so that a change can be named later.

    results/<config>/.code/<first 16 of the code digest>.json:
    {"module": "implicit_llm.training.stage", "files": {"implicit_llm_contracts.config.solver": "<sha256>", ...},
     "parts": {"implicit_llm_contracts.config.solver": {"SolverConfig.tol": "<first 16 of a sha256>", ...}}}

The digest follows from `files`, so a record always matches its name. The workflow writes the records of all jobs before
it starts the first one; results that are older than these records have none.
"""

import ast
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_workflow.planning.code_digest import (
    JobCode,
    body_of,
    file_digests,
    job_sources,
    total_digest,
    tree_text,
)

FOLDER = ".code"
DIGITS = 16
MODULE_LEVEL = "module level"


@dataclass(frozen=True)
class CodeRecord:
    """`files`: sha256 of modules and resource files by name; `parts`: of a module, digests of what it defines."""

    module: str
    files: Mapping[str, str]
    parts: Mapping[str, Mapping[str, str]]

    @property
    def digest(self) -> str:
        """The code digest."""
        return total_digest(self.files)


def code_now(code: JobCode) -> CodeRecord:
    """What a job can run, as it is on disk. Raises: SourceError."""
    sources = job_sources(code)
    parts = {name: parts_of(source.tree) for name, source in sources.items()}
    return CodeRecord(code.module, file_digests(sources), parts)


def record_code(root: Path, codes: Iterable[JobCode], digest_of: Callable[[JobCode], str]) -> None:
    """Write the records below `root` that are not there yet."""
    for code in dict.fromkeys(codes):
        if not record_path(root, digest_of(code)).exists():
            record = code_now(code)
            text = json.dumps(asdict(record), sort_keys=True, indent=1)
            write_atomic(record_path(root, record.digest), f"{text}\n")


def read_code_record(root: Path, digest: str) -> CodeRecord | None:
    """What was recorded of the code with this digest; None where nothing was, or not of this code."""
    try:
        record = CodeRecord(**json.loads(record_path(root, digest).read_bytes()))
        return record if record.digest == digest else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def changes_since(root: Path, digest: str, code: JobCode) -> tuple[str, ...] | None:
    """What differs on disk from the code with this digest; None where that was not recorded. Raises: SourceError."""
    record = read_code_record(root, digest)
    return None if record is None else tuple(changed_files(record, code_now(code)))


def record_path(root: Path, digest: str) -> Path:
    return root / FOLDER / f"{digest[:DIGITS]}.json"


def changed_files(old: CodeRecord, new: CodeRecord) -> list[str]:
    """What differs: "module (function, CONSTANT)", "name (new)", "name (gone)", or the name of a resource file.

    A module whose parts are all equal has them in another order, and is named alone.
    """
    found = []
    for name in sorted({*old.files, *new.files}):
        before, after = old.parts.get(name, {}), new.parts.get(name, {})
        parts = [part for part in sorted({*before, *after}) if before.get(part) != after.get(part)]
        if name not in old.files:
            found.append(f"{name} (new)")
        elif name not in new.files:
            found.append(f"{name} (gone)")
        elif old.files[name] != new.files[name]:
            found.append(f"{name} ({', '.join(parts)})" if parts else name)
    return found


def parts_of(tree: ast.Module) -> dict[str, str]:
    """Digests of a module's functions, methods, classes and constants, and of all its other statements together."""
    texts: dict[str, list[str]] = {}
    _collect(tree, "", texts)
    return {name: hashlib.sha256("\n".join(text).encode()).hexdigest()[:DIGITS] for name, text in texts.items()}


def _collect(node: ast.Module | ast.ClassDef, prefix: str, texts: dict[str, list[str]]) -> None:
    own = prefix.rstrip(".") or MODULE_LEVEL
    if isinstance(node, ast.ClassDef):
        header = [*node.bases, *node.keywords, *node.decorator_list]
        texts.setdefault(own, []).extend(tree_text(item) for item in header)
    for child in body_of(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            texts.setdefault(prefix + child.name, []).append(tree_text(child))
        elif isinstance(child, ast.ClassDef):
            texts.setdefault(prefix + child.name, [])
            _collect(child, f"{prefix}{child.name}.", texts)
        else:
            names = [f"{prefix}{name}" for name in _assigned(child)] or [own]
            for name in names:
                texts.setdefault(name, []).append(tree_text(child))


def _assigned(statement: ast.stmt) -> list[str]:
    """The names to which an assignment gives a value; none of other statements."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return []
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
