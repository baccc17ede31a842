"""The bridge and a real MLflow server, over HTTP."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from implicit_llm_jobs.tracking import rebuild
from tests.mlflow_server import MlflowServer
from tests.unit.tracking import small_stages
from tests.unit.tracking.small_stages import make_chain, make_model
from tests.unit.tracking.stored import Stored

TRAINED = "train/s3-implicit-s3/free"


@pytest.fixture
def server(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    """Not yet started; its store is elsewhere than the results."""
    (tmp_path / "server").mkdir()
    (results / "mlflow.db").rename(tmp_path / "server" / "mlflow.db")
    server = MlflowServer(tmp_path / "server" / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    small_stages.start_invocation(monkeypatch)
    yield server
    server.stop()


def test_a_server_that_is_down_stops_no_stage(
    results: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as listener:  # bound, so that nobody else takes the port, and deaf
        listener.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{listener.getsockname()[1]}")
        run_dir = make_model(results, {})
    assert (run_dir / "manifest.json").exists()
    assert len([record for record in caplog.records if "the run goes on" in record.getMessage()]) == 1
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    make_model(results, {})  # already done: brings what is missing
    assert Stored(results).history(TRAINED, "loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]


@pytest.mark.slow
def test_a_server_that_is_away_for_a_while_has_everything_once_in_the_end(results: Path, server: MlflowServer) -> None:
    server.start()
    make_chain(results)

    def outlive_the_server(context: small_stages.StageContext) -> small_stages.StageResult:
        context.journal.metrics(1, {"loss": 1.0})
        pause = small_stages.deadline()
        while f"train/{context.name}" not in Stored(server.uri).runs:
            pause()
        server.stop()
        context.journal.metrics(2, {"loss": 0.5})
        return small_stages.StageResult([], {})

    make_model(results, {}, outlive_the_server, run="long-s0")
    make_model(results, {}, run="meanwhile-s0")  # the server is away for the whole run
    server.start()
    assert rebuild.rebuild(results).failed == ()
    over_http = Stored(server.uri)
    assert over_http.history("train/long-s0/free", "loss") == [(1, 1.0), (2, 0.5)]
    assert over_http.history("train/meanwhile-s0/free", "loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    content = over_http.content()
    assert {entry["status"][0] for entry in content.values()} == {"FINISHED"}
    assert len(content) == 6, "five jobs and their invocation"
    assert (len(content[TRAINED]["inputs"]), len(content[TRAINED]["models"])) == (1, 1)
    rebuild.rebuild(results)
    assert Stored(server.uri).content() == content


@pytest.mark.slow
def test_a_server_with_an_empty_store_is_filled_as_a_file_is(
    results: Path, server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start()
    make_chain(results)
    content = Stored(server.uri).content()
    for state in (results / "demo").rglob("mlflow.json"):
        state.unlink()
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    rebuild.rebuild(results)
    assert Stored(results).content() == content
