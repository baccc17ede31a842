"""What an evaluation by the harness is told, and the sub-command that hands over to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.experiment_files.evaluations import TASK_FOLDERS
from implicit_llm_workflow.node import Node
from tests.unit.workflow.console_calls import output, run
from tests.unit.workflow.experiments import ExperimentFile

MODES = "modes: [{name: blockwise, eval_mode: blockwise}]"


def with_downstream(language: ExperimentFile, settings: str) -> ExperimentFile:
    return language.edit("evaluations:\n", f"evaluations:\n  downstream: {{kind: lm_eval, {settings}, {MODES}}}\n")


def downstream_nodes(experiment: ExperimentFile) -> list[Node]:
    return [node for node in experiment.plan().nodes.values() if node.name.endswith("/downstream")]


def test_a_suite_stands_for_its_tasks_and_every_language_model_is_asked_with_its_tokenizer(
    language: ExperimentFile,
) -> None:
    nodes = downstream_nodes(with_downstream(language, "tasks: paper, limit: 100"))
    assert len(nodes) > 2
    for node in nodes:
        assert node.config["tasks"][:2] == ["lambada_openai", "hellaswag"]
        assert (len(node.config["tasks"]), node.config["limit"]) == (7, 100)
        assert node.upstream == {"model": node.upstream["model"], "tokenizer": "data/text-tokenizer"}


def test_other_content_of_a_task_folder_is_another_identity(language: ExperimentFile, tmp_path: Path) -> None:
    language.beside("tasks/mine.yaml", "task: mine\n")
    experiment = with_downstream(language, f"tasks: [mine], task_path: {tmp_path}/tasks")

    def fingerprints() -> set[str]:
        plan = experiment.plan()
        return {plan.identities[node.key].fingerprint for node in downstream_nodes(experiment)}

    first = fingerprints()
    language.beside("tasks/__pycache__/x.pyc", "")
    assert fingerprints() == first
    language.beside("tasks/mine.yaml", "task: mine # changed\n")
    assert not fingerprints() & first


def test_the_local_tasks_are_found_by_name(language: ExperimentFile) -> None:
    (node, *_) = downstream_nodes(with_downstream(language, "tasks: local, task_path: local"))
    assert set(node.config["task_files"]) == {
        path.name for path in (TASK_FOLDERS / "local").iterdir() if path.is_file()
    }
    assert node.config["tasks"] == ["local_last_word", "local_continuation", "local_cloze"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("num_fewshot: 0", r"downstream.tasks: is missing; give the name of a suite \(paper, local\)"),
        ("tasks: papre", r"downstream.tasks: no suite 'papre' in downstream.yaml; did you mean 'paper'\?"),
        ("tasks: local, task_path: locl", r"downstream.task_path: there is no folder 'locl'; did you mean 'local'\?"),
        ("tasks: []", r"downstream.tasks"),
        ("tasks: paper, max_tokens: 3", r"downstream.max_tokens: belongs to kind perplexity"),
    ],
)
def test_mistakes_are_told_by_file_and_key(language: ExperimentFile, settings: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_downstream(language, settings).load()


def test_an_evaluation_by_hand_asks_for_its_tasks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, error = run(capsys, "evaluate", "lm-eval", "--model", str(tmp_path))
    assert (code, "tasks: is missing; give the name of a suite (paper, local)" in error) == (2, True)


def test_all_arguments_go_to_the_harness_in_their_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr("implicit_llm.evaluation.lm_eval_harness.command_line.main", lambda words: given.append(words))
    options = ["--model", "hf", "-t", "piqa", "--model_args", "pretrained=x,eval_tol=0.1", "--limit=2", "--help"]
    calls = [options, ["run", "--help"], ["ls", "tasks", "--include_path", "there"]]
    for words in calls:
        output(capsys, "evaluate", "harness", *words)
    assert given == calls
