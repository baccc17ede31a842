"""The thread that brings a journal to MLflow beside a stage, and its store and how that is rebuilt."""

import logging
import multiprocessing
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.environment_variables import MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from implicit_llm_contracts.runs.journal import Journal
from implicit_llm_jobs.tracking import mlflow_writer
from implicit_llm_jobs.tracking.mlflow_bridge import Bridge, BridgeState
from implicit_llm_jobs.tracking.mlflow_store import (
    TrackingError,
    default_uri,
    initialise,
    prepare_environment,
    sqlite_path,
)
from implicit_llm_jobs.tracking.mlflow_writer import MlflowWriter, catch_up, open_run
from implicit_llm_jobs.tracking.tracked_run import TrackedRun
from tests.limits import wait_until
from tests.store_copies import copying
from tests.unit.tracking import small_stages
from tests.unit.tracking.small_stages import make_chain, make_model
from tests.unit.tracking.stored import Stored, another_database

LOSS = "SELECT step, value FROM metrics WHERE key = 'data/loss' ORDER BY step"


@pytest.fixture
def run(results: Path) -> TrackedRun:
    run_dir = results / "demo" / "data" / "d"
    run = TrackedRun(run_dir / "work" / "f00d", "data", "d", "f00d" * 16, {"length": 4})
    Journal(run.journal).metrics(1, {"loss": 1.0})
    return run


def finish(run: TrackedRun, writer: MlflowWriter) -> None:
    (run.work / "manifest.json").touch()
    writer.finish()


def rows(results: Path, query: str) -> list[tuple]:
    with closing(sqlite3.connect(results / "mlflow.db")) as connection:
        return list(connection.execute(query))


def test_a_writer_brings_the_journal_and_ends_with_the_status(
    run: TrackedRun, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_writer, "INTERVAL_S", 0.05)
    writer = open_run(run)
    wait_until(lambda: rows(results, LOSS) == [(1, 1.0)])
    Journal(run.journal).metrics(2, {"loss": 0.5})
    finish(run, writer)
    assert rows(results, LOSS) == [(1, 1.0), (2, 0.5)]
    assert rows(results, "SELECT status FROM runs") == [("FINISHED",)]


def test_nothing_is_left_of_the_levels_that_keep_mlflow_quiet(
    run: TrackedRun, capfd: pytest.CaptureFixture[str]
) -> None:
    import mlflow  # noqa: F401

    levels = {name: logging.getLogger(name).level for name in ("mlflow", "alembic", "sqlalchemy")}
    finish(run, open_run(run))
    assert {name: logging.getLogger(name).level for name in levels} == levels
    assert capfd.readouterr() == ("", "")


def test_a_store_that_fails_is_one_warning_and_a_later_writer_makes_it_good(
    run: TrackedRun, results: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = (results / "mlflow.db").read_bytes()
    (results / "mlflow.db").write_bytes(b"this is no database" * 100)
    finish(run, open_run(run))
    assert BridgeState.read(run.work) is None
    (run.work / "mlflow.json").write_text('{"run_id": "a"}')  # damaged: without its key
    assert BridgeState.read(run.work) is None
    (run.work / "mlflow.json").unlink()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "found no SQLite database" in warning
    assert warning.endswith(f"the run goes on, its metrics wait in {run.journal}")
    (results / "mlflow.db").write_bytes(good)
    catch_up(run)
    assert rows(results, LOSS) == [(1, 1.0)]
    assert rows(results, "SELECT status FROM runs") == [("FINISHED",)]


def test_a_store_that_does_not_answer_is_waited_for_once(
    run: TrackedRun, results: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_writer, "WAIT_S", 0.05)
    monkeypatch.setattr(mlflow_writer, "INTERVAL_S", 0.05)
    with closing(sqlite3.connect(results / "mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        finish(run, open_run(run))
        other.execute("ROLLBACK")
    assert [record.levelname for record in caplog.records if "no answer within" in record.getMessage()] == ["WARNING"]
    wait_until(lambda: rows(results, "SELECT status FROM runs") == [("FINISHED",)])
    assert rows(results, LOSS) == [(1, 1.0)]


def test_a_complete_run_is_not_opened_again(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(run, open_run(run))
    opened: list[TrackedRun] = []
    monkeypatch.setattr(mlflow_writer, "Bridge", opened.append)
    catch_up(run)
    assert opened == []


def test_a_job_that_was_stopped_with_its_manifest_committed_has_finished(run: TrackedRun, results: Path) -> None:
    Journal(run.journal).event("stage_stopped")
    open_run(run).finish()
    assert rows(results, "SELECT status FROM runs") == [("KILLED",)]
    (run.work / "manifest.json").touch()
    catch_up(run)
    assert rows(results, "SELECT status FROM runs") == [("FINISHED",)]


@pytest.mark.parametrize("num_processes", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_processes_that_start_together_make_one_store_and_each_its_run(tmp_path: Path, num_processes: int) -> None:
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  (once, for all forks)

    results = tmp_path / "results"
    results.mkdir()
    start = multiprocessing.get_context("fork")
    together = start.Barrier(num_processes)

    def work(number: int) -> None:
        run_dir = results / "demo" / "data" / f"d{number}"
        run = TrackedRun(run_dir / "work" / "f00d", "data", f"d{number}", "f00d" * 16, {})
        journal = Journal(run.journal)
        journal.event("stage_started")
        journal.metrics(1, {"loss": 1.0})
        (run.work / "manifest.json").touch()
        together.wait(60)
        Bridge(run).bring()

    processes = [start.Process(target=work, args=(number,)) for number in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0] * num_processes
    assert [path.name for path in results.glob("mlflow.db*")] == ["mlflow.db"]
    assert rows(results, "SELECT name, count(*) FROM experiments GROUP BY name") == [("Default", 1), ("demo", 1)]
    names = sorted(f"data/d{number}" for number in range(num_processes))
    assert rows(results, "SELECT name, status FROM runs ORDER BY name") == [(name, "FINISHED") for name in names]
    assert rows(results, "SELECT count(*) FROM metrics") == [(num_processes,)]


@pytest.mark.parametrize(
    ("content", "found"),
    [(b"x" * 200, "found no SQLite database"), (another_database(), "found another database")],
)
def test_a_file_that_is_no_store_is_refused_and_kept(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "mlflow.db"
    path.write_bytes(content)
    with pytest.raises(TrackingError, match=rf"{found}.*implicit-llm mlflow rebuild --results {tmp_path}`"):
        initialise(f"sqlite:///{path}")
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["exp#1", "a%20b", "q?x", "plain name"])
def test_a_store_lies_where_its_folder_is_whatever_characters_its_path_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    results = tmp_path / name / "results"
    for _ in range(2):  # made, and found again
        initialise(default_uri(results))
    assert sqlite_path(default_uri(results)) == results / "mlflow.db"
    MlflowClient(tracking_uri=default_uri(results)).create_experiment("mine")
    with closing(sqlite3.connect(results / "mlflow.db")) as connection:
        assert ("mine",) in connection.execute("SELECT name FROM experiments").fetchall()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_mlflow_prints_no_uri_into_the_log_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "false")
    prepare_environment()
    assert MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.get() is True


def test_a_server_initialises_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    initialise("http://tracking.invalid:5000")
    assert list(tmp_path.iterdir()) == []


def test_a_transaction_that_a_killed_process_left_is_rolled_back(tmp_path: Path, empty_store: Path) -> None:
    (tmp_path / "dying").mkdir()
    path = shutil.copyfile(empty_store, tmp_path / "dying" / "mlflow.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size = 1")  # so that pages reach the file before the commit
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE half_made (text TEXT)")
        connection.executemany("INSERT INTO half_made VALUES (?)", [("x" * 2000,)] * 200)
        left = shutil.copytree(path.parent, tmp_path / "left") / "mlflow.db"
        assert left.with_name("mlflow.db-journal").stat().st_size > 0
    initialise(f"sqlite:///{left}")
    assert not left.with_name("mlflow.db-journal").exists()
    with closing(sqlite3.connect(left)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master WHERE name = 'half_made'").fetchall() == []
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """Results of three finished runs and one that was preempted, all in one invocation, tracked as they ran."""
    results = tmp_path_factory.mktemp("made") / "results"
    results.mkdir()
    shutil.copyfile(empty_store, results / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        small_stages.start_invocation(patch)
        make_chain(results)
        with pytest.raises(SystemExit):
            make_model(results, {}, small_stages.preempted, run="other-s0")
    return results


@pytest.fixture
def tracked(made: Path, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(SqlAlchemyStore, "__init__", copying(empty_store))
    return Path(shutil.copytree(made, tmp_path / "results"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda store: b"this is no database" * 100,
        lambda store: bytes(100) + store[100:],
        lambda store: store[: len(store) // 2],
        lambda store: store[:20_000] + bytes(60_000) + store[80_000:],
        lambda store: another_database(),
    ],
    ids=["overwritten", "no header", "truncated", "pages overwritten", "another database"],
)
def test_a_damaged_store_is_refused_and_rebuilt_as_it_was_once_it_is_away(
    tracked: Path, damage: Callable[[bytes], bytes]
) -> None:
    before, store = Stored(tracked).content(), tracked / "mlflow.db"
    damaged = damage(store.read_bytes())
    store.write_bytes(damaged)
    with pytest.raises(TrackingError, match=rf"type `mv {store} {store}.bad && implicit-llm mlflow rebuild --results"):
        mlflow_writer.rebuild(tracked)
    assert store.read_bytes() == damaged
    store.rename(tracked / "mlflow.db.bad")
    done = mlflow_writer.rebuild(tracked)
    assert (done.num_runs, done.failed) == (4, ())
    assert Stored(tracked).content() == before


def test_only_the_directory_of_all_results_is_rebuilt(tracked: Path) -> None:
    (experiment,) = (path for path in tracked.iterdir() if path.is_dir() and any(path.rglob("journal.jsonl")))
    before = sorted(tracked.parent.rglob("*"))
    for folder in (experiment, experiment / "train", tracked.parent):
        with pytest.raises(TrackingError, match=rf"^{folder}: .*; type --results {tracked}$"):
            mlflow_writer.rebuild(folder)
    assert sorted(tracked.parent.rglob("*")) == before


def delete(stored: Stored, tracked: Path) -> None:
    stored.client.delete_run(stored.runs["train/s3-implicit-s3/free"].info.run_id)
    stored.client.delete_experiment(stored.experiment_ids[0])


@pytest.mark.parametrize(
    ("lose", "num_known"),
    [
        (lambda stored, tracked: (tracked / "mlflow.db").rename(tracked / "lost.db"), 0),
        (lambda stored, tracked: None, 4),
        (delete, 4),
    ],
    ids=["the store", "nothing", "a run and the experiment, deleted in MLflow"],
)
def test_what_is_lost_comes_back_and_what_is_there_stays(
    tracked: Path, lose: Callable[[Stored, Path], object], num_known: int
) -> None:
    before = Stored(tracked)
    content = before.content()
    lose(before, tracked)
    done = mlflow_writer.rebuild(tracked)
    assert (done.num_runs, done.failed) == (4, ())
    after = Stored(tracked)
    assert after.content() == content
    known = {run.info.run_id for run in before.runs.values()} & {run.info.run_id for run in after.runs.values()}
    assert (len(after.runs), len(known)) == (4, num_known)
    assert [path.name for path in tracked.glob("mlflow.db*")] == ["mlflow.db"]


def test_a_run_that_goes_on_while_its_store_is_replaced_goes_on_in_the_new_one(tracked: Path) -> None:
    (tracked / "mlflow.db").unlink()

    def work(context: small_stages.StageContext) -> small_stages.StageResult:
        context.journal.metrics(1, {"loss": 1.0})
        wait_until(points)
        (tracked / "mlflow.db").write_bytes(b"this is no database" * 100)
        (tracked / "mlflow.db").rename(tracked / "mlflow.db.bad")
        mlflow_writer.rebuild(tracked)
        context.journal.metrics(2, {"loss": 0.5})
        return small_stages.StageResult([], {})

    def points() -> list[tuple[int, float]]:
        if not (tracked / "mlflow.db").exists():
            return []
        stored = Stored(tracked)
        return stored.history("train/live-s0/free", "loss") if "train/live-s0/free" in stored.runs else []

    make_model(tracked, {}, work, run="live-s0")
    assert points() == [(1, 1.0), (2, 0.5)]
    assert len(Stored(tracked).runs) == 5


def test_a_damaged_journal_is_named_and_the_others_are_brought(tracked: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tracked / "mlflow.db").unlink()
    journal = next((tracked / "demo" / "data").rglob("journal.jsonl"))
    journal.write_text(f"nonsense\n{journal.read_text()}")
    done = mlflow_writer.rebuild(tracked)
    assert done.failed == ("data/s3-train",)
    assert done.num_runs == 3
    assert "journal.jsonl: line 1 is damaged" in caplog.text
