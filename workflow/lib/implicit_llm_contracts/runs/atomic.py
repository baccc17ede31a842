"""Write files and directories atomically: they appear under their final names complete or not at all.

The order is always: write under a temporary name beside the target, fsync, rename, fsync the directory. Temporary names
look like `.name.1a2b3c4d.tmp`; `remove_leftovers` deletes those that a killed process left behind.

On a network file system, files from another machine may become visible late; `wait_for_files` waits for them.
"""

import errno
import json
import logging
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs import faults

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_WAITS_S = (0.2, 1.0, 5.0)
_PASSING = (errno.EACCES, errno.EIO, errno.ESTALE)  # a file server returns these for a while during a failover
_NEXT = {
    errno.ENOSPC: "the disk is full; free some space and start again",
    errno.EDQUOT: "the disk quota is used up; free some space and start again",
    errno.EFBIG: "files may not be that large here (`ulimit -f`, file system); raise the limit and start again",
    errno.EROFS: "the file system is read-only; mount it writable and start again",
    errno.EACCES: "permission denied; make the directory writable and start again",
    errno.EPERM: "permission denied; make the directory writable and start again",
    errno.EIO: "the disk or file server reports an error; see that it works, on this node too, and start again",
    errno.ESTALE: "the file server does not know the file any more; see that it works and start again",
}


class StorageError(UserError, OSError):
    """The disk is full, read-only, failing or not writable; `errno` is that of the OSError which caused this."""

    failure_class = "quota"

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def storage_errors(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Replace an OSError in the block by a StorageError about `path` if the user can fix it; others pass unchanged.

    `needed_bytes`: for the message of a full disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NEXT or isinstance(error, StorageError):
            raise
        needed = "" if needed_bytes is None else f"{needed_bytes} bytes needed, "
        sizes = f" ({needed}{_free_bytes(path)} bytes free)" if error.errno == errno.ENOSPC else ""
        raise StorageError(error.errno, f"cannot write {path}{sizes}: {_NEXT[error.errno]}") from error


def retried(write: Callable[[], T], path: Path) -> T:
    """Return the value of `write`; after an error that may be temporary, retry it a few times with growing pauses.

    `write` must write everything again each time. After a failed fsync the system drops the unwritten data, so another
    fsync alone would succeed without this data.
    """
    for wait_s in RETRY_WAITS_S:
        try:
            return write()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            log.warning("%s: %s; trying again in %g s", path, os.strerror(error.errno), wait_s)
            time.sleep(wait_s)
    return write()


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` and create its directory; retry for a few seconds after an error that may be temporary.

    If another job deleted the temporary file, write the file again.
    Raises: StorageError; no temporary file remains, and `path` is unchanged unless only the fsync of its folder failed.
    """

    def write() -> None:
        try:
            write_once(path, data)
        except FileNotFoundError:
            # A job that started on the run directory took the temporary file for a leftover and deleted it. This
            # happened to the files by which processes of other nodes announce themselves to their launcher.
            write_once(path, data)

    retried(write, path)


def write_once(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` like `write_atomic`, but retry only the rename. Raises: StorageError."""
    raw = data.encode("utf-8") if isinstance(data, str) else data
    with new_file(path, len(raw)) as file:
        file.write(raw)


@contextmanager
def new_file(path: Path, needed_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Yield a temporary file that is renamed to `path` at the end of the block, or deleted after an error.

    Raises: StorageError for any storage error in the block, also of other files; the message names `needed_bytes` if
    the disk is full.
    """
    tmp = temporary_name(path)
    with storage_errors(path, needed_bytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        faults.point("atomic.before_write")
        try:
            with open(tmp, "xb") as file:
                yield file
                file.flush()
                faults.point("atomic.before_fsync")
                os.fsync(file.fileno())
            retried(lambda: _rename(tmp, path), path)  # a temporary error must not discard hours of writing
        finally:
            tmp.unlink(missing_ok=True)
        fsync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write JSON with sorted keys like `write_atomic`; a dataclass becomes an object. Raises: StorageError."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, default=asdict) + "\n")


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in an optional JSON file; empty if the file cannot be read or contains no object."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def size_difference(path: Path, size: int) -> str:
    """Return how the size of the file at `path` differs from `size` (bytes), or "" if it does not."""
    found = path.stat().st_size if path.is_file() else "no file"
    return "" if found == size else f"expected {size} bytes, found {found}"


def commit_directory(tmp_dir: Path, final_dir: Path) -> None:
    """Move the finished directory `tmp_dir` to `final_dir`, after an fsync of all its files and folders.

    An existing `final_dir` is moved aside and then deleted. Between the two renames there is no `final_dir`, but there
    is never an incomplete one. If the second rename fails, the old directory gets its name back.
    Raises: StorageError; `tmp_dir` then still exists, unless only the last fsync failed.
    """
    with storage_errors(final_dir):
        faults.point("atomic.before_tree_fsync")
        for root, _, file_names in os.walk(tmp_dir):
            for name in (*file_names, ""):
                fsync_file(Path(root, name))
        aside = temporary_name(final_dir)
        if final_dir.exists():
            os.rename(final_dir, aside)
            faults.point("atomic.directory_moved_aside")
        try:
            _rename(tmp_dir, final_dir)
        except OSError:
            with suppress(OSError):
                os.rename(aside, final_dir)
            raise
        fsync_directory(final_dir.parent)
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def new_directory(final_dir: Path, needed_bytes: int | None = None) -> Iterator[Path]:
    """Yield a temporary directory that is moved to `final_dir` at the end of the block, or deleted after an error.

    Its files are as readable as itself, although safetensors creates files that only their owner may read.
    Raises: StorageError for any storage error in the block, also of other files; the message names `needed_bytes` if
    the disk is full.
    """
    tmp_dir = temporary_name(final_dir)
    try:
        with storage_errors(final_dir, needed_bytes):
            faults.point("atomic.before_directory")
            tmp_dir.mkdir(parents=True)
            yield tmp_dir
            readable = tmp_dir.stat().st_mode & 0o444
            for path in tmp_dir.rglob("*"):
                mode = path.lstat().st_mode
                if stat.S_ISREG(mode) and mode & 0o444 != readable:
                    path.chmod(stat.S_IMODE(mode) | readable)
            commit_directory(tmp_dir, final_dir)
    except BaseException:
        shutil.rmtree(tmp_dir, ignore_errors=True)
        raise


def temporary_name(path: Path) -> Path:
    """Return a new name beside `path` for a file or directory that will be renamed to `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def is_temporary(path: Path) -> bool:
    """Return whether the name of `path` has the form of `temporary_name`."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def remove_temporary(path: Path) -> None:
    """Delete a file or directory, if it exists."""
    faults.point("atomic.before_removal")
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Delete temporary files and directories below `directory`, whose lock the caller must hold."""
    for path in list(directory.rglob(".*.tmp")):
        remove_temporary(path)


def fsync_file(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Make renames within a directory durable."""
    faults.point("atomic.before_directory_fsync")
    fsync_file(path)


def _rename(source: Path, target: Path) -> None:
    faults.point("atomic.before_rename")
    os.rename(source, target)
    faults.point("atomic.after_rename")


def require_space(path: Path, needed_bytes: int, what: str) -> None:
    """Raise StorageError if fewer than `needed_bytes` are free for `what` on the file system of `path`.

    `path` need not exist yet. `what`: a plural noun for the message.
    """
    free = _free_bytes(path)
    if needed_bytes > free:
        sizes = f"need {needed_bytes / 2**20:.1f} MiB more and {free / 2**20:.1f} MiB are free"
        raise StorageError(errno.ENOSPC, f"{path}: {what} {sizes}; free some space and start again")


def _free_bytes(path: Path) -> int:
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free


WAIT = "IMPLICIT_LLM_LATENCY_WAIT_S"
SLURM_WAIT_S = 60.0  # the default maximum time for which an NFS client caches a directory
POLL_S = 0.5


def wait_for_files(paths: Iterable[Path]) -> None:
    """Wait until all `paths` exist, or until the time is over; files may then still be missing.

    The time is a minute in a Slurm job, whose inputs other machines may have written, and zero elsewhere. The
    environment variable IMPLICIT_LLM_LATENCY_WAIT_S sets another time. Raises: UserError for a wrong value of it.
    """
    end = time.monotonic() + default_wait_s()
    missing = [path for path in paths if not os.path.exists(path)]  # a path that cannot be checked counts as missing
    if not missing:
        return
    if time.monotonic() < end:
        log.info("waiting for %s to come into sight", missing[0])
    while missing and time.monotonic() < end:
        time.sleep(POLL_S)
        for directory in {path.parent for path in missing}:
            with suppress(OSError):
                os.listdir(directory)  # NFS caches a failed look-up until the client lists the folder
        missing = [path for path in missing if not os.path.exists(path)]


def default_wait_s() -> float:
    """Return the seconds to wait for a file from another machine. Raises: UserError for a wrong value of WAIT."""
    given = os.environ.get(WAIT) or (SLURM_WAIT_S if "SLURM_JOB_ID" in os.environ else 0)
    with suppress(ValueError):
        if 0 <= (wait_s := float(given)) < math.inf:
            return wait_s
    raise UserError(
        f"{WAIT}: {given!r} is not allowed; give a number of seconds of at least 0, such as 60, or unset it"
    )
