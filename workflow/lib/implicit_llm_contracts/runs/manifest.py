"""Define the manifest, which records the identity and the files of a finished run. Equal runs have equal manifests.

    {"format": 1, "stage": "train", "name": "a5-s0/free", "fingerprint": "<sha256>",
     "identity": {"config": {...}, "code": "<sha256>", "upstream": {"data": "<fingerprint>"}},
     "files": [{"path": "work/<first 16 of fingerprint>/model/config.json", "size": 812, "sha256": "..."}],
     "summary": {"loss": 0.01}}

Paths are relative to the run directory. A summary number that is not finite is written as null.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.errors import UserError, refuse_if
from implicit_llm_contracts.runs.atomic import size_difference, write_atomic
from implicit_llm_contracts.runs.identity import Identity

MANIFEST = "manifest.json"
FORMAT = 1
IDENTITY_KEYS = ("stage", "name", "fingerprint", "config")  # the fields of an identity that MLflow needs
Reads = Callable[[PurePosixPath], bool]  # whether a job reads this path below a run directory


MODEL_CONFIG = "model/config.json"


class ManifestError(UserError):
    """A manifest or a file that it records is missing, damaged or not the expected one."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


class FileUnreadable(UserError, PermissionError):
    """A file exists, but this user may not read it."""

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True)
class FileRecord:
    """The record of a file. `path`: relative to the run directory, with forward slashes."""

    path: str
    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path, run_dir: Path) -> FileRecord:
        """Return the record of the file `path`, which is below `run_dir`."""
        return cls(path.relative_to(run_dir).as_posix(), path.stat().st_size, sha256_of(path))

    def difference(self, path: Path) -> str:
        """Return how the file at `path` differs from the record, or "" if it does not."""
        if difference := size_difference(path, self.size):
            return difference
        digest = sha256_of(path)
        return "" if digest == self.sha256 else f"expected sha256 {self.sha256[:16]}, found {digest[:16]}"


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest, whose file has `config`, `code` and `upstream` below `identity`."""

    stage: str
    name: str
    fingerprint: str
    config: dict[str, Any]
    code: str
    upstream: dict[str, str]
    files: tuple[FileRecord, ...]
    summary: dict[str, Any]

    @property
    def model_folder(self) -> str | None:
        """The path of the model of a training phase or import, relative to the run directory; None for other jobs."""
        folders = (PurePosixPath(record.path).parent for record in self.files if record.path.endswith(MODEL_CONFIG))
        return next((str(folder) for folder in folders if folder.name == "model"), None)

    def to_bytes(self) -> bytes:
        """Return JSON with sorted keys, one space per level and a newline at the end; files are sorted by path."""
        content = asdict(self) | {"format": FORMAT, "summary": finite(self.summary)}
        content["identity"] = {key: content.pop(key) for key in ("config", "code", "upstream")}
        content["files"] = sorted(content["files"], key=lambda record: record["path"])
        return (json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()

    def write(self, path: Path) -> None:
        """Write the manifest atomically to the file `path`. Raises: StorageError."""
        write_atomic(path, self.to_bytes())

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read the file `path`. Raises: ManifestError if it is missing, unreadable, damaged, or of another format."""
        try:
            raw = path.read_bytes()
        except FileNotFoundError as error:
            raise ManifestError(
                f"{path}: no manifest there; give the directory of a finished job, or run the workflow to make it", path
            ) from error
        except OSError as error:
            raise ManifestError(
                f"{path}: cannot read the manifest ({error.strerror}); check the file system", path
            ) from error
        try:
            content = json.loads(raw)
            found = content.pop("format", None) if isinstance(content, dict) else type(content).__name__
            refuse_if(found != FORMAT, f"expected format {FORMAT}, found {found!r}")
            manifest = fill(cls, content | content.pop("identity", {}), str(path))
            for record in manifest.files:
                inside = PurePosixPath(record.path)
                is_out = inside.is_absolute() or ".." in inside.parts
                refuse_if(is_out, f"the path {record.path!r} leads out of the run directory")
        except (UserError, ValueError, TypeError) as error:
            reason = str(error).removeprefix(f"{path}: ").partition(";")[0]
            is_below_work = path.parent.parent.name == "work"
            run_dir = path.parents[2] if is_below_work else path.parent
            raise ManifestError(f"{path}: is no manifest: {reason}; {_rebuild(run_dir)}", path) from error
        return manifest

    @classmethod
    def of(cls, identity: Identity, files: Iterable[FileRecord], summary: Mapping[str, Any]) -> Manifest:
        """Return the manifest of a finished run."""
        about = {key: getattr(identity, key) for key in ("stage", "name", "fingerprint", "code")}
        config, upstream = dict(identity.config), dict(identity.upstream)
        return cls(**about, config=config, upstream=upstream, files=tuple(files), summary=dict(summary))

    @classmethod
    def find(cls, path: Path) -> Manifest | None:
        """Return the manifest in the file `path`, or None if `read` raises ManifestError."""
        try:
            return cls.read(path)
        except ManifestError:
            return None

    def verify(self, run_dir: Path, reads: Reads | None = None) -> None:
        """Compare the files below `run_dir` with their records; with `reads`, only the files for which it is true.

        Raises: ManifestError for the first file that differs; the error's `path` is this file.
        """
        for record in self.records(reads):
            path = run_dir / record.path
            difference = record.difference(path)
            if difference:
                raise ManifestError(f"{path}: {difference}; {_rebuild(run_dir)}", path)

    def records(self, reads: Reads | None = None) -> Iterator[FileRecord]:
        """Return the records of all files, or of those for which `reads` is true."""
        return (record for record in self.files if reads is None or reads(PurePosixPath(record.path)))


def sha256_of(path: Path) -> str:
    """Return the sha256 (hexadecimal) of a file.

    Raises: FileUnreadable without permission to read it; OSError, which names the file also if reading it failed.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except PermissionError as error:
        text = f"cannot read {path}: permission denied; ask its owner to let you read it"
        raise FileUnreadable(error.errno, text) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def finite(value: Any) -> Any:
    """Return `value` as JSON: numbers of numpy and torch become plain, and numbers that are not finite become null.

    Raises: TypeError, which names a value that is not JSON.
    """
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if hasattr(value, "item"):
        return finite(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    raise TypeError(f"{value!r:.60} is not JSON")


def _rebuild(run_dir: Path) -> str:
    return f"type `{remove_command(run_dir)}` and run the workflow again to rebuild it"


def remove_command(run_dir: Path) -> str:
    """Return the shell command after which the workflow rebuilds a result, with a relative path if possible."""
    path, here = run_dir / MANIFEST, Path.cwd()
    return shlex.join(["rm", "-f", str(path.relative_to(here) if path.is_relative_to(here) else path)])
