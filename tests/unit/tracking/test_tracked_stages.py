"""What MLflow shows of stages that read from one another."""

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_jobs.tracking import mlflow_writer
from implicit_llm_jobs.tracking.mlflow_writer import bring_late, late_works
from implicit_llm_jobs.tracking.tracked_run import VARIABLE
from tests.limits import wait_until
from tests.mlflow_server import MlflowServer
from tests.unit.tracking import small_stages
from tests.unit.tracking.small_stages import make_chain, make_data, make_model, start_invocation
from tests.unit.tracking.stored import Stored

TRAINED = "train/s3-implicit-s3/free"
EVALUATED = "evaluate/s3-implicit-s3/free/word-problem"


@pytest.fixture(autouse=True)
def _no_invocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_a_chain_of_stages_is_there_with_data_sets_models_labels_and_metrics(results: Path) -> None:
    made, model, _ = make_chain(results)
    stored = Stored(results)
    manifest = Manifest.read(model / "manifest.json")

    (given,) = stored.runs[TRAINED].inputs.dataset_inputs
    fingerprint = Manifest.read(made / "manifest.json").fingerprint
    assert (given.dataset.name, given.dataset.digest) == ("s3-train", fingerprint[:16])
    assert json.loads(given.dataset.source) == {"uri": "results/demo/data/s3-train"}
    assert json.loads(given.dataset.profile)["fingerprint"] == fingerprint
    assert [(tag.key, tag.value) for tag in given.tags] == [("mlflow.data.context", "training")]

    (logged,) = stored.models()
    weights = next(record for record in manifest.files if record.path.endswith(".safetensors"))
    assert (logged.name, logged.status, logged.model_type) == ("s3-implicit-s3-free", "READY", "mamba2")
    assert (
        logged.tags.items()
        >= {
            "fingerprint": manifest.fingerprint,
            "weights": f"results/demo/{TRAINED}/work/{manifest.fingerprint[:16]}/model",
            "sha256.model.safetensors": weights.sha256,
            "num_parameters": "1234",
        }.items()
    )
    assert logged.params.items() >= {"model.hidden_size": "32", "phase.tol": "0.05"}.items()
    assert [output.model_id for output in stored.runs[TRAINED].outputs.model_outputs] == [logged.model_id]
    assert [given.model_id for given in stored.runs[EVALUATED].inputs.model_inputs] == [logged.model_id]
    # The model has the numbers of its training and of its evaluation.
    assert {metric.key: metric.value for metric in logged.metrics} == {
        "summary/global_step": 3,
        "summary/num_parameters": 1234,
        "summary/loss": 1 / 3,
        "evaluation/accuracy_last10.s3-test.blockwise": 0.75,
        "evaluation/accuracy_last10.s3-test": 0.75,
        "summary/best_accuracy_last10.s3-test": 0.75,
    }
    assert not (results / "mlflow-artifacts").exists(), "weights are not copied"

    labels = {"config": "demo", "task": "word_problem", "family": "mamba2", "size": "1x32", "run": "s3-implicit"}
    for name in (TRAINED, EVALUATED):
        tags = stored.runs[name].data.tags
        assert tags.items() >= {**labels, "phase": "free", "seed": "3", "is_implicit": "true"}.items()
    assert stored.runs[EVALUATED].data.tags["upstream.model"] == stored.runs[TRAINED].info.run_id
    assert "invocations" not in stored.runs[TRAINED].data.tags, "started without Snakemake"

    assert stored.history(TRAINED, "loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert [step for step, _ in stored.history(TRAINED, "solver/residual")] == [1, 2, 3]
    assert [step for step, _ in stored.history(TRAINED, "cost/tokens_per_s")] == [1, 2, 3]


def test_a_run_has_the_user_the_command_and_all_invocations_that_worked_on_it(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_invocation(monkeypatch, 1)
    made = make_data(results)
    with pytest.raises(SystemExit):
        make_model(results, {"data": made}, small_stages.preempted)
    start_invocation(monkeypatch, 2)
    make_model(results, {"data": made})
    make_model(results, {"data": made})  # already done
    stored = Stored(results)
    assert set(stored.runs) == {TRAINED, "data/s3-train"}
    tags = stored.runs[TRAINED].data.tags
    assert tags["invocations"] == f"{1:016x} {2:016x}"
    assert (tags["mlflow.user"], tags["command"]) == ("jo", "snakemake --cores 2")
    assert tags["upstream.data"] == stored.runs["data/s3-train"].info.run_id


def test_an_input_that_no_store_took_comes_with_the_run_that_reads_it(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'file' / 'mlflow.db'}")
    made = make_data(results)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert Stored(results).runs == {}

    make_model(results, {"data": made})
    stored = Stored(results)
    assert stored.runs["data/s3-train"].info.status == "FINISHED"
    assert set(stored.runs) == {"data/s3-train", TRAINED}


def test_short_jobs_without_points_leave_mlflow_to_their_call_of_snakemake(
    results: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start_invocation(monkeypatch, 1)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mlflow", None)
        make_data(results)
        short = ["report", "excerpt/figure_1", "checkpoint/pythia"]
        for name in short:
            small_stages.make(results / "demo" / name, {})
        with pytest.raises(RuntimeError):
            small_stages.make(results / "demo" / "data" / "broken", {}, body=small_stages.fail)
    assert "mlflow is not installed" not in caplog.text
    assert Stored(results).runs == {}
    bring_late(results / "demo")
    stored = Stored(results)
    statuses = {"data/s3-train": "FINISHED", **dict.fromkeys(short, "FINISHED"), "data/broken": "FAILED"}
    assert {run: found.info.status for run, found in stored.runs.items()} == statuses
    assert late_works(results / "demo") == []


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


def test_a_server_that_is_down_stops_no_stage_and_its_password_stays_out_of_the_log(
    results: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as listener:  # bound, so that nobody else takes the port, and deaf
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hunter2@{address}")
        run_dir = make_model(results, {})
    assert (run_dir / "manifest.json").exists()
    (warning,) = [record.getMessage() for record in caplog.records if "the run goes on" in record.getMessage()]
    assert f"http://***@{address}/" in warning
    assert "hunter2" not in caplog.text
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    make_model(results, {})  # already done: brings what is missing
    assert Stored(results).history(TRAINED, "loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]


@pytest.mark.slow
def test_a_server_that_is_away_for_a_while_has_everything_once_in_the_end(results: Path, server: MlflowServer) -> None:
    server.start()
    make_chain(results)

    def outlive_the_server(context: small_stages.StageContext) -> small_stages.StageResult:
        context.journal.metrics(1, {"loss": 1.0})
        wait_until(lambda: f"train/{context.name}" in Stored(server.uri).runs)
        server.stop()
        context.journal.metrics(2, {"loss": 0.5})
        return small_stages.StageResult([], {})

    make_model(results, {}, outlive_the_server, run="long-s0")
    make_model(results, {}, run="meanwhile-s0")  # the server is away for the whole run
    server.start()
    assert mlflow_writer.rebuild(results).failed == ()
    over_http = Stored(server.uri)
    assert over_http.history("train/long-s0/free", "loss") == [(1, 1.0), (2, 0.5)]
    assert over_http.history("train/meanwhile-s0/free", "loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    content = over_http.content()
    assert {entry["status"][0] for entry in content.values()} == {"FINISHED"}
    assert len(content) == 5
    assert (len(content[TRAINED]["inputs"]), len(content[TRAINED]["models"])) == (1, 1)
    mlflow_writer.rebuild(results)
    assert Stored(server.uri).content() == content
