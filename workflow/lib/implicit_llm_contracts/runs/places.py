"""Find the project's own files, the downloads folder and files in it, and folders with tasks of lm-eval."""

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from implicit_llm_contracts.runs.manifest import sha256_of

_LIBRARIES = Path(__file__).resolve().parents[2]
_CHECKOUT = _LIBRARIES.parents[1]
# A checkout uses its own files, so edits take effect; an installed package contains copies.
PROJECT_DIR = (
    _CHECKOUT if (_CHECKOUT / "workflow" / "lib").is_dir() else _LIBRARIES / "implicit_llm_workflow" / "project"
)

TASK_FOLDERS = PROJECT_DIR / "workflow/config/lm_eval"
IGNORED = "__pycache__"
# The folder is inside results/, so git ignores it.
DEFAULT_DOWNLOADS = Path("results") / "downloads"


def downloads_folder(given: Path | str | None = None) -> Path:
    """Return the folder of downloaded files: `given`, else $IMPLICIT_LLM_DATA, else results/downloads."""
    return Path(given or os.environ.get("IMPLICIT_LLM_DATA") or DEFAULT_DOWNLOADS)


def local_folder(path: Path, downloads: Path | None = None) -> Path | None:
    """Return `path` in the downloads folder, or else in the working directory; None if neither is a folder."""
    return next((folder for folder in (downloads_folder(downloads) / path, path) if folder.is_dir()), None)


def local_files(pattern: str, downloads: Path) -> list[tuple[str, Path]]:
    """Return names and paths of the matching files in the downloads folder, or else in the working directory.

    Names are relative to this folder, so that all machines have equal names; an absolute pattern stays absolute.
    """
    for root in [Path("/")] if Path(pattern).is_absolute() else [downloads, Path()]:
        is_name = (root / pattern).is_file()  # a file name may contain brackets
        names = [pattern] if is_name else sorted(glob.glob(pattern, root_dir=root, recursive=True))
        if found := [(name, root / name) for name in names if (root / name).is_file()]:
            return found
    return []


def corpus_files(patterns: Iterable[str], downloads: Path) -> dict[str, Path]:
    """Return the paths of the matching files by name: in the order of `patterns`, then sorted, and each file once."""
    found: dict[Path, tuple[str, Path]] = {}
    for pattern in patterns:
        for name, path in local_files(pattern, downloads):
            found.setdefault(path.resolve(), (name, path))
    return dict(found.values())


def corpus_digest(digests: Mapping[str, str]) -> str:
    """Return one digest of the files of a corpus from the digest of each file by name."""
    return hashlib.sha256(json.dumps([*digests.items()]).encode()).hexdigest()


def find_task_folder(name: str) -> Path | None:
    """Find a folder of tasks by its path, or by its name below workflow/config/lm_eval; None if neither is one."""
    return next((folder for folder in (Path(name), TASK_FOLDERS / name) if folder.is_dir()), None)


def file_digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file below `folder`, except in __pycache__, by its path relative to `folder`."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and IGNORED not in path.parts)
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}
