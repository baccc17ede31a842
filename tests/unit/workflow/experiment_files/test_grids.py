"""One entry of `runs` for a run at every point of a grid."""

import re

import pytest

from implicit_llm_contracts.runs.errors import ConfigError
from tests.refusals import refused
from tests.unit.workflow.experiments import ExperimentFile

GRID = """\
    grid:
      lr: {key: override.task.schedule.peak_learning_rate, values: [1e-4, 5.0e-4]}
      batch: {key: override.task.batch_size, values: [128, 256]}
"""


@pytest.fixture
def grid(language: ExperimentFile) -> ExperimentFile:
    return language.edit("    task: catbabi\n", f"    task: catbabi\n{GRID}")


def test_an_entry_stands_for_a_run_at_every_point(grid: ExperimentFile) -> None:
    runs = {name: run for name, run in grid.load().runs.items() if run.data == "babi"}
    assert {name: (run.task.schedule.peak_learning_rate, run.task.batch_size) for name, run in runs.items()} == {
        "babi-lr0.0001-batch128": (1e-4, 128),
        "babi-lr0.0001-batch256": (1e-4, 256),
        "babi-lr0.0005-batch128": (5e-4, 128),
        "babi-lr0.0005-batch256": (5e-4, 256),
    }


def test_the_entry_keeps_its_other_changes(language: ExperimentFile) -> None:
    language.edit(
        "    curriculum: bounded-then-free-branches\n",
        """\
    curriculum: bounded-then-free-branches
    grid:
      iter: {key: override.curriculum.free-80.solver.max_iter, values: [8, 16]}
""",
    )
    run = language.load().runs["trunk-iter16"]
    solvers = {phase.name: phase.solver for phase in run.phases if phase.solver}
    assert (run.seeds, run.model["hidden_size"], run.task.total_steps) == ((0, 1), 64, 1000)
    assert (solvers["free-70"]["tol"], solvers["free-80"]["max_iter"]) == (0.04, 16)


def test_models_and_curricula_can_be_axes(language: ExperimentFile) -> None:
    axis = "{key: model, values: [mamba2-130m-explicit, llama3-130m-explicit]}"
    language.edit("  flat:\n    data: text\n", f"  flat:\n    grid: {{of: {axis}}}\n    data: text\n")
    runs = language.load().runs
    assert runs["flat-ofmamba2-130m-explicit"].model["model_type"] == "implicit_mamba2"
    assert runs["flat-ofllama3-130m-explicit"].model["model_type"] == "implicit_llama3"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "override.task.batch_size",
            "overide.task.batch_size",
            "runs.babi.grid.batch.key: 'overide.task.batch_size' is",
        ),
        ("override.task.batch_size", "override", "runs.babi.grid.batch.key: 'override' is no path"),
        ("override.task.batch_size", "model.hidden_size", "runs.babi.grid.batch.key: 'model.hidden_size' is no path"),
        (
            "override.task.batch_size",
            "override.task.batch",
            "unknown key 'batch'; did you mean 'batch_size'? (runs.babi.grid",
        ),
        ("override.task.batch_size", "override.task.schedule.peak_learning_rate", "grid.lr.key: two axes change"),
        (
            "[128, 256]",
            "[128, 0]",
            "0 is not allowed; give an integer of at least 1 (runs.babi.grid: lr = 0.0001, batch = 0)",
        ),
        ("[128, 256]", "[128, 128]", "runs.babi.grid.batch.values: two values are written '128'"),
        ("[128, 256]", "[a/b]", "runs.babi.grid.batch.values: 'a/b' cannot be part of a run's name"),
        ("[128, 256]", "[]", "runs.babi.grid.batch.values: [] is not allowed"),
        ("values: [128", "value: [128", "runs.babi.grid.batch: unknown key 'value'; did you mean 'values'?"),
        ("  flat:", "  babi-lr0.0001-batch128:", "runs: two runs are called 'babi-lr0.0001-batch128'"),
    ],
)
def test_a_mistake_names_the_axis(grid: ExperimentFile, old: str, new: str, message: str) -> None:
    with refused(re.escape(message), ConfigError):
        grid.edit(old, new).load()


def test_an_axis_through_a_value_is_refused(grid: ExperimentFile) -> None:
    grid.edit("override.task.batch_size", "override.task.batch_size.x")
    grid.edit("    task: catbabi\n", "    task: catbabi\n    override: {task: {batch_size: 4}}\n")
    with pytest.raises(ConfigError, match=r"grid\.batch\.key: 'batch_size' is 4 and has no keys below it"):
        grid.load()
