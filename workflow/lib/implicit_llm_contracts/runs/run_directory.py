"""Define the run directory: the places of a run's artifacts, the lock of their writer, and their publication.

    results/<config>/<stage>/<name>/
        manifest.json, provenance.json     copies from the work folder of the published result
        job.log                            a link to the log of all starts of that result
        work/.lock                         held by the job that writes here
        work/<first 16 of fingerprint>/    all files of one identity: artifacts, journal.jsonl, provenance.json, ...
            commit.json                    the manifest; a result without it is not finished
            manifest.json                  a copy of commit.json for Snakemake, which runs the job if it is missing
            declared/                      files that are also copied to the work folder, for Snakemake, and to the
                                           run directory, for people
            again                          a request to the next job to compute the finished result again
            freed                          marks that larger files were deleted to free disk space
        work/<...>.previous/               the old result while it is computed again, until the new one is committed

Snakemake deletes the declared outputs of a rule before its job starts and after it failed, so the commit is a separate
file. Older folders have only manifest.json, which then counts as the commit.
"""

import errno
import fcntl
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs import faults, logs
from implicit_llm_contracts.runs.atomic import (
    StorageError,
    fsync_file,
    is_temporary,
    remove_leftovers,
    storage_errors,
    write_atomic,
)
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.manifest import MANIFEST, FileRecord, Manifest, ManifestError

log = logging.getLogger(__name__)

PROVENANCE = "provenance.json"
WORK, DECLARED = "work", "declared"
COMMIT, AGAIN, FREED = "commit.json", "again", "freed"
LOG = "job.log"
JOURNAL, METRICS, MLFLOW = "journal.jsonl", "metrics.json", "mlflow.json"
FINGERPRINT_DIGITS = 16  # this many first digits of a fingerprint distinguish all results
_held_locks: set[int] = set()


class RunDirectoryBusy(UserError):
    """Another process is writing to the run directory."""


class ResultError(Exception):
    """A stage returned files that cannot be published, which is a bug of the stage."""


@contextmanager
def locked(path: Path, busy: Callable[[str], UserError], command: str = "") -> Iterator[None]:
    """Hold a lock on the file `path`; the kernel releases the lock when the process ends for any reason.

    The file names the process, after `command` if that is given; on a full disk, a command works without a name. The
    file is emptied at the end, because another machine may not see the lock itself; after a kill it still has the name.
    Raises: StorageError; if another process holds the lock, the error `busy(holder)`, where the holder is a text such
        as "process 7 on HOST".
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        faults.point("run.before_lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "another process"
        os.close(descriptor)
        raise busy(holder) from None
    _held_locks.add(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        _write_holder(descriptor, path, command)
        yield
    finally:
        if descriptor in _held_locks:  # false in a forked child, which has closed the descriptor
            _held_locks.remove(descriptor)
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def _write_holder(descriptor: int, path: Path, command: str) -> None:
    try:
        with storage_errors(path):
            os.pwrite(descriptor, f"{command}{_this_process()}\n".encode(), 0)
    except StorageError as error:
        if not (command and error.errno in (errno.ENOSPC, errno.EDQUOT)):  # `gc` must be able to free the disk
            raise


def _this_process() -> str:
    """Return the name of this process in a lock file, with the id by which a user can stop its Slurm job, if any."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}", "") for name in ("JOB_ID", "TASK_ID"))
    job = f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", "")
    return f"process {os.getpid()} on {socket.gethostname()}{f' in Slurm job {job}' if job else ''}"


class RunDirectory:
    """The run directory `path` of a job; the files of its identity are in the folder `work`."""

    def __init__(self, path: Path, identity: Identity) -> None:
        self.path = path
        self.identity = identity
        self.work = work_directory(path, identity.fingerprint)
        self.journal = self.work / JOURNAL
        self._previous = self.work.with_name(f"{self.work.name}.previous")

    def lock(self) -> AbstractContextManager[None]:
        """Return a lock that admits only one writer. Raises: StorageError; RunDirectoryBusy, which names the holder."""
        next_step = "is writing here (work/.lock); wait for it or stop it, then start again"
        return locked(self.path / WORK / ".lock", lambda holder: RunDirectoryBusy(f"{self.path}: {holder} {next_step}"))

    def prepare(self) -> None:
        """Create `work`, delete temporary files of a killed writer, and set aside a result to be computed again.

        It also deletes the mark `freed`, because the job rebuilds the freed files. The caller must hold the lock.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path)
        (self.work / FREED).unlink(missing_ok=True)
        if (self.work / AGAIN).exists():
            log.info("%s: to be computed again", job_key(self.identity.stage, self.identity.name))
            self._set_result_aside()

    def _set_result_aside(self) -> None:
        """Move the finished result aside until the new one is committed; the log continues.

        The request `again` is deleted, so that it has an effect only once.
        """
        faults.point("run.before_set_aside")
        shutil.rmtree(self._previous, ignore_errors=True)
        os.replace(self.work, self._previous)
        (self._previous / AGAIN).unlink(missing_ok=True)
        self.work.mkdir(exist_ok=True)  # another rank may have created it
        for path in self._previous.glob(f"*{LOG}"):
            os.replace(path, self.work / path.name)

    def find_done(self, *, has_lock: bool = True) -> Manifest | None:
        """Return the manifest of the finished result, or None if there is none or a file is missing or changed.

        A caller with the lock renames the first changed file, or a wrong manifest, to `*.bad`, so that the stage does
        not resume from it. Files that the manifest does not record are not checked.
        """
        if (path := committed(self.work)) is None:
            return None
        try:
            manifest, wanted = Manifest.read(path), self.identity.fingerprint
            if manifest.fingerprint != wanted:
                raise ManifestError(f"{path}: expected fingerprint {wanted[:16]}, found another", path)
            manifest.verify(self.path)
        except ManifestError as error:
            log.warning("%s; making it again", str(error).partition(";")[0])
            if has_lock and error.path.exists() and not error.path.is_dir():
                faults.point("run.before_set_aside")
                os.replace(error.path, error.path.with_name(f"{error.path.name}.bad"))
            return None
        return manifest

    def publish(self, files: Sequence[Path | str], summary: dict[str, Any]) -> Manifest:
        """Commit the manifest of `files` (files or directories below work), then publish the result.

        Raises: ResultError for a file that is missing, outside of work, or a link; StorageError.
        """
        faults.point("publish.before_digests")
        records = tuple(self._record(path) for path in self._expand(files))
        manifest = Manifest.of(self.identity, records, summary)
        faults.point("publish.before_commit")
        manifest.write(self.work / COMMIT)
        self.republish(manifest)
        return manifest

    def republish(self, manifest: Manifest) -> None:
        """Copy a manifest and its declared files to the work folder, and publish the result in the run directory.

        The previous result, which `prepare` set aside, is deleted. Raises: ManifestError, StorageError.
        """
        _copy(manifest, self.path, self.work)
        show_result(self.path, self.work)
        faults.point("publish.after_manifest")
        shutil.rmtree(self._previous, ignore_errors=True)

    def _expand(self, files: Sequence[Path | str]) -> list[Path]:
        """Return all files once, including those in directories, but without temporary files."""
        found: set[Path] = set()
        for given in files:
            path = self.work / given
            if not path.resolve().is_relative_to(self.work.resolve()):
                raise ResultError(f"{path} lies outside of {self.work}")
            if not path.exists():
                raise ResultError(f"{path} does not exist")
            inside = sorted(path.rglob("*")) if path.is_dir() else [path]
            if any(item.is_symlink() for item in inside):
                raise ResultError(f"{path} is or contains a link; artifacts are files")
            found |= {item for item in inside if item.is_file() and not any(map(is_temporary, [item, *item.parents]))}
        return sorted(found)

    def _record(self, path: Path) -> FileRecord:
        with storage_errors(path):
            faults.point("publish.before_fsync")
            for item in (path, *path.parents[: len(path.relative_to(self.path).parts)]):
                fsync_file(item)
        return FileRecord.of(path, self.path)


def _copy(manifest: Manifest, run_dir: Path, folder: Path) -> None:
    """Copy the declared files of a result to a folder, then its manifest."""
    for name, source in declared_files(manifest, run_dir).items():
        faults.point("publish.before_copy")
        write_atomic(folder / name, source.read_bytes())
    faults.point("publish.before_manifest")
    manifest.write(folder / MANIFEST)


def declared_files(manifest: Manifest, run_dir: Path) -> dict[str, Path]:
    """Return the paths of a result's declared files, by the path of their copy relative to the run directory."""
    folder = work_directory(run_dir, manifest.fingerprint) / DECLARED
    paths = [run_dir / record.path for record in manifest.files]
    return {path.relative_to(folder).as_posix(): path for path in paths if path.is_relative_to(folder)}


def show_result(run_dir: Path, work: Path) -> None:
    """Publish the finished result of this work folder in its run directory.

    Published files that the previous result declares and this one does not are deleted. The manifest is written last.
    Raises: ManifestError, StorageError.
    """
    manifest, before = Manifest.read(committed(work) or work / COMMIT), Manifest.find(run_dir / MANIFEST)
    names = {} if before is None else declared_files(before, run_dir)
    for name in names.keys() - declared_files(manifest, run_dir).keys():
        (run_dir / name).unlink(missing_ok=True)
    if (work / PROVENANCE).exists():
        write_atomic(run_dir / PROVENANCE, (work / PROVENANCE).read_bytes())
    logs.show_log(work / LOG, run_dir / LOG)
    _copy(manifest, run_dir, run_dir)


def is_result_shown(run_dir: Path, work: Path) -> bool:
    """Return whether the run directory has equal copies of the work folder's manifest and declared files."""
    files = filter(Path.is_file, (work / DECLARED).rglob("*"))
    pairs = {path: run_dir / path.relative_to(work / DECLARED) for path in files}
    pairs[committed(work) or work / COMMIT] = run_dir / MANIFEST
    try:
        return all(source.read_bytes() == name.read_bytes() for source, name in pairs.items())
    except OSError:
        return False


def committed(work: Path) -> Path | None:
    """Return the path of the manifest of a work folder's finished result, or None if the folder has no such result."""
    return next((path for path in (work / COMMIT, work / MANIFEST) if path.is_file()), None)


def find_committed(work: Path) -> Manifest | None:
    """Return the manifest at the path that `committed` finds; a damaged manifest counts as absent."""
    return Manifest.find(committed(work) or work / COMMIT)


def is_done(work: Path) -> bool:
    """Return whether a work folder has a finished result without a request to compute it again."""
    return committed(work) is not None and not (work / AGAIN).exists()


def committed_below(root: Path) -> Iterator[Path]:
    """Yield the manifest paths of all finished results below `root`.

    These include results of former settings, and previous results that are computed again.
    """
    works = (work for run_dir in run_directories(root) for work in sorted(run_dir.glob(f"{WORK}/*/")))
    return filter(None, map(committed, works))


def work_directory(run_dir: Path, fingerprint: str) -> Path:
    """Return the folder for the artifacts of the identity with this fingerprint."""
    return run_dir / WORK / fingerprint[:FINGERPRINT_DIGITS]


def job_key(stage: str, name: str) -> str:
    """Return a job's path below results/<config>, such as "train/a5-implicit-s1/free", or "report" for the report."""
    return stage if name in (stage, "") else f"{stage}/{name}"


def experiment_folder(run_dir: Path, key: str) -> Path | None:
    """Return the folder results/<config> of the job `key`, or None if `run_dir` is not where such a job would be.

    The run or data set may have been renamed since, so the part of `key` after the stage may differ.
    """
    stage, *names = key.split("/")
    before, after = run_dir.parts[: -len(names) or None], run_dir.parts[len(run_dir.parts) - len(names) :]
    is_there = before[-1:] == (stage,) and after[1:] == tuple(names[1:])
    return run_dir.parents[len(names)] if is_there else None


def run_directories(root: Path) -> Iterator[Path]:
    """Yield the run directories below `root` in which a job has worked, in the order of their paths.

    Those that only links lead to come last, each once.
    """
    waiting, walked, found = [root], list[Path](), set[Path]()
    for top in waiting:
        real = top.resolve()
        if any(real.is_relative_to(other) for other in walked) or (walked and walked[0].is_relative_to(real)):
            continue  # walked already, or above `root`
        walked.append(real)
        for folder, names, files in os.walk(top):
            if WORK in names or MANIFEST in files:
                path = Path(folder)
                place = real / path.relative_to(top)
                if place not in found:
                    found.add(place)
                    yield path
                names.clear()
            names.sort()
            waiting += [path for name in names if (path := Path(folder, name)).is_symlink()]


def _close_inherited_locks() -> None:
    # A forked data worker would inherit the lock; if it outlived its killed parent, no job could start again.
    for descriptor in _held_locks:
        os.close(descriptor)
    _held_locks.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)
