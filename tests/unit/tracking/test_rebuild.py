import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from implicit_llm_jobs.tracking import mlflow_writer
from implicit_llm_jobs.tracking.mlflow_store import TrackingError
from tests.store_copies import copying
from tests.unit.tracking import small_stages
from tests.unit.tracking.small_stages import make_chain, make_model
from tests.unit.tracking.stored import Stored, another_database


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
def results(made: Path, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
def test_a_damaged_store_is_moved_aside_and_rebuilt_as_it_was(results: Path, damage: Callable[[bytes], bytes]) -> None:
    before = Stored(results).content()
    damaged = damage((results / "mlflow.db").read_bytes())
    (results / "mlflow.db").write_bytes(damaged)
    done = mlflow_writer.rebuild(results)
    assert (done.num_runs, done.failed) == (4, ())
    assert done.set_aside == results / "mlflow.db.bad-1"
    assert (results / "mlflow.db.bad-1").read_bytes() == damaged
    assert Stored(results).content() == before


def delete(stored: Stored, results: Path) -> None:
    stored.client.delete_run(stored.runs["train/s3-implicit-s3/free"].info.run_id)
    stored.client.delete_experiment(stored.experiment_ids[0])


@pytest.mark.parametrize(
    ("lose", "num_known"),
    [
        (lambda stored, results: (results / "mlflow.db").rename(results / "lost.db"), 0),
        (lambda stored, results: None, 5),  # four jobs and their invocation
        (delete, 5),
    ],
    ids=["the store", "nothing", "a run and the experiment, deleted in MLflow"],
)
def test_what_is_lost_comes_back_and_what_is_there_stays(
    results: Path, lose: Callable[[Stored, Path], object], num_known: int
) -> None:
    before = Stored(results)
    content = before.content()
    lose(before, results)
    done = mlflow_writer.rebuild(results)
    assert (done.num_runs, done.set_aside) == (4, None)
    after = Stored(results)
    assert after.content() == content
    known = {run.info.run_id for run in before.runs.values()} & {run.info.run_id for run in after.runs.values()}
    assert (len(after.runs), len(known)) == (5, num_known)
    assert [path.name for path in results.glob("mlflow.db*")] == ["mlflow.db"]


def test_a_run_that_goes_on_while_its_store_is_replaced_goes_on_in_the_new_one(results: Path) -> None:
    (results / "mlflow.db").unlink()

    def work(context: small_stages.StageContext) -> small_stages.StageResult:
        context.journal.metrics(1, {"loss": 1.0})
        small_stages.wait_until(points)
        (results / "mlflow.db").write_bytes(b"this is no database" * 100)
        mlflow_writer.rebuild(results)
        context.journal.metrics(2, {"loss": 0.5})
        return small_stages.StageResult([], {})

    def points() -> list[tuple[int, float]]:
        if not (results / "mlflow.db").exists():
            return []
        stored = Stored(results)
        return stored.history("train/live-s0/free", "loss") if "train/live-s0/free" in stored.runs else []

    make_model(results, {}, work, run="live-s0")
    assert points() == [(1, 1.0), (2, 0.5)]
    assert len(Stored(results).runs) == 6


def test_a_damaged_journal_is_named_and_the_others_are_brought(results: Path, caplog: pytest.LogCaptureFixture) -> None:
    (results / "mlflow.db").unlink()
    journal = next((results / "demo" / "data").rglob("journal.jsonl"))
    journal.write_text(f"nonsense\n{journal.read_text()}")
    done = mlflow_writer.rebuild(results)
    assert done.failed == ("data/s3-train",)
    assert done.num_runs == 3
    assert "journal.jsonl: line 1 is damaged" in caplog.text


def test_results_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="no such directory"):
        mlflow_writer.rebuild(tmp_path / "none")
