import json
from pathlib import Path

import pytest

from implicit_llm_contracts.config.tasks import group_order
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_data.groups import load_group
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.experiment_files.models import override_fields
from implicit_llm_workflow.experiment_files.yaml_files import experiment_path, plain, read_yaml
from implicit_llm_workflow.project_dirs import CONFIG_DIR
from tests.refusals import refused
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


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "1.e-3", ".1e-2", "+1e-3"])
def test_every_way_of_writing_a_thousandth_is_a_number(tmp_path: Path, text: str) -> None:
    assert read_yaml(written(tmp_path, f"value: {text}")) == {"value": 0.001}


@pytest.mark.parametrize("text", ["e3", "1e", "a1e3", "1e3x", "1-3"])
def test_text_that_only_looks_like_a_number_stays_text(text: str) -> None:
    assert plain({"value": [text]}) == {"value": [text]}


def test_merge_keys_may_be_used_with_overrides(tmp_path: Path) -> None:
    assert read_yaml(written(tmp_path, "x: &x {a: 1, b: 1}\ny: {<<: *x, b: 2}\n"))["y"] == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", r"file\.yaml:\d+: is not valid YAML"),
        (b"- 1", "must be a mapping"),
        (b"", "must be a mapping"),
        (b"a: 1\nb: 2\na: 3\n", r"file\.yaml:3: .*'a' occurs twice"),
        (b"\xff\xfe\x00", "is not valid YAML: 'utf-8' codec can't decode byte 0xff"),
        (b"a: !!python/object/apply:os.getcwd []", "not valid YAML"),
        (None, r"file\.yaml: cannot be read"),
    ],
)
def test_what_is_no_mapping_is_refused_in_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "file.yaml").write_bytes(content)
    with refused(message, ConfigError):
        read_yaml(tmp_path / "file.yaml")
