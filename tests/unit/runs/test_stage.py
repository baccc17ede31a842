"""The frame that runs a stage, and what a job tells of itself: why it fails, how far it is, what it ran on."""

import errno
import io
import json
import logging
import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from implicit_llm.kernels.selection import KernelsUnavailable
from implicit_llm.models.errors import ModelConfigError
from implicit_llm_contracts.errors import ConfigError, Preempted, UserError
from implicit_llm_contracts.runs import journal, launched
from implicit_llm_contracts.runs.atomic import StorageError, read_object
from implicit_llm_contracts.runs.identity import Identity, IdentityError
from implicit_llm_contracts.runs.logs import wants_bar, without_password
from implicit_llm_contracts.runs.manifest import Manifest, ManifestError
from implicit_llm_contracts.runs.places import PROJECT_DIR
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_jobs import provenance
from implicit_llm_jobs.progress import ProgressLog
from implicit_llm_jobs.provenance import attempts, git_state
from implicit_llm_jobs.stage import StageRequest, run_stage
from tests.refusals import refused

MakeIdentity = Callable[..., Identity]


class Body:
    """Writes one file, and the digest-free facts of its context into it; counts its calls."""

    def __init__(self) -> None:
        self.contexts: list[StageContext] = []

    def __call__(self, context: StageContext) -> StageResult:
        self.contexts.append(context)
        context.journal.metrics(1, {"loss": 0.5})
        (context.work / "out.txt").write_text(json.dumps(context.config))
        return StageResult(["out.txt"], {"loss": 0.5})


@pytest.fixture
def body() -> Body:
    return Body()


def events(run_path: Path) -> list[str]:
    records = [record for path in run_path.glob("work/*/journal.jsonl") for record in journal.read_records(path)]
    return [record["name"] for record in records if record["kind"] == "event"]


@pytest.fixture
def data(tmp_path: Path, make_identity: MakeIdentity) -> Path:
    """The run directory of a data set."""
    path = tmp_path / "results" / "demo" / "data" / "d"
    run_stage(StageRequest(path, make_identity("data", "d", length=4)), Body())
    return path


def commit_of(run_dir: Path) -> Path:
    return next(run_dir.glob("work/*/commit.json"))


@pytest.fixture
def with_data(run_path: Path, data: Path, make_identity: MakeIdentity) -> StageRequest:
    """A stage that reads the data set."""
    upstream = {"data": Manifest.read(commit_of(data)).fingerprint}
    return StageRequest(run_path, make_identity(upstream=upstream), {"data": data})


def test_a_stage_publishes_its_manifest_and_provenance_and_another_start_only_restores_what_was_deleted(
    run_path: Path, make_identity: MakeIdentity, body: Body
) -> None:
    request = StageRequest(run_path, make_identity(seed=1), runtime={"threads": 2})
    manifest = run_stage(request, body)
    assert Manifest.read(run_path / "manifest.json") == manifest
    assert manifest.summary == {"loss": 0.5}
    provenance = json.loads((run_path / "provenance.json").read_text())
    assert (provenance["fingerprint"], len(provenance["attempts"])) == (manifest.fingerprint, 1)
    assert events(run_path) == ["stage_started", "stage_finished"]
    before = {name: (run_path / name).read_bytes() for name in ("manifest.json", "provenance.json")}
    for name in before:
        (run_path / name).unlink()
    run_stage(request, body)
    assert {name: (run_path / name).read_bytes() for name in before} == before
    (context,) = body.contexts
    assert (context.config, context.runtime, context.stage) == ({"seed": 1}, {"threads": 2}, "train")
    assert context.is_main


def test_a_changed_identity_starts_afresh_and_the_old_one_is_taken_up_again(
    run_path: Path, make_identity: MakeIdentity, body: Body
) -> None:
    published = []
    for seed in (0, 1, 0):
        run_stage(StageRequest(run_path, make_identity(seed=seed)), body)
        provenance = json.loads((run_path / "provenance.json").read_text())
        published.append(Manifest.read(run_path / "manifest.json"))
        assert provenance["fingerprint"] == published[-1].fingerprint
    assert [context.config["seed"] for context in body.contexts] == [0, 1]
    assert published[0] == published[2] != published[1]


@pytest.fixture
def forced(run_path: Path, make_identity: MakeIdentity, body: Body) -> StageRequest:
    """A finished run that is to be computed again."""
    work = run_path / "work" / make_identity().fingerprint[:16]
    request = StageRequest(run_path, make_identity(), log=work / "job.log")
    run_stage(request, body)
    (work / "again").touch()
    return request


def test_a_forced_run_keeps_its_old_result_until_the_new_one_is_there_and_resumes_after_a_stop(
    run_path: Path, forced: StageRequest, body: Body
) -> None:
    def stop(context: StageContext) -> StageResult:
        (context.work / "checkpoint").touch()
        raise Preempted("asked to stop")

    with pytest.raises(Preempted):
        run_stage(forced, stop)
    assert [path.parent.suffix for path in run_path.glob("work/*/out.txt")] == [".previous"]
    assert not list(run_path.glob("work/*/again"))
    run_stage(forced, body)
    assert (body.contexts[1].work / "checkpoint").exists()
    assert [path.parent for path in run_path.glob("work/*/out.txt")] == [body.contexts[1].work]
    run_stage(forced, body)
    assert len(body.contexts) == 2, "it is asked for once"
    text = (run_path / "job.log").read_text()
    assert [text.count(part) for part in ("done, 1 files", "to be computed again", "already done")] == [2, 1, 1]


def test_other_ranks_of_a_forced_run_do_not_take_its_old_result(
    forced: StageRequest, body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    run_stage(forced, body)
    assert len(body.contexts) == 2


def test_other_ranks_make_a_damaged_result_again_and_leave_it_to_rank_0(
    run_path: Path, make_identity: MakeIdentity, body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = StageRequest(run_path, make_identity())
    run_stage(request, body)
    out = body.contexts[0].work / "out.txt"
    out.write_text("damaged")
    monkeypatch.setenv("RANK", "1")
    run_stage(request, body)
    assert len(body.contexts) == 2
    assert not out.with_name("out.txt.bad").exists()


def test_inputs_are_handed_over_with_their_work_directory(with_data: StageRequest, data: Path, body: Body) -> None:
    run_stage(with_data, body)
    given = body.contexts[0].inputs["data"]
    assert (given.work / "out.txt").read_text() == '{"length": 4}'
    assert [point.values for point in journal.read(given.journal)] == [{"loss": 0.5}]
    assert given.manifest == Manifest.read(commit_of(data))


LOST = r"out\.txt: expected 13 bytes, found no file; type `rm -f"


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda out, manifest: out.unlink(), LOST),
        (lambda out, manifest: edit(out, "4", "5"), r"out\.txt: expected sha256 "),
        (lambda out, manifest: edit(manifest, '"length": 4', '"length": 8'), "expected fingerprint .*, found"),
        (
            lambda out, manifest: replace(Manifest.read(manifest), fingerprint="0" * 64).write(manifest),
            r"as input 'data' expected fingerprint [1-9a-f]\w{15}, found 0{16}",
        ),
    ],
)
def test_a_damaged_input_stops_the_stage_before_its_body(
    with_data: StageRequest,
    data: Path,
    body: Body,
    damage: Callable[[Path, Path], None],
    error: str,
) -> None:
    damage(next(data.glob("work/*/out.txt")), commit_of(data))
    with refused(error, ManifestError):
        run_stage(with_data, body)
    assert body.contexts == []
    assert not (with_data.run_dir / "manifest.json").exists()


def test_a_missing_and_an_unknown_input_are_named(run_path: Path, make_identity: MakeIdentity, body: Body) -> None:
    with refused("identity are data, and the run directories given are those of none; correct", IdentityError):
        run_stage(StageRequest(run_path, make_identity(upstream={"data": "0"})), body)
    with refused("identity are none, and the run directories given are those of extra; correct", IdentityError):
        run_stage(StageRequest(run_path, make_identity(), {"extra": run_path}), body)


class OutOfMemoryError(RuntimeError):
    """Called like the one of torch."""


@pytest.mark.parametrize(
    ("error", "event", "failure_class"),
    [
        (UserError("no such\nfile"), "stage_failed", "user"),
        (StorageError(28, "the disk is full"), "stage_failed", "quota"),
        (OSError(116, "Stale file handle"), "stage_failed", "quota"),
        (OutOfMemoryError("tried to allocate"), "stage_failed", "oom"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), "stage_failed", "oom"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "stage_failed", "oom"),
        (ZeroDivisionError("by zero"), "stage_failed", "bug"),
        (ModelConfigError("no such field"), "stage_failed", "user"),
        (ConfigError("no such mode"), "stage_failed", "user"),
        (KernelsUnavailable("no triton"), "stage_failed", "env"),
        (Preempted("stopped after step 3"), "stage_preempted", "preempted"),
        (SystemExit(75), "stage_preempted", "preempted"),
        (SystemExit(143), "stage_stopped", None),
        (KeyboardInterrupt(), "stage_stopped", None),
    ],
)
def test_what_a_body_raises_comes_out_with_its_class_and_nothing_is_published(
    run_path: Path,
    make_identity: MakeIdentity,
    body: Body,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    event: str,
    failure_class: str | None,
) -> None:
    def fail(context: StageContext) -> StageResult:
        (context.work / "checkpoint").write_text("step 3")
        raise error

    log, status = run_path.with_suffix(".log"), run_path.with_suffix(".status")
    monkeypatch.setenv("SUBMITIT_JOB_STATUS", str(status))
    with pytest.raises(type(error)):
        run_stage(StageRequest(run_path, make_identity(), log=log), fail)
    level = "ERROR" if event == "stage_failed" else "WARNING"  # `status` looks for errors
    assert re.search(rf"{level} \S+: \S", log.read_text())
    assert events(run_path) == ["stage_started", event]
    told = {"failure_class": failure_class, "message": " ".join(str(error).split())}
    assert read_object(status) == ({} if failure_class is None else told)
    assert sorted(path.name for path in run_path.iterdir()) == ["work"]
    run_stage(StageRequest(run_path, make_identity()), body)
    assert (body.contexts[0].work / "checkpoint").read_text() == "step 3"
    assert len(json.loads((run_path / "provenance.json").read_text())["attempts"]) == 2


def test_sigterm_unwinds_the_stage_and_leaves_the_handler_as_it_was(
    run_path: Path, make_identity: MakeIdentity
) -> None:
    def terminate(context: StageContext) -> StageResult:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal did not arrive")

    with pytest.raises(SystemExit) as caught:
        run_stage(StageRequest(run_path, make_identity()), terminate)
    assert caught.value.code == 143
    assert events(run_path) == ["stage_started", "stage_stopped"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_journal_that_stays_unwritten_stops_the_stage_before_it_publishes(
    run_path: Path, make_identity: MakeIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(context: StageContext) -> StageResult:
        monkeypatch.setattr(os, "write", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        context.journal.metrics(1, {"loss": 1.0})
        return StageResult([], {})

    with pytest.raises(StorageError, match="the disk is full"):
        run_stage(StageRequest(run_path, make_identity()), fill_the_disk)
    assert not (run_path / "manifest.json").exists()


def test_other_ranks_run_the_body_and_write_nothing_of_the_run(
    run_path: Path, make_identity: MakeIdentity, body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run_stage(StageRequest(run_path, make_identity()), body) is None
    assert body.contexts[0].is_main is False
    assert [path.name for path in run_path.rglob("*") if path.is_file()] == ["out.txt"]


def test_the_log_file_is_appended_with_times_and_shows_the_traceback_of_a_bug(
    run_path: Path, make_identity: MakeIdentity, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run_path / "job.log"

    def fail(context: StageContext) -> StageResult:
        context.log.info("working")
        logging.getLogger("somelibrary").info("chatter")
        logging.getLogger("somelibrary").warning("odd")
        raise ZeroDivisionError("bug")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            run_stage(StageRequest(run_path, make_identity(), log=log), fail)
    lines = [re.sub(r"^20\S{17}Z ", "", line) for line in log.read_text().splitlines()]
    shown = capsys.readouterr().err
    assert [line for line in lines if re.search("working|chatter|odd", line)] == [
        "INFO implicit_llm.train: working",
        "WARNING somelibrary: odd",
    ] * 2
    assert "ZeroDivisionError: bug" in lines
    assert [line.partition(": ")[2] for line in shown.splitlines() if "working" in line] == ["working"] * 2
    assert not re.search("odd|bug", shown)


def test_the_log_that_snakemake_deletes_has_the_last_start_and_the_readable_one_all_starts(
    run_path: Path, make_identity: MakeIdentity, body: Body
) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers), logging.getLogger("implicit_llm").level)
    log = run_path / "work" / make_identity().fingerprint[:16] / "job.log"
    request = StageRequest(run_path, make_identity(), log=log)
    for _ in range(3):
        run_stage(request, body)
        lines = (run_path / "job.log").read_text().splitlines()
        last = log.read_text().splitlines()
        assert sum("done" in line for line in last) == 1
        assert lines[-len(last) :] == last
        log.unlink()
    ends = [line.rpartition(": ")[2].partition(",")[0] for line in lines if "done" in line]
    assert ends == ["done", "already done", "already done"]
    assert (root.level, list(root.handlers), logging.getLogger("implicit_llm").level) == before


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "job" / "status.json"
    monkeypatch.setenv("SUBMITIT_JOB_STATUS", str(path))
    return path


def read(path: Path) -> Any:
    return json.loads(path.read_bytes()) if path.exists() else None


def test_progress_stays_over_failures_and_a_reason_goes_with_the_next_attempt(
    run_path: Path, make_identity: Callable[..., Identity], status: Path
) -> None:
    def fail_after_a_step(context: StageContext) -> StageResult:
        launched.report_progress(10)
        raise UserError("broken")

    def look(context: StageContext) -> StageResult:
        assert read(status) == {"progress": 10}
        return StageResult([], {})

    with pytest.raises(UserError):
        run_stage(StageRequest(run_path, make_identity()), fail_after_a_step)
    assert read(status) == {"progress": 10, "failure_class": "user", "message": "broken"}
    run_stage(StageRequest(run_path, make_identity()), look)


def test_the_first_reason_is_the_one(status: Path) -> None:
    launched.report_failure(StorageError(28, "the disk is full"))
    launched.report_failure(RuntimeError("connection closed by peer"))
    assert read(status)["failure_class"] == "quota"


def test_a_file_that_cannot_be_written_or_read_stops_nothing(status: Path) -> None:
    status.parent.mkdir()
    status.write_text("no JSON")
    launched.report_progress(3)
    assert read(status) == {"progress": 3}
    status.unlink()
    status.mkdir()
    launched.report_progress(4)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_is_shown_on_a_terminal_and_ends_with_one_line_of_the_final_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    monkeypatch.setattr("implicit_llm_jobs.progress.LAST_INTERVAL_S", -1.0)
    with caplog.at_level(logging.INFO):
        progress = ProgressLog("data mode", "sample", 4)
        for done in (1, 3, 4):
            progress.tell(done, lambda: "loss 2.5")
    assert "data mode" in terminal.getvalue()
    assert "4/4" in terminal.getvalue()
    assert [getattr(record, "file_only", False) for record in caplog.records] == [True, True, False]
    assert caplog.records[-1].message.startswith("data mode: sample 4/4, loss 2.5, ")


def test_without_a_terminal_there_are_lines_and_no_bar(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        progress = ProgressLog("data mode", "sample", 2)
        progress.tell(1, lambda: "not due")
        progress.tell(2, lambda: "loss 2.5")
    assert capsys.readouterr().err == ""
    (record,) = caplog.records
    assert record.message.startswith("data mode: sample 2/2, loss 2.5, ")


@pytest.mark.parametrize(
    ("stderr", "env", "progress", "expected"),
    [
        (Terminal(), {}, "auto", True),
        (Terminal(), {"SNAKEMAKE_PROFILE": "profiles/local"}, "auto", False),
        (Terminal(), {"SNAKEMAKE_PROFILE": "profiles/local"}, "bar", True),
        (io.StringIO(), {}, "auto", False),
    ],
)
def test_a_bar_is_for_terminals_outside_of_snakemake(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, env: dict[str, str], progress: str, expected: bool
) -> None:
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    os.environ |= env  # the variables are put back after each test
    assert wants_bar(progress) is expected


START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("records", "now_s", "busy"),
    [
        # An attempt that was cut off lasts to its last record, and the last one until now.
        (
            [("stage_started", 0), ("checkpoint", 40), ("stage_started", 100), ("checkpoint", 110)],
            130,
            {0: 40, 100: 30},
        ),
        ([("stage_started", 0)], 2.5, {0: 2.5}),
    ],
)
def test_the_seconds_of_each_attempt_are_read_from_its_journal(
    tmp_path: Path, records: list[tuple[str, float]], now_s: float, busy: dict[float, float]
) -> None:
    times = {at: (START + timedelta(seconds=at)).isoformat() for _, at in records}
    lines = [json.dumps({"kind": "event", "name": name, "time": times[at], "host": "h"}) + "\n" for name, at in records]
    (tmp_path / "journal.jsonl").write_text("".join(lines))
    found = attempts(tmp_path / "journal.jsonl", START + timedelta(seconds=now_s))
    assert {attempt["started"]: attempt["busy_s"] for attempt in found} == {times[at]: s for at, s in busy.items()}


@pytest.fixture
def no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree has no history, as a copy on another machine."""
    monkeypatch.setattr(provenance, "PROJECT_DIR", tmp_path)


@pytest.mark.usefixtures("no_checkout")
def test_where_git_does_not_know_the_commit_a_job_records_the_one_it_was_told(
    run_path: Path, make_identity: MakeIdentity, body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPLICIT_LLM_COMMIT", "c" * 40)
    run_stage(StageRequest(run_path, make_identity()), body)
    assert read_object(run_path / "provenance.json")["git"] == {"commit": "c" * 40, "is_dirty": None}


@pytest.mark.usefixtures("no_checkout")
def test_a_job_that_is_told_a_branch_for_a_commit_ends_before_its_work_begins(
    run_path: Path, make_identity: MakeIdentity, body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPLICIT_LLM_COMMIT", "main")
    with refused("IMPLICIT_LLM_COMMIT: 'main' is no commit; give what `git rev-parse HEAD` prints", UserError):
        run_stage(StageRequest(run_path, make_identity()), body)
    assert body.contexts == []


def test_the_commit_is_that_of_the_checkout_which_the_code_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["git", "-C", str(PROJECT_DIR), "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    monkeypatch.setenv("IMPLICIT_LLM_COMMIT", "c" * 40)
    found = git_state()
    assert found["commit"] == commit
    assert isinstance(found["is_dirty"], bool)


def test_a_password_is_hidden_whole_although_it_has_an_at_sign() -> None:
    assert without_password("see http://me:p@ss@host:5000/a@b?c@d") == "see http://***@host:5000/a@b?c@d"
    assert without_password("http://host?c@d") == "http://host?c@d"
