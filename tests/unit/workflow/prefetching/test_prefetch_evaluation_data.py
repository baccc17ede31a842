"""Data sets of downstream tasks: fetched from a small hub on this machine, then read by a task without a network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from implicit_llm_workflow.prefetching.needs import EvaluationData, needs_of
from implicit_llm_workflow.prefetching.prefetch import satisfy
from tests.unit.workflow.experiments import ExperimentFile
from tests.unit.workflow.prefetching.file_server import FileServer, serving
from tests.unit.workflow.prefetching.test_hub import COMMIT, publish

NAME, DATA = "owner/questions", "data/test.jsonl"
CARD = f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: test\n    path: {DATA}\n---\n"
TASK = (
    f"task: far\ndataset_path: {NAME}\noutput_type: loglikelihood\ntest_split: test\n"
    "doc_to_text: '{{text}}'\ndoc_to_target: ' end'\nmetadata: {version: 1.0}\n"
)
# In a process of its own, since the client reads the environment once: before the data is there, and after it.
FETCH = """
import json, pathlib, sys
from implicit_llm_workflow.prefetching.needs import EvaluationData
from implicit_llm_workflow.prefetching.prefetch import satisfy
outcome = satisfy(EvaluationData(sys.argv[1]), pathlib.Path())
print(json.dumps([outcome.state, outcome.what]))
"""
LOAD = """
import sys
from implicit_llm_contracts.config.evaluation import LmEvalConfig
from implicit_llm.evaluation.lm_eval_harness.tasks import load_tasks
config = LmEvalConfig("lm_eval", (), ("far",), task_path=sys.argv[1])
try:
    load_tasks(config)
except Exception as error:
    print(error, flush=True)
input()
tasks = load_tasks(config)
print(len(tasks["far"].eval_docs), tasks["far"].eval_docs[1]["text"])
"""


@pytest.fixture
def hub() -> Iterator[FileServer]:
    with serving() as state:
        lines = b"".join(json.dumps({"text": f"question {index}"}).encode() + b"\n" for index in range(5))
        publish(state, "datasets", NAME, {"README.md": CARD.encode(), DATA: lines})
        for path in [path for path in state.files if f"/resolve/{COMMIT}/" in path]:
            newest = path.replace(f"/resolve/{COMMIT}/", "/resolve/main/")
            state.files[newest], state.headers[newest] = state.files[path], state.headers[path]
        tree = f"/api/datasets/{NAME}/tree/{COMMIT}"
        below = [entry for entry in json.loads(state.files[tree]) if entry["path"] == DATA]
        state.files[f"{tree}/data"], state.headers[f"{tree}/data"] = json.dumps(below).encode(), state.headers[tree]
        yield state


def test_a_task_reads_what_was_fetched_without_a_network(hub: FileServer, tmp_path: Path) -> None:
    (tmp_path / "far.yaml").write_text(TASK)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = {**inherited, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    online = {**environment, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url}
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=environment) as job:
        assert re.search("task far: its data cannot be read.*run `implicit-llm prefetch", job.stdout.readline())
        fetched = subprocess.check_output([sys.executable, "-c", FETCH, NAME], env=online, text=True)
        assert json.loads(fetched.splitlines()[-1]) == ["fetched", f"data set {NAME} in the cache of datasets"]
        asked = len(hub.requests)
        assert job.communicate("\n", timeout=120)[0] == "5 question 1\n"
    assert len(hub.requests) == asked


def test_a_data_set_that_cannot_be_had_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no network\nhere")

    monkeypatch.setattr("datasets.load_dataset", fail)
    outcome = satisfy(EvaluationData("owner/none", "easy"), tmp_path)
    said = r"data set owner/none \(easy\): no network; .*with the same HF_HOME, or copy that folder from there"
    assert (outcome.state, bool(re.fullmatch(said, outcome.what))) == ("failed", True)


def test_only_an_experiment_with_such_an_evaluation_needs_their_data(language: ExperimentFile) -> None:
    def evaluation_data(experiment: ExperimentFile) -> list[str]:
        return [need.dataset for need in needs_of(experiment.plan()) if isinstance(need, EvaluationData)]

    assert evaluation_data(language) == []
    modes = "modes: [{name: blockwise, eval_mode: blockwise}]"
    local = f"evaluations:\n  downstream: {{kind: lm_eval, tasks: local, task_path: local, {modes}}}\n"
    assert evaluation_data(language.edit("evaluations:\n", local)) == []
    assert evaluation_data(language.edit("tasks: local, task_path: local", "tasks: paper")) == [
        "EleutherAI/lambada_openai",
        "Rowan/hellaswag",
        "baber/piqa",
        "allenai/ai2_arc",
        "allenai/ai2_arc",
        "allenai/winogrande",
        "allenai/openbookqa",
    ]
