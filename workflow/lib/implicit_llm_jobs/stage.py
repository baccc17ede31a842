"""Run any stage: check its inputs, run its body, publish the manifest, and record its start, end and failure."""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from implicit_llm_contracts.errors import Preempted, UserError, failure_class_of
from implicit_llm_contracts.plugins import PLUGINS, Kinds, plugin_paths
from implicit_llm_contracts.runs import faults, launched, logs, signals
from implicit_llm_contracts.runs.atomic import wait_for_files
from implicit_llm_contracts.runs.identity import Identity, IdentityError, compute_fingerprint
from implicit_llm_contracts.runs.journal import Journal
from implicit_llm_contracts.runs.manifest import IDENTITY_KEYS, Manifest, ManifestError, Reads, finite, remove_command
from implicit_llm_contracts.runs.run_directory import (
    COMMIT,
    PROVENANCE,
    WORK,
    RunDirectory,
    committed,
    is_done,
    work_directory,
)
from implicit_llm_contracts.runs.stage_context import Input, StageContext, StageResult
from implicit_llm_jobs import provenance
from implicit_llm_jobs.tracking import mlflow_writer
from implicit_llm_jobs.tracking.tracked_run import TrackedRun, current_invocation

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageRequest:
    """A request to run a stage.

    inputs: the run directories of the inputs by role. log: the log file; None logs to stderr only. reads: returns
    whether the stage reads an input file; only such files are checked and must exist. None means that it reads all.
    """

    run_dir: Path
    identity: Identity
    inputs: dict[str, Path] = field(default_factory=dict)
    runtime: dict[str, Any] = field(default_factory=dict)
    log: Path | None = None
    reads: Reads | None = None


Body = Callable[[StageContext], StageResult]


def run_stage(request: StageRequest, body: Body) -> Manifest | None:
    """Run `body` unless its result exists, publish and return the manifest; ranks above 0 that run it return None.

    Raises: UserError for a wrong input or config, or a run directory in use; any exception of `body`. No incomplete
        result gets its final name. SIGTERM becomes SystemExit(143), unless the process or the body handles it.
    """
    with logged(request.run_dir, request.log):
        return _run(request, body)


@contextmanager
def logged(run_dir: Path, log_file: Path | None) -> Iterator[None]:
    """Log to stderr and to the file of a job in the block, and record there why the block fails."""
    is_ours = log_file is not None and log_file.parent.parent == run_dir / WORK
    shown = run_dir / log_file.name if log_file is not None and is_ours else None
    with logs.configured(log_file, shown), _sigterm_as_exit():
        try:
            yield
        except BaseException as error:
            # The console shows the error. The log file also needs it, with a traceback unless the user caused it.
            is_stopped = isinstance(error, Preempted | SystemExit | KeyboardInterrupt)
            is_bug = not is_stopped and not isinstance(error, UserError)
            level = logging.WARNING if is_stopped else logging.ERROR
            log.log(level, "%s", _reason(error), exc_info=is_bug, extra=logs.FILE_ONLY)
            launched.report_failure(error)
            raise


def _run(request: StageRequest, body: Body) -> Manifest | None:
    is_main, identity = os.environ.get("RANK", "0") == "0", request.identity
    run = RunDirectory(request.run_dir.absolute(), identity)
    with run.lock() if is_main else nullcontext():
        faults.point("stage.locked")
        if is_main:
            launched.start_attempt()
            run.prepare()
        done = run.find_done(has_lock=is_main) if is_main or is_done(run.work) else None
        if done is not None:
            log.info("%s/%s: already done", identity.stage, identity.name)
            if is_main:
                run.republish(done)
                mlflow_writer.catch_up(TrackedRun(run.work, **_known_by(identity)))
            return done
        inputs = _open_inputs(request, identity)
        run.work.mkdir(parents=True, exist_ok=True)  # for a rank that arrives before rank 0
        if is_main:
            return _run_and_publish(request, run, inputs, body)
        body(_context(request, run, inputs, Journal(None), is_main=False))
        return None


def _run_and_publish(request: StageRequest, run: RunDirectory, inputs: dict[str, Input], body: Body) -> Manifest:
    with closing(Journal(run.journal)) as journal:
        journal.event("stage_started", host=socket.gethostname(), pid=os.getpid(), **_about(inputs, run))
        tracker = mlflow_writer.open_run(TrackedRun(run.work, **_known_by(run.identity)))
        try:
            result = body(_context(request, run, inputs, journal, is_main=True))
            journal.event("stage_finished", summary=finite(result.summary))
            journal.flush_to_disk()
            provenance.write(run.work / PROVENANCE, run.identity.fingerprint, run.journal)
            manifest = run.publish(result.files, result.summary)
        except BaseException as error:
            _stop(error, journal, tracker)
        tracker.finish()
        log.info("%s/%s: done, %d files", manifest.stage, manifest.name, len(manifest.files))
        return manifest


def _stop(error: BaseException, journal: Journal, tracker: mlflow_writer.MlflowWriter) -> NoReturn:
    """Record how the stage ended, as far as that is still possible, and raise the error again."""
    failure_class = failure_class_of(error)
    event = {None: "stage_stopped", "preempted": "stage_preempted"}.get(failure_class, "stage_failed")
    is_stopped = event != "stage_failed"
    with suppress(OSError):
        what = _reason(error) if is_stopped else f"{type(error).__name__}: {error}"
        journal.event(event, error=what[:500], **({} if is_stopped else {"failure_class": failure_class}))
    tracker.finish(mlflow_writer.STOP_WAIT_S if is_stopped else mlflow_writer.WAIT_S)
    raise error


def _reason(error: BaseException) -> str:
    """Return the message of an error, or a sentence for a process that was interrupted."""
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return "interrupted before the end; the same command goes on from what was committed"
    return str(error) or type(error).__name__


def _context(
    request: StageRequest, run: RunDirectory, inputs: dict[str, Input], journal: Journal, *, is_main: bool
) -> StageContext:
    identity = run.identity
    return StageContext(
        stage=identity.stage,
        name=identity.name,
        fingerprint=identity.fingerprint,
        config={key: value for key, value in identity.config.items() if key != PLUGINS},
        inputs=inputs,
        run_dir=run.path,
        work=run.work,
        journal=journal,
        log=logging.getLogger(f"{logs.PACKAGES[0]}.{identity.stage}"),
        runtime=request.runtime,
        is_main=is_main,
        kinds=Kinds.read(plugin_paths(identity.config), identity.name),
    )


def _known_by(identity: Identity) -> dict[str, Any]:
    return {key: getattr(identity, key) for key in IDENTITY_KEYS}


def _about(inputs: dict[str, Input], run: RunDirectory) -> dict[str, Any]:
    """Return the description of the run for its journal, from which MLflow gets it before there is a manifest."""
    return {
        "identity": _known_by(run.identity),
        "inputs": {role: os.path.relpath(given.work, run.work) for role, given in inputs.items()},
        "commit": (provenance.git_state() or {}).get("commit"),
        "invocation": current_invocation(),
    }


def _open_inputs(request: StageRequest, identity: Identity) -> dict[str, Input]:
    """Return the inputs by role after a check of their files. A wait for missing ones takes at most `default_wait_s`.

    Raises: IdentityError for other roles than in the identity; ManifestError for a missing or wrong file.
    """
    if identity.upstream.keys() != request.inputs.keys():
        wanted, told = (", ".join(sorted(roles)) or "none" for roles in (identity.upstream, request.inputs))
        raise IdentityError(
            f"{request.run_dir}: the inputs of the identity are {wanted}, and the run directories given are those of "
            f"{told}; correct `inputs` of the identity, which `implicit-llm explain --identity` prints"
        )
    inputs = {}
    for role, path in request.inputs.items():
        work = work_directory(path.absolute(), identity.upstream[role])
        if committed(work) is None:
            wait_for_files([work / COMMIT])
        manifest = committed(work) or work / COMMIT
        given = inputs[role] = Input(path.absolute(), Manifest.read(manifest))
        _check_input(role, given, manifest, identity.upstream[role])
        wait_for_files(given.dir / record.path for record in given.manifest.records(request.reads))
        given.manifest.verify(given.dir, request.reads)
    return inputs


def _check_input(role: str, given: Input, path: Path, wanted: str) -> None:
    manifest = given.manifest
    made = compute_fingerprint(manifest.stage, manifest.config, manifest.code, manifest.upstream)
    for found in (manifest.fingerprint, made):  # in the manifest, and computed from its identity
        if found != wanted:
            raise ManifestError(
                f"{path}: as input '{role}' expected fingerprint {wanted[:16]}, found {found[:16]}; "
                f"type `{remove_command(given.dir)}` and run the workflow again",
                path,
            )


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Make SIGTERM raise SystemExit, unless it has a handler, to delete temporary files and update MLflow."""
    is_main = threading.current_thread() is threading.main_thread()
    with ExitStack() as stack:
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            stack.callback(signals.restore, signal.SIGTERM, signals.handle(signal.SIGTERM, _exit))
        yield


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    faults.point("stage.sigterm")
    sys.exit(128 + number)
