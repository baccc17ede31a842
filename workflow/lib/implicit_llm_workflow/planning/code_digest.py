"""Compute one digest of the code that a job's result depends on.

The digest is computed from syntax trees, so comments and docstrings do not count. It covers the module of the job's
stage and every project module that this module imports: directly, through other modules, or inside functions. It also
covers plugins with the files that they declare, and resource files in the packages of these modules. It leaves out
package `__init__` files (a name imported from a package counts in the module that defines it), modules that only other
kinds of models run, and the modules in PLUMBING, which store, record and track results but do not compute them. A test
compares the digest with traces of jobs of every kind.

The code behind a digest is recorded by module and function, so that a later change can be named:

    results/<config>/.code/<first 16 of the code digest>.json:
    {"module": "implicit_llm.training.stage", "files": {"implicit_llm_contracts.config.solver": "<sha256>", ...},
     "parts": {"implicit_llm_contracts.config.solver": {"SolverConfig.tol": "<first 16 of a sha256>", ...}}}

The digest is computed from `files`; a record whose name does not match its digest is ignored. The workflow writes the
records of all jobs before it starts the first job. Results from before records were introduced have none.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from implicit_llm_contracts.config.flops import FAMILY_NAMES, MAMBA2
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.plugins import BUILTIN, Kinds, plugin_paths, read_plugin
from implicit_llm_contracts.runs.atomic import read_object, write_json
from implicit_llm_workflow.file_digests import Remembered
from implicit_llm_workflow.project_dirs import LIBRARY, REPORT, package_dir

PLUMBING = (
    "implicit_llm.cards",
    "implicit_llm.training.operations",
    "implicit_llm_contracts.runs",
    "implicit_llm_jobs",
)
PACKAGES = (LIBRARY, "implicit_llm_contracts", "implicit_llm_data", "implicit_llm_jobs", REPORT)
STAGES = {
    "data": "implicit_llm_data.stages",
    "checkpoint": "implicit_llm.checkpoint",
    "train": "implicit_llm.training",
    "evaluate": "implicit_llm.evaluation.kinds",
    "report": REPORT,
    "excerpt": REPORT,
}
# OF_FAMILY maps `model_type` to the package that only this family runs; only implicit models run OF_IMPLICIT. Jobs of
# other models import these too, but an import computes nothing. A module that is imported by left-out modules alone is
# left out too.
OF_FAMILY = {family: f"{LIBRARY}.models.{family.removeprefix('implicit_')}" for family in FAMILY_NAMES}
OF_IMPLICIT = (f"{LIBRARY}.solver", f"{OF_FAMILY[MAMBA2]}.triton.search")
RESOURCE_SUFFIXES = {".css", ".html", ".j2", ".js", ".json", ".rst", ".svg", ".txt", ".yaml"}


class CodeChanged(UserError):
    """The code on disk differs from the code with which the job was planned."""


class SourceError(UserError):
    """A source file of the project is missing, or cannot be read or parsed."""


class Imported(NamedTuple):
    """The target of one import statement: a dotted name, and the names imported from it (None for a plain `import`)."""

    module: str
    names: Sequence[str] | None


@dataclass(frozen=True)
class SourceModule:
    """A module of the project; `package` is the package to which its relative imports refer."""

    module: str
    path: Path
    is_package: bool
    cache: Remembered = field(default_factory=lambda: Remembered(None), compare=False)

    @cached_property
    def content(self) -> bytes:
        """Return the bytes of the file. Raises: SourceError."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise SourceError(f"{self.path}: cannot be read ({error.strerror}); check the installation") from error

    @cached_property
    def tree(self) -> ast.Module:
        """Return the syntax tree. Raises: SourceError that names file and line."""
        try:
            return ast.parse(self.content, filename=str(self.path))
        except SyntaxError as error:
            raise SourceError(f"{self.path}:{error.lineno}: is not valid Python ({error.msg}); correct it") from error

    @property
    def package(self) -> str:
        return self.module if self.is_package else self.module.rpartition(".")[0]

    @cached_property
    def imports(self) -> tuple[Imported, ...]:
        """All imports that can run, including those inside functions but not those for type checkers alone."""
        return tuple(Imported(*item) for item in self.find("imports", lambda: list(self._find_imports())))

    def find(self, what: str, look: Callable[[], Any]) -> Any:
        """Return the JSON value that `look` returns, from the cache under `what` if possible. Raises: SourceError."""
        state = hashlib.sha256(_finders() + self.content).hexdigest()
        return self.cache.find(f"{self.module} {self.is_package} {what}", state, look)

    def _find_imports(self) -> Iterator[Imported]:
        for node in _running_nodes(self.tree):
            if isinstance(node, ast.Import):
                yield from (Imported(alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield Imported(self._absolute(node), tuple(alias.name for alias in node.names))
            elif isinstance(node, ast.Call) and _name_of(node.func) == "import_module":
                yield from self._named_by(node.args)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        packages = self.package.split(".")
        return ".".join([*packages[: len(packages) - node.level + 1], *([node.module] if node.module else [])])

    def _named_by(self, arguments: list[ast.expr]) -> Iterator[Imported]:
        """Yield the module that `import_module("a.b")` or `import_module(".b", __package__)` imports."""
        if arguments and isinstance(arguments[0], ast.Constant) and isinstance(arguments[0].value, str):
            name = arguments[0].value
            yield Imported(self.package + name if name.startswith(".") else name, None)


@functools.cache
def _finders() -> bytes:
    """Return the content of this file, because cached findings depend on it too."""
    return Path(__file__).read_bytes()


class Project:
    """A set of packages, whose modules are found by name.

    `roots`: the folders of the packages by name. `cache`: stores what was found in their files.
    """

    plugins: tuple[str, ...] = ()  # the modules of plugins, each of which is a single file

    def __init__(self, roots: dict[str, Path], cache: Remembered | None = None) -> None:
        self._roots = roots
        self.cache = cache or Remembered(None)
        self._found: dict[str, SourceModule | None] = {}

    def with_plugins(self, paths: Iterable[Path]) -> Project:
        """Return a project with the same packages and these files, each as a module of its own."""
        files = {path.stem: path.with_suffix("") for path in paths}
        found = Project(self._roots | files, self.cache)
        found.plugins = tuple(files)
        return found

    def source(self, module: str) -> SourceModule | None:
        """Return the module's source, or None if it is not a module of the project."""
        if module not in self._found:
            self._found[module] = self._find(module)
        return self._found[module]

    def _find(self, module: str) -> SourceModule | None:
        top, *rest = module.split(".")
        if top not in self._roots:
            return None
        base = self._roots[top].joinpath(*rest)
        for path, is_package in ((base / "__init__.py", True), (base.with_name(f"{base.name}.py"), False)):
            if path.is_file():
                return SourceModule(module, path, is_package, self.cache)
        return None


def _running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _name_of(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from _running_nodes(other)
            continue
        yield child
        yield from _running_nodes(child)


def _name_of(node: ast.expr) -> str:
    """Return the last part of a plain or dotted name; empty for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@dataclass(frozen=True)
class JobCode:
    """The code that a job can run: `module` and the files `plugins` with all their imports, except `left_out`."""

    module: str
    left_out: tuple[str, ...] = PLUMBING
    plugins: tuple[str, ...] = ()


@functools.cache
def job_digest(code: JobCode) -> str:
    """Return the digest of the code that a job can run; the digest is computed once in a process.

    Raises: SourceError if a module is missing or invalid.
    """
    digest = total_digest(file_digests(job_sources(code)))
    _library().cache.save()
    return digest


def job_sources(code: JobCode) -> dict[str, SourceModule]:
    """Return the modules behind `job_digest` by name, sorted by name as in the digest. Raises: SourceError."""
    project = _library().with_plugins(map(Path, code.plugins)) if code.plugins else _library()
    return dict(sorted(reached_sources(code.module, project, code.left_out).items()))


@functools.cache
def _library() -> Project:
    """Return the project that all stages use, because they share most imports; it reads each file once in a process."""
    folders = {name: package_dir(name) for name in PACKAGES}
    return Project(folders, Remembered(folders[LIBRARY] / "__pycache__" / "code-digests"))


def stage_module(stage: str, config: Mapping[str, Any], kinds: Kinds) -> str:
    """Return the module whose function `run` does the job; a stage of several kinds has one module for each `kind`.

    Therefore an edit of one kind of data does not make the other kinds stale. The module of a plugin's kind is the
    plugin's file; `Plugin.functions` names the function that does the job instead of `run`.
    """
    owner = kinds.owner(stage, config.get("kind", ""))
    return owner.stem if owner is not None else f"{STAGES[stage]}.{config.get('kind', 'stage')}"


def job_code(
    stage: str, config: Mapping[str, Any], model: Mapping[str, Any] | None = None, kinds: Kinds = BUILTIN
) -> JobCode:
    """Return the code of a job; `model` has the fields of the model that the job trains or evaluates, if known.

    No family's code is left out if the model is unknown or of a family that the library does not define.
    """
    return JobCode(stage_module(stage, config, kinds), _left_out(model or {}), tuple(map(str, plugin_paths(config))))


def require_submitted_code(module: str, code: str, name: str, plugins: tuple[str, ...] = ()) -> None:
    """Import all modules behind the digest of the stage's module, then check that `code` is the digest for some model.

    The imports come first and include those inside functions, so that an edit after the check cannot reach the process.
    The files are read again after them, so that the check sees an edit before an import.
    Raises: CodeChanged, before the job has started any work.
    """
    for source in job_sources(JobCode(module, plugins=plugins)):
        if source not in sys.modules:
            with suppress(Exception):  # a module that cannot be loaded, such as kernels for another device, cannot run
                importlib.import_module(source)
    _library.cache_clear()
    job_digest.cache_clear()
    models = [{"model_type": family, "is_implicit": it} for family in (None, *OF_FAMILY) for it in (True, False)]
    if code not in (job_digest(JobCode(module, _left_out(model), plugins)) for model in models):
        raise CodeChanged(
            f"{name}: the code was changed since the job was planned (digest {code[:12]} then); run the workflow again "
            "to plan with this code, or bring the old code back to resume from what was saved"
        )


def _left_out(model: Mapping[str, Any]) -> tuple[str, ...]:
    family = model.get("model_type")
    others = [folder for other, folder in OF_FAMILY.items() if family in OF_FAMILY and other != family]
    unsolved = OF_IMPLICIT if model.get("is_implicit") is False else ()
    return (*PLUMBING, *others, *unsolved)


def file_digests(sources: Mapping[str, SourceModule]) -> dict[str, str]:
    """Return the sha256 of each module's syntax tree and of each resource file of their packages, by name."""
    modules = {name: source.find("digest", partial(_tree_digest, source)) for name, source in sources.items()}
    return modules | resource_digests(sources.values())


def _tree_digest(source: SourceModule) -> str:
    return hashlib.sha256(tree_text(source.tree).encode()).hexdigest()


def total_digest(digests: Mapping[str, str]) -> str:
    """Combine the digests of modules and resource files into one; only the names of resource files contain a slash."""
    total = hashlib.sha256()
    for name in sorted(digests, key=lambda name: ("/" in name, name)):
        total.update(f"{name} {digests[name]}\n".encode())
    return total.hexdigest()


def resource_digests(sources: Iterable[SourceModule]) -> dict[str, str]:
    """Return the sha256 of the resource files in and below the folders of the modules, by name.

    The library's top folder is left out, because it belongs to all stages. A plugin has the files that it declares.
    Raises: ConfigError if such a file is missing.
    """
    files: dict[str, Path] = {}
    packages: dict[str, Path] = {}
    for source in sources:
        folder = source.path.parent
        if not source.package:  # a plugin, which declares the files that it reads
            files |= {f"{source.module}/{name}": folder / name for name in read_plugin(source.path).files}
        elif source.package != LIBRARY:
            packages[source.package] = folder
    for package, folder in packages.items():
        paths = [path for path in folder.rglob("*") if path.suffix in RESOURCE_SUFFIXES and path.is_file()]
        at = package.replace(".", "/")  # so that a file below two packages has one name
        files |= {f"{at}/{path.relative_to(folder).as_posix()}": path for path in paths}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def reached_sources(entry: str, project: Project, excluded: Iterable[str]) -> dict[str, SourceModule]:
    """Return every module that belongs to the digest, by name. Raises: SourceError if there is no module `entry`."""
    if project.source(entry) is None:
        raise SourceError(f"the project has no module {entry}; reinstall it with `make setup`")
    kept: dict[str, SourceModule] = {}
    packages_seen: set[str] = set()
    left_out = tuple(f"{package}." for package in excluded)
    waiting = [entry, *project.plugins]
    while waiting:
        module = waiting.pop()
        source = project.source(module)
        if source is None or module in kept or module in packages_seen or f"{module}.".startswith(left_out):
            continue
        if source.is_package:
            packages_seen.add(module)
        else:
            kept[module] = source
        for imported in source.imports:
            waiting.extend(_defining_modules(imported, project))
    return kept


def _defining_modules(imported: Imported, project: Project) -> Iterator[str]:
    """Yield the imported module or, for names from a package, the modules that define them.

    A name from a package is a submodule, or its `__init__` imports or defines the name.
    """
    source = project.source(imported.module)
    if source is None:
        return
    if imported.names is None or not source.is_package:
        yield imported.module
        return
    for name in imported.names:
        submodule = f"{imported.module}.{name}"
        if project.source(submodule) is not None:
            yield submodule
        else:
            yield from _exported_from(source, name, project)


def _exported_from(package: SourceModule, name: str, project: Project) -> Iterator[str]:
    """Yield the modules that define `name` if a package's `__init__` imports it, or else the package itself."""
    for imported in package.imports:
        if imported.names and name in imported.names:
            yield from _defining_modules(Imported(imported.module, (name,)), project)
            return
    yield package.module


def tree_text(value: object) -> str:
    """Return a syntax tree as text without docstrings, positions and empty fields, equal for all supported Pythons."""
    if isinstance(value, list):
        return f"[{','.join(map(tree_text, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    parts = []
    for name, item in ast.iter_fields(value):
        if name == "body":
            item = body_of(value)
        if item is not None and item != [] and name not in ("kind", "type_comment", "ctx"):
            parts.append(f"{name}={tree_text(item)}")
    return f"{type(value).__name__}({','.join(parts)})"


def body_of(node: Any) -> Any:
    """Return the body of a syntax tree's node without its docstring."""
    is_documented = isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None
    return node.body[1:] if is_documented else node.body


_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


FOLDER = ".code"
DIGITS = 16
MODULE_LEVEL = "module level"


@dataclass(frozen=True)
class CodeRecord:
    """The code behind a digest: the sha256 of its `files` by name, and digests of the `parts` of each module."""

    module: str
    files: Mapping[str, str]
    parts: Mapping[str, Mapping[str, str]]

    @property
    def digest(self) -> str:
        """The code digest, computed from `files`."""
        return total_digest(self.files)


def code_now(code: JobCode) -> CodeRecord:
    """Return the record of the code that a job can run. Files that this process has read are not read again.

    Raises: SourceError.
    """
    sources = job_sources(code)
    parts = {name: parts_of(source.tree) for name, source in sources.items()}
    return CodeRecord(code.module, file_digests(sources), parts)


def record_code(root: Path, codes: Iterable[JobCode], digest_of: Callable[[JobCode], str]) -> None:
    """Write the missing records of these codes below `root`. Raises: SourceError, StorageError."""
    for code in dict.fromkeys(codes):
        if not record_path(root, digest_of(code)).exists():
            record = code_now(code)
            write_json(record_path(root, record.digest), record)


def read_code_record(root: Path, digest: str) -> CodeRecord | None:
    """Read the record of the code with this digest; return None if there is none or its digest differs."""
    try:
        record = CodeRecord(**read_object(record_path(root, digest)))
        return record if record.digest == digest else None
    except (TypeError, AttributeError):
        return None


def changes_since(root: Path, digest: str, code: JobCode) -> tuple[str, ...] | None:
    """Return how the code on disk differs from the code with this digest, or None if the latter was not recorded.

    Raises: SourceError.
    """
    record = read_code_record(root, digest)
    return None if record is None else tuple(changed_files(record, code_now(code)))


def record_path(root: Path, digest: str) -> Path:
    return root / FOLDER / f"{digest[:DIGITS]}.json"


def changed_files(old: CodeRecord, new: CodeRecord) -> list[str]:
    """Return the differences: "module (function, CONSTANT)", "name (new)", "name (gone)", or a resource file's name.

    A module whose parts are all equal but in another order is listed by its name alone.
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
    """Return, by name, a digest of each function, method, class and constant, and one of all other statements."""
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
    """Return the names that a statement assigns; empty if it is not an assignment."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return []
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
