from __future__ import annotations

import json
from pathlib import Path

import pytest

from implicit_llm_contracts.config.tasks import group_order
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_data.groups import load_group
from implicit_llm_workflow.experiment_files.config_files import experiment_path
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.experiment_files.models import override_fields
from implicit_llm_workflow.project_dirs import CONFIG_DIR
from tests.unit.workflow.experiments import ExperimentFile


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_of_the_project_is_valid_and_named_like_its_file(path: Path) -> None:
    assert load_experiment(path).name == path.stem


def test_an_override_of_a_run_wins_over_that_of_all_runs(tiny: ExperimentFile) -> None:
    tiny.edit("      model: {hidden_size: 16}", "      model: {hidden_size: 16}\n      task: {batch_size: 4}")
    runs = tiny.load().runs
    assert (runs["implicit"].task.batch_size, runs["explicit"].task.batch_size) == (4, 8)
    assert runs["implicit"].task.total_steps == runs["explicit"].task.total_steps == 10


def test_a_model_file_can_hold_the_fields_of_any_model_and_the_package_that_knows_it(tiny: ExperimentFile) -> None:
    tiny.beside("models/other.yaml", "config: {model_type: other, width: 8}\npackage: other.models\n")
    tiny.edit("model: mamba2-explicit", "model: other\n    override: {model: {width: 16}}")
    fields = {"model_type": "other", "width": 16, "package": "other.models", "vocab_size": 6}
    assert tiny.load().runs["explicit"].model == fields
    tiny.beside("models/other.yaml", "config: {model_type: other}\npackage: 'other; rm'\n")
    with pytest.raises(ConfigError, match=r"package: .*name of a Python package"):
        tiny.load()


def test_the_vocabulary_follows_from_the_data(tiny: ExperimentFile) -> None:
    assert tiny.load().runs["implicit"].model["vocab_size"] == 6
    tiny.edit("group: S3", "group: A5\n    monoid: aperiodic")
    assert tiny.load().runs["implicit"].model["vocab_size"] == 240


def test_a_solver_of_another_mode_replaces_the_one_of_the_curriculum(tiny: ExperimentFile) -> None:
    tiny.edit("solver: {tol: 0.1}", "solver: {mode: unrolled, num_unroll: 2}")
    assert tiny.load().runs["implicit"].phases[1].solver == {"mode": "unrolled", "num_unroll": 2}


def test_a_file_beside_the_experiment_wins_over_that_of_the_project(tiny: ExperimentFile) -> None:
    tiny.beside("curricula/explicit.yaml", "phases: [{name: all, steps: rest, solver: null}]\n")
    assert [phase.name for phase in tiny.load().runs["explicit"].phases] == ["all"]


def test_an_experiment_is_found_by_its_name() -> None:
    assert experiment_path("demo").resolve() == CONFIG_DIR / "demo.yaml"
    with pytest.raises(ConfigError, match="did you mean 'demo'"):
        experiment_path("demmo")


def test_whole_numbers_and_floats_of_a_model_are_one_identity() -> None:
    fields = {"dropout": 0.0, "hidden_size": 64, "weight_norm": None}
    changed = override_fields(fields, {"dropout": 1, "hidden_size": 32.0, "weight_norm": True}, "x")
    assert json.dumps(changed) == '{"dropout": 1.0, "hidden_size": 32, "weight_norm": true}'


@pytest.mark.parametrize("group", ["S1", "S2", "S3", "S5", "A1", "A2", "A3", "A4", "A5", "Z1", "Z60"])
def test_groups_have_as_many_elements_as_their_tables(group: str) -> None:
    assert group_order(group) == load_group(group).order
