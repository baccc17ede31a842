"""Each experiment has its own kinds: what is built in, and what its own plugins add."""

import copy
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.flops import FAMILIES
from implicit_llm_contracts.config.solver import METHODS, STOPS
from implicit_llm_contracts.config.tasks import TASKS
from implicit_llm_contracts.config.word_problem import GROUPS
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.plugins import PLUGINS, Plugin
from implicit_llm_report.config import ReportConfig
from implicit_llm_report.figures.svg import Figure
from implicit_llm_report.registry import registry
from implicit_llm_report.sections import figure_of
from implicit_llm_workflow.experiment_files.experiment import Experiment, load_experiment
from implicit_llm_workflow.planning.graph import PLANNED
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.rules.snakemake_rules import plan_from_snakemake, the_config_file
from tests.pages import ROOT
from tests.refusals import refused
from tests.unit.report.sample_runs import given_of
from tests.unit.workflow.experiments import TINY, ExperimentFile, output, real_plan, refusal

TABLES = (TASKS, EVALUATION_KINDS, GROUPS, FAMILIES, METHODS, STOPS)
PLUGIN = """\
PLUGIN = {
    "families": ["own_family"], "methods": ["own_method"], "stops": ["own_stop"], "groups": {"Own": 7},
    "tasks": {"own_task": {"labels": "aligned", "accuracy": None, "learns": "", "limits": "", "settings": {"size": 1}}},
    "evaluations": {"own_kind": {"data": ["word_problem"], "metrics": ["own_metric"], "settings": {"depth": 1}}},
    "figures": {"own-figure": {"caption": "Own."}},
}
"""
# One edit of TINY each, with what an experiment without the plugin is told.
USES = {
    "group": ("group: S3", "group: Own", "data.s3.group: 'Own' is no group"),
    "method": ("{tol: 0.1}", "{method: own_method}", "free.solver.method: 'own_method' is none of plain"),
    "stop": ("{tol: 0.1}", "{stop: own_stop}", "free.solver.stop: 'own_stop' is none of sequence"),
    "mode": ("eval_block_len: 4", "eval_stop: own_stop", r"eval_stop: there is no 'own_stop'"),
    "task": ("kind: word_problem\n    group: S3", "kind: own_task", "data.s3.kind: there is no 'own_task'"),
    "evaluation": ("    kind: word_problem\n    modes", "    kind: own_kind\n    modes", "there is no 'own_kind'"),
    "figure": (
        "evaluations:\n",
        "report: {front: {figures: [own-figure]}}\nevaluations:\n",
        "front.figures: unknown key 'own-figure'",
    ),
}


def experiment_in(folder: Path, *uses: str, has_plugin: bool) -> ExperimentFile:
    """TINY in a folder of its own, with these edits."""
    folder.mkdir()
    (folder / "own.py").write_text(PLUGIN)
    file = ExperimentFile(folder / "tiny.yaml")
    file.path.write_text(("plugins: [own.py]\n" if has_plugin else "") + TINY)
    for use in uses:
        file.edit(*USES[use][:2])
    return file


@pytest.fixture
def with_plugin(tmp_path: Path) -> Experiment:
    return experiment_in(tmp_path / "with", "group", "method", "mode", "evaluation", "figure", has_plugin=True).load()


@pytest.mark.parametrize("use", USES)
def test_an_experiment_does_not_know_what_the_plugin_of_another_one_adds(
    with_plugin: Experiment, tmp_path: Path, use: str
) -> None:
    other = experiment_in(tmp_path / "without", use, has_plugin=False)
    assert with_plugin.kinds.plugins
    with refused(USES[use][2], ConfigError):
        other.load()


def test_reading_an_experiment_changes_no_table(tmp_path: Path) -> None:
    before = [dict(table) for table in TABLES]
    found = experiment_in(tmp_path / "with", "group", "method", "mode", "evaluation", has_plugin=True).load()
    assert [dict(table) for table in TABLES] == before
    assert {"own_task"} == found.kinds.tasks.keys() - TASKS.keys()
    assert {"own_kind"} == found.kinds.evaluations.keys() - EVALUATION_KINDS.keys()


def test_a_name_that_a_plugin_declares_is_one_of_what_it_declares_alone(tmp_path: Path) -> None:
    file = experiment_in(tmp_path / "with", "group", has_plugin=True).edit("{tol: 0.1}", "{stop: own_method}")
    with refused("free.solver.stop: 'own_method' is none of sequence", ConfigError):
        file.load()


def test_a_group_has_the_order_that_the_plugin_declares(with_plugin: Experiment) -> None:
    assert with_plugin.data["s3"].vocab_size == 7
    assert copy.deepcopy(with_plugin.data["s3"]).vocab_size == 7


def test_a_name_of_two_plugins_is_refused(tmp_path: Path) -> None:
    file = experiment_in(tmp_path / "with", has_plugin=True).edit("[own.py]", "[own.py, other.py]")
    file.beside("other.py", 'PLUGIN = {"stops": ["own_stop"]}\n')
    with refused(r"tiny.yaml: plugins: .*own.py and .*other.py both add 'own_stop'; rename one", ConfigError):
        file.load()


def test_every_kind_of_a_plugin_is_in_the_identities_of_its_jobs_as_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = experiment_in(tmp_path / "with", "group", "method", "mode", "evaluation", has_plugin=True)
    monkeypatch.chdir(tmp_path / "with")
    plan = real_plan(file)
    texts = [plan.identity_text(node) for node in plan.nodes.values()]
    for name in ("Own", "own_method", "own_stop", "own_kind"):
        assert any(f'"{name}"' in text for text in texts)
    assert plan.code(plan.nodes["evaluate/implicit-s0/free/word-problem"]).module == "own"
    assert isinstance(next(iter(plan.experiment.kinds.plugins.values())), Plugin)


def test_jobs_of_a_plugin_are_the_same_however_the_path_of_their_experiment_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = experiment_in(tmp_path / "with", "group", has_plugin=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    typed = (file.path, Path("../with/tiny.yaml"))
    first, second = (Plan(load_experiment(path), Path("results")).identities for path in typed)
    assert first["data/s3-train"].config[PLUGINS] == ["../with/own.py"]
    assert first == second


def test_a_plan_with_a_plugin_is_refused_outside_of_the_folder_of_its_results(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = experiment_in(tmp_path / "with", "group", has_plugin=True)
    (tmp_path / "with" / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    for command in ("status", "gc"):
        err = refusal(capsys, command, "with/tiny.yaml", "--results", "with/results")
        assert (
            "with/tiny.yaml: plugins: a job finds them by their paths relative to the folder that has results/" in err
        )
        assert f"; type `cd {file.path.parent}` first" in err
    monkeypatch.chdir(tmp_path / "with")
    assert "waiting" in output(capsys, "status", "tiny.yaml")


def test_the_file_of_an_experiment_with_an_own_kind_of_evaluation_is_found_again(tmp_path: Path) -> None:
    file = experiment_in(tmp_path / "with", "evaluation", has_plugin=True)
    plan = plan_from_snakemake({**file.load().read["values"]}, [str(file.path)])
    assert the_config_file(plan, [str(file.path)]) == str(file.path)


DRAWING = """\
from implicit_llm_report.figures.svg import Figure
PLUGIN = {"figures": {"drawn-figure": {"caption": "Drawn.", "needs": {"kind": "own_kind"}}}}
def draw_drawn_figure(given):
    return Figure("drawn-figure", "Drawn", (), (), ())
"""


@pytest.mark.parametrize("uses", [(), ("evaluation",)])
def test_the_report_draws_the_figure_of_a_plugin_only_if_the_experiment_plans_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uses: tuple[str, ...]
) -> None:
    monkeypatch.delitem(sys.modules, "drawing", raising=False)
    file = experiment_in(tmp_path / "with", *uses, has_plugin=True).edit("[own.py]", "[own.py, drawing.py]")
    file.beside("drawing.py", DRAWING)
    plan = file.plan()
    config = {key: value for key, value in plan.find("report").config.items() if key != PLUGINS}
    given = replace(given_of({}), config=fill(ReportConfig, config, "report"), kinds=plan.experiment.kinds)
    drawn = figure_of(given, "drawn-figure")
    assert isinstance(drawn, Figure) == ("drawn-figure" in plan.figures) == bool(uses)


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"kind": "own_knd"}, "kind: there is no 'own_knd'; did you mean 'own_kind'"),
        ({"kind": ["train", "perplexty"]}, "kind: there is no 'perplexty'; did you mean 'perplexity'"),
        ({"data": "own_tsk"}, "data: there is no 'own_tsk'; did you mean 'own_task'"),
        ({"eval_mode": "blockwse"}, "eval_mode: there is no 'blockwse'; did you mean 'blockwise'"),
        ({"swept": "eval_tool"}, "swept: there is no 'eval_tool'; did you mean 'eval_tol'"),
        ({"differ": "sice"}, "differ: there is no 'sice'; did you mean 'size'"),
        ({"knd": "own_kind"}, ": unknown key 'knd'; did you mean 'kind'"),
    ],
)
def test_a_name_that_a_figure_of_a_plugin_cannot_need_is_refused(
    tmp_path: Path, needs: dict[str, object], message: str
) -> None:
    file = experiment_in(tmp_path / "with", has_plugin=True)
    plugin = ExperimentFile(tmp_path / "with" / "own.py").edit(
        '"caption": "Own."', f'"caption": "Own.", "needs": {needs}'
    )
    with refused(f"{plugin.path}: PLUGIN.figures.own-figure.needs.*{message}", ConfigError):
        file.plan()


def test_all_that_figures_and_tables_need_are_keys_of_planned_results() -> None:
    needs = [entry.needs for part in (registry().figures, registry().tables) for entry in part.values()]
    assert {key for one in needs for key in one} <= {*PLANNED, "differ", "among"}


def rules_of(folder: Path, includes: list[str]) -> set[str]:
    """The rules that Snakemake finds for the example with an own task, with the files of rules in this order."""
    text = (ROOT / "Snakefile").read_text(encoding="utf-8")
    found = re.findall(r'^include: "(.+)"$', text, re.MULTILINE)
    assert sorted(found) == sorted(includes)
    for old, new in zip(found, includes, strict=True):
        text = text.replace(f'include: "{old}"', f"include: @{ROOT / new}@")
    (folder / "Snakefile").write_text(text.replace("@", '"'))
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "--list-rules", "--quiet", "all"]
    command += ["--configfile", str(ROOT / "examples/extending/parity.yaml")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_order_of_the_files_of_rules_behind_the_plan_does_not_matter(tmp_path: Path) -> None:
    includes = re.findall(r'^include: "(.+)"$', (ROOT / "Snakefile").read_text(encoding="utf-8"), re.MULTILINE)
    plan, *others = includes
    found = rules_of(tmp_path, [plan, *reversed(others)])
    assert found == rules_of(tmp_path, includes)
    assert {"train_parity", "evaluate_parity_accuracy", "train_word_problem"} <= found


@pytest.mark.parametrize("path", sorted((ROOT / "workflow/rules").glob("*.smk")), ids=lambda path: path.name)
def test_rules_take_their_kinds_from_the_plan(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    loops = re.findall(r"^for .* in (.*):$", text, re.MULTILINE)
    assert "implicit_llm_contracts" not in text
    assert all(loop.startswith("plan.") for loop in loops)
