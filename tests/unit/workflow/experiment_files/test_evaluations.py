"""Which evaluations are done for which runs, and what their jobs are told."""

from pathlib import Path

import pytest

from implicit_llm_contracts.config.evaluation import EvaluateConfigError
from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.task_folders import TASK_FOLDERS
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.graph import build_graph, report_figures, report_tables
from tests.unit.workflow.console_calls import output, run
from tests.unit.workflow.experiments import ExperimentFile

ITEM = "evaluations:\n  word-problem:\n    kind: word_problem\n"
COMPUTE = """  compute:
    kind: word_problem
    sweep: {eval_max_iter: [1, 4]}
    modes:
      - {name: blockwise, eval_mode: blockwise}
"""
LONG = """  long:
    kind: word_problem
    lengths: [16]
    modes:
      - {name: blockwise, eval_mode: blockwise}
"""
MODES = "    modes:\n      - {name: blockwise, eval_mode: blockwise, eval_block_len: 4}\n"


def test_runs_are_chosen_by_name_or_pattern(tiny: ExperimentFile) -> None:
    tiny.edit(ITEM, f"{ITEM}    runs: [impl*]\n")
    evaluated = {node.name for node in build_graph(tiny.load()).values() if node.stage == "evaluate"}
    assert evaluated == {"implicit-s0/free/word-problem", "implicit-s1/free/word-problem"}
    tiny.edit("runs: [impl*]", "runs: [s5-*]")
    with pytest.raises(ConfigError, match=r"evaluations\.word-problem\.runs: s5-\* matches no run .*implicit, exp"):
        tiny.load()


def test_a_sweep_is_told_to_the_job_and_makes_no_main_figure_or_table(tiny: ExperimentFile) -> None:
    tiny.edit(ITEM, f"{ITEM}    sweep: {{eval_max_iter: [1, 4], eval_tol: [0.2]}}\n")
    experiment = tiny.load()
    config = build_graph(experiment)["evaluate/implicit-s0/free/word-problem"].config
    assert config["sweep"] == {"eval_max_iter": [1, 4], "eval_tol": [0.2]}
    assert "accuracy-by-length" not in report_figures(experiment)
    assert "accuracy" not in report_tables(experiment)


def test_the_jacobian_has_no_modes_and_every_other_kind_needs_some(tiny: ExperimentFile) -> None:
    tiny.edit(MODES, "")
    with pytest.raises(EvaluateConfigError, match=r"evaluations\.word-problem\.modes: no mode given"):
        tiny.load()
    tiny.edit(ITEM, ITEM.replace("kind: word_problem", "kind: jacobian"))
    config = build_graph(tiny.load())["evaluate/implicit-s0/free/word-problem"].config
    assert config == {"kind": "jacobian"}
    tiny.path.write_text(f"{tiny.path.read_text().rstrip()}\n{MODES}")
    with pytest.raises(ConfigError, match="unknown key 'modes'"):
        tiny.load()


def test_a_sweep_is_not_done_for_explicit_runs_which_would_stand_in_the_report_twice(tiny: ExperimentFile) -> None:
    tiny.path.write_text(tiny.path.read_text() + COMPUTE)
    evaluated = {node.name for node in build_graph(tiny.load()).values() if node.stage == "evaluate"}
    assert {"implicit-s0/free/compute", "explicit-s0/explicit/word-problem"} <= evaluated
    assert "explicit-s0/explicit/compute" not in evaluated
    tiny.edit("kind: word_problem\n    sweep", "kind: word_problem\n    runs: [explicit]\n    sweep")
    with pytest.raises(ConfigError, match=r"evaluations\.compute\.runs: explicit matches no implicit run"):
        tiny.load()


def test_a_number_that_two_evaluations_would_give_is_refused(tiny: ExperimentFile) -> None:
    tiny.path.write_text(tiny.path.read_text() + LONG)
    tiny.edit(ITEM, f"{ITEM}    lengths: [8]\n")
    tiny.load()
    tiny.edit("    lengths: [8]\n", "")
    with pytest.raises(ConfigError, match=r"evaluations\.long\.lengths: word-problem gives the same numbers of impl"):
        tiny.load()
    tiny.edit("{name: blockwise, eval_mode: blockwise}", "{name: blocks, eval_mode: blockwise}")
    with pytest.raises(ConfigError, match="gives the same numbers of explicit; let them have different lengths"):
        tiny.load()
    tiny.edit("  long:\n", "  long:\n    runs: [implicit]\n")
    tiny.load()


@pytest.mark.parametrize("name", EVALUATION_KINDS)
def test_every_setting_of_a_kind_is_a_field_of_its_jobs(name: str) -> None:
    kind = EVALUATION_KINDS[name]
    assert kind.settings.keys() == kind.fields.keys() - {"kind", "modes", "sweep", "task_files"}


ONE_MODE = "modes: [{name: blockwise, eval_mode: blockwise}]"


def with_downstream(language: ExperimentFile, settings: str) -> ExperimentFile:
    return language.edit("evaluations:\n", f"evaluations:\n  downstream: {{kind: lm_eval, {settings}, {ONE_MODE}}}\n")


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
