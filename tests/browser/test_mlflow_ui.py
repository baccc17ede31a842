"""MLflow's own pages, over a server that our bridge has told of three tiny runs."""

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from implicit_llm_jobs.tracking.mlflow_store import initialise
from implicit_llm_jobs.tracking.tracked_run import VARIABLE
from tests.limits import wait_until
from tests.mlflow_server import MlflowServer
from tests.unit.tracking import small_stages
from tests.unit.tracking.stored import Stored

NAMES = ("train/steep-s0/free", "train/flat-s0/free")
# Of each chart with lines: how many are drawn, and the number of points that each was given, by its name.
CHARTS = """
const drawn = plot => plot.querySelectorAll('.scatterlayer path.js-line').length;
const traces = plot => plot.data.filter(trace => trace.type.startsWith('scatter') && trace.x && trace.x.length > 1);
return [...document.querySelectorAll('.js-plotly-plot')].filter(drawn).map(
    plot => ({drawn: drawn(plot), points: traces(plot).map(trace => [trace.name, trace.x.length])}))
"""


@pytest.fixture(scope="module")
def server(_driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """With a data set and two models that were trained on it, brought over HTTP while they ran."""
    folder = tmp_path_factory.mktemp("ui")
    (folder / "results").mkdir()
    initialise(f"sqlite:///{folder / 'mlflow.db'}")
    server = MlflowServer(folder / "mlflow.db")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", server.uri)
        patch.delenv(VARIABLE, raising=False)  # so that each job reports by itself
        made = small_stages.make_data(folder / "results")
        for run, power in (("steep-s0", 2.0), ("flat-s0", 0.5)):
            small_stages.make_model(folder / "results", {"data": made}, _trains(power), run=run)
    yield server
    server.stop()


@pytest.fixture
def stored(server: MlflowServer) -> Stored:
    return Stored(server.uri)


def _trains(power: float) -> small_stages.Body:
    def body(context: small_stages.StageContext) -> small_stages.StageResult:
        for step in range(1, 21):
            context.journal.metrics(step, {"loss": 2 / step**power, "residual": 0.1 / step})
        return small_stages.train_result(context)

    return body


def text_of(browser: Any) -> str:
    """Of the whole page, in one line."""
    return " ".join(browser.execute_script("return document.body.innerText").split())


def wait_for(browser: Any, *texts: str) -> None:
    for text in texts:
        wait_until(lambda text=text: text in text_of(browser))


def has_both_curves(chart: dict[str, Any]) -> bool:
    """A line of 20 points for each of the two runs."""
    whole = {name for name, points in chart["points"] if points == 20}
    return chart["drawn"] >= 2 and all(any(name in given for given in whole) for name in NAMES)


def test_two_runs_stand_side_by_side_with_both_curves(browser: Any, server: MlflowServer, stored: Stored) -> None:
    runs = quote(json.dumps([stored.runs[name].info.run_id for name in NAMES], separators=(",", ":")))
    browser.get(f"{server.uri}/#/compare-runs?runs={runs}&experiments=%5B%22{stored.experiment_ids[0]}%22%5D")
    wait_for(browser, "Comparing 2 Runs", *NAMES, "Parallel Coordinates Plot")
    link = browser.find_element("xpath", "//a[contains(@href, '/metric') and normalize-space() = 'loss']")
    browser.execute_script("arguments[0].click()", link)
    wait_until(lambda: any(map(has_both_curves, browser.execute_script(CHARTS))))
    wait_for(browser, *(f"{name} (loss)" for name in NAMES))  # the legend


def test_a_run_shows_its_data_set_and_labels_and_its_model_is_listed(
    browser: Any, server: MlflowServer, stored: Stored
) -> None:
    run = stored.runs[NAMES[0]]
    browser.get(f"{server.uri}/#/experiments/{stored.experiment_ids[0]}/runs/{run.info.run_id}")
    wait_for(browser, f"s3-train ({run.inputs.dataset_inputs[0].dataset.digest})")
    for key, value in (("task", "word_problem"), ("family", "mamba2"), ("run", "steep"), ("seed", "3")):
        assert re.search(rf"\b{key}\s*:\s*{value}\b", text_of(browser))
    browser.get(f"{server.uri}/#/experiments/{stored.experiment_ids[0]}/models")
    wait_for(browser, *(name.removeprefix("train/").replace("/", "-") for name in NAMES))
