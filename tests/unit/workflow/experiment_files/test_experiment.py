"""What an experiment file says: runs, grids, curricula and evaluations."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.config.fill import as_config
from implicit_llm_contracts.config.training import PhaseConfig
from implicit_llm_contracts.config.word_problem import (
    group_order,
)
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.runs.places import TASK_FOLDERS
from implicit_llm_data.groups import load_group
from implicit_llm_workflow.experiment_files.curricula import build_phases, fill_phase
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.experiment_files.models import override_fields
from implicit_llm_workflow.experiment_files.yaml_files import experiment_path, read_yaml
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.graph import build_graph
from implicit_llm_workflow.project_dirs import CONFIG_DIR
from tests.refusals import refused
from tests.unit.workflow.experiments import GRID, ExperimentFile, finish, keys, output


@pytest.mark.parametrize("path", sorted(CONFIG_DIR.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_of_the_project_is_valid_and_named_like_its_file(path: Path) -> None:
    assert load_experiment(path).name == path.stem


def test_an_override_of_a_run_wins_over_that_of_all_runs(tiny: ExperimentFile) -> None:
    tiny.edit("      model: {hidden_size: 16}", "      model: {hidden_size: 16}\n      task: {batch_size: 4}")
    runs = tiny.load().runs
    assert (runs["implicit"].training.batch_size, runs["explicit"].training.batch_size) == (4, 8)
    assert runs["implicit"].training.total_steps == runs["explicit"].training.total_steps == 10


def test_a_model_file_can_hold_the_fields_of_any_model_and_the_package_that_knows_it(tiny: ExperimentFile) -> None:
    tiny.beside("models/other.yaml", "config: {model_type: other, width: 8}\npackage: other.models\n")
    tiny.edit("model: mamba2-explicit", "model: other\n    override: {model: {width: 16}}")
    fields = {"model_type": "other", "width": 16, "package": "other.models", "vocab_size": 6}
    assert tiny.load().runs["explicit"].training.model == fields


def test_the_vocabulary_follows_from_the_data(tiny: ExperimentFile) -> None:
    assert tiny.load().runs["implicit"].training.model["vocab_size"] == 6
    tiny.edit("group: S3", "group: A5\n    monoid: aperiodic")
    assert tiny.load().runs["implicit"].training.model["vocab_size"] == 240


def test_a_solver_of_another_mode_replaces_the_one_of_the_curriculum(tiny: ExperimentFile) -> None:
    tiny.edit("solver: {tol: 0.1}", "solver: {mode: unrolled, num_unroll: 2}")
    assert as_config(tiny.load().runs["implicit"].phases["free"].phase.solver) == {"mode": "unrolled", "num_unroll": 2}


def test_a_file_beside_the_experiment_wins_over_that_of_the_project(tiny: ExperimentFile) -> None:
    tiny.beside("curricula/explicit.yaml", "phases: [{name: all, steps: rest, solver: null}]\n")
    assert [*tiny.load().runs["explicit"].phases] == ["all"]


def test_an_entry_with_a_grid_is_a_run_at_every_point(language: ExperimentFile) -> None:
    language.edit("    task: catbabi\n", f"    task: catbabi\n{GRID}")
    runs = {name: run.training for name, run in language.load().runs.items() if run.data == "babi"}
    assert {name: (task.schedule.peak_learning_rate, task.batch_size) for name, task in runs.items()} == {
        "babi-lr0.0001-batch128": (1e-4, 128),
        "babi-lr0.0001-batch256": (1e-4, 256),
        "babi-lr0.0005-batch128": (5e-4, 128),
        "babi-lr0.0005-batch256": (5e-4, 256),
    }


def test_the_runs_of_a_grid_keep_the_other_changes_of_their_entry(language: ExperimentFile) -> None:
    axis = "{key: override.curriculum.free-80.solver.max_iter, values: [8, 16]}"
    branches = "    curriculum: bounded-then-free-branches\n"
    run = language.edit(branches, f"{branches}    grid: {{iter: {axis}}}\n").load().runs["trunk-iter16"]
    solvers = {name: job.phase.solver for name, job in run.phases.items()}
    assert (run.seeds, run.training.model["hidden_size"], run.training.total_steps) == ((0, 1), 64, 1000)
    assert (solvers["free-70"].tol, solvers["free-80"].max_iter) == (0.04, 16)


def test_models_and_curricula_can_be_axes(language: ExperimentFile) -> None:
    axis = "{key: model, values: [mamba2-130m-explicit, llama3-130m-explicit]}"
    language.edit("  flat:\n    data: text\n", f"  flat:\n    grid: {{of: {axis}}}\n    data: text\n")
    runs = language.load().runs
    assert runs["flat-ofmamba2-130m-explicit"].training.model["model_type"] == "implicit_mamba2"
    assert runs["flat-ofllama3-130m-explicit"].training.model["model_type"] == "implicit_llama3"


def test_whole_numbers_and_floats_of_a_model_are_one_identity() -> None:
    fields = {"dropout": 0.0, "hidden_size": 64, "weight_norm": None}
    changed = override_fields(fields, {"dropout": 1, "hidden_size": 32.0, "weight_norm": True}, "x")
    assert json.dumps(changed) == '{"dropout": 1.0, "hidden_size": 32, "weight_norm": true}'


@pytest.mark.parametrize("group", ["S1", "S2", "S3", "S5", "A1", "A2", "A3", "A4", "A5", "Z1", "Z60"])
def test_groups_have_as_many_elements_as_their_tables(group: str) -> None:
    assert group_order(group) == load_group(group).order


@pytest.mark.parametrize(
    ("text", "values"),
    [
        *((f"value: {one}", {"value": 0.001}) for one in ("1e-3", "1E-3", "1.0e-3", "1.e-3", ".1e-2", "+1e-3")),
        ("x: &x {a: 1, b: 1}\ny: {<<: *x, b: 2}", {"x": {"a": 1, "b": 1}, "y": {"a": 1, "b": 2}}),
    ],
)
def test_numbers_with_an_exponent_and_merge_keys_are_read(tmp_path: Path, text: str, values: object) -> None:
    (tmp_path / "file.yaml").write_text(text)
    assert read_yaml(tmp_path / "file.yaml") == values


@pytest.mark.parametrize("text", ['"2017e66"', "'1e-3'", "e3", "1e", "a1e3", "1e3x", "1-3"])
def test_text_that_is_quoted_or_only_looks_like_a_number_stays_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.yaml").write_text(f"value: [{text}]")
    assert read_yaml(tmp_path / "file.yaml") == {"value": [text.strip("\"'")]}


# Each list has eight times as many values as the one before: 8 ** 9 in all.
_ALIASES = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]\n" for i in range(1, 9)).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", r"file\.yaml:\d+: is not valid YAML"),
        (b"- 1", "must be a mapping"),
        (b"", "must be a mapping"),
        (b"a: 1\nb: 2\na: 3\n", r"file\.yaml:3: .*'a' occurs twice"),
        (b"\xff\xfe\x00", "is not valid YAML: 'utf-8' codec can't decode byte 0xff"),
        (b"a: !!python/object/apply:os.getcwd []", "not valid YAML"),
        (b"a: &a [*a]", r"file\.yaml:1: .* more than 100 levels, or an alias of itself"),
        (b"a: &a {b: *a}", r"file\.yaml:1: .* more than 100 levels, or an alias of itself"),
        (b"a: " + b"[" * 200 + b"]" * 200, r"file\.yaml:1: .* more than 100 levels"),
        (
            b"a0: &a0 [x, x, x, x, x, x, x, x]\n" + _ALIASES,
            r"file\.yaml:1: .* more than 1,000,000 values; remove aliases",
        ),
        (b"b: 1\n? [a, b]\n: 1\n", r"file\.yaml:2: .* a key is a list or a mapping; give a text"),
        (b"b: 1\na: 2020-99-99\n", r"file\.yaml:2: .* month must be in"),
        (b"a: " + b"1" * 5000, r"file\.yaml:1: .* integer string conversion"),
        (b"a: {b: [1, 2020-01-01]}", r"file\.yaml: a\.b\[1\]: 2020-01-01 is read as a date; quote it"),
        (b"a: !!binary aGk=", r"file\.yaml: a: .* is read as a bytes; quote it"),
        (b"a: !!set {b, c}", r"file\.yaml: a: .* is read as a set; quote it"),
        (b"b: 1\na: -012\n", r"file\.yaml:2: .* -012 would not be read as a decimal number"),
        (b"a: 1:30.5\n", r"file\.yaml:1: .* 1:30.5 would not be read as a decimal number"),
    ],
)
def test_what_is_no_mapping_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "file.yaml").write_bytes(content)
    with refused(message, ConfigError):
        read_yaml(tmp_path / "file.yaml")


def test_an_experiment_is_found_by_its_name_and_a_misspelt_one_is_named() -> None:
    assert experiment_path("demo").resolve() == CONFIG_DIR / "demo.yaml"
    with refused("did you mean 'demo'", ConfigError):
        experiment_path("demmo")
    with refused(r"file\.yaml: cannot be read", ConfigError):
        load_experiment(Path("file.yaml"))


def built(*items: dict[str, Any], total_steps: int = 1000) -> tuple[dict[str, PhaseConfig], dict[str, str]]:
    """Phases of explicit models, named by their letters where no name is given, and those that they go on from."""
    named = [{"name": chr(ord("a") + index), "solver": None, **item} for index, item in enumerate(items)]
    at = "x.yaml: curriculum"
    return build_phases([fill_phase(item, f"{at}.{item['name']}") for item in named], total_steps, at)


def phases(*items: dict[str, Any], total_steps: int = 1000) -> dict[str, PhaseConfig]:
    return built(*items, total_steps=total_steps)[0]


@pytest.mark.parametrize(
    ("items", "found"),
    [
        (
            [{"steps": 100}, {"steps": 0.2}, {"steps": "rest"}],
            {"a": (0, 0, 100, None), "b": (1, 100, 300, "a"), "c": (2, 300, 1000, "b")},
        ),
        (
            [
                {"steps": "rest", "keep": [0.9, 0.7]},
                {"after": "a", "start": 0.7, "steps": "rest"},
                {"after": "a", "start": 900, "steps": "rest"},
            ],
            {"a": (0, 0, 1000, None), "b": (1, 700, 1000, "a"), "c": (1, 900, 1000, "a")},
        ),
        (
            [{"steps": 0.5}, {"steps": "rest"}, {"after": "a", "steps": 100}, {"steps": "rest"}],
            {"a": (0, 0, 500, None), "b": (1, 500, 1000, "a"), "c": (1, 500, 600, "a"), "d": (2, 600, 1000, "c")},
        ),
    ],
    ids=["one after the other", "branches from kept steps", "a branch from the end, with phases of its own"],
)
def test_phases_follow_each_other_or_leave_the_one_they_name(items: list[dict[str, Any]], found: object) -> None:
    made, starts = built(*items)
    assert {name: (it.index, it.start_step, it.end_step, starts.get(name)) for name, it in made.items()} == found
    assert made["a"].keep == ((700, 900) if "keep" in items[0] else ())


def test_the_steps_of_the_published_schedule_are_rounded_alike() -> None:
    branches = [{"after": "a", "start": share, "steps": "rest"} for share in (0.7, 0.8, 0.9)]
    found = phases({"steps": "rest", "keep": [0.7, 0.8, 0.9]}, *branches, total_steps=197_411)
    assert [found[name].start_step for name in "bcd"] == [138_188, 157_929, 177_670]


def test_only_what_a_phase_asks_for_is_added_to_its_identity() -> None:
    plain, kept = phases({"steps": "rest"})["a"], phases({"steps": "rest", "keep": [10]})["a"]
    bare = {"name": "a", "index": 0, "start_step": 0, "end_step": 1000, "solver": None}
    assert as_config(plain) == bare
    assert as_config(kept) == {**bare, "keep": [10]}
    passing = {"state_passing": 64}
    for restarts in (True, False):
        found = as_config(phases({"steps": "rest", "restart_when_wrong": restarts, **passing})["a"])
        assert found == {**bare, **passing, **({} if restarts else {"restart_when_wrong": False})}


CASES: list[tuple[list[dict[str, Any]], str]] = [
    (
        [{"steps": 0.5}, {"after": "aa", "steps": "rest"}],
        "after: there is no phase 'aa' before this one; did you mean 'a'?",
    ),
    ([{"steps": 0.5, "after": "b"}, {"steps": "rest"}], "a.after: there is no phase 'b' before this one"),
    ([{"steps": "rest"}, {"after": "b", "steps": "rest"}], "b.after: there is no phase 'b' before this one"),
    (
        [{"steps": "rest", "keep": [0.8]}, {"start": 0.7, "steps": "rest"}],
        "b.start: phase 'a', steps 0 to 1000, does not keep step 700; add 0.7 to its list `keep`",
    ),
    (
        [{"steps": "rest", "keep": [800], "state_passing": 64}, {"start": 0.7, "steps": "rest"}],
        "a.keep: at step 800 some sequences continue a carried state",
    ),
    (
        [{"steps": "rest", "keep": [640], "state_passing": 64}, {"start": 0.7, "steps": "rest"}],
        "b.start: at step 700 some sequences of phase 'a' continue a carried state",
    ),
    ([{"steps": 500}, {"start": 600, "steps": "rest"}], "b.start: phase 'a', steps 0 to 500, does not keep step 600"),
    ([{"steps": "rest", "start": 5}], "a.start: the first phase starts at step 0; remove the key"),
    (
        [{"steps": 500, "keep": [0.6]}, {"steps": "rest"}],
        "a.keep: step 600 is not between the phase's start 0 and end 500",
    ),
    ([{"steps": 1001}], "a.steps: the phase would be steps 0 to 1001, the task has total_steps 1000"),
    ([{"steps": 500}, {"steps": 1000}], "b.steps: the phase would be steps 500 to 1500, the task has total_steps 1000"),
    ([{"steps": "rest"}, {"steps": "rest"}], "b.steps: the phase would be steps 1000 to 1000"),
    ([{"steps": "rest"}, {"steps": 10}], "b.steps: the phase would be steps 1000 to 1010"),
    ([{"steps": "rest", "restart_when_wrong": False}], "a.restart_when_wrong: without state_passing no word starts in"),
    ([{"steps": "rest", "keep": [8, 9], "state_passing": 4}], "a.keep: at step 9 some sequences continue a carried"),
    ([{"steps": 2}, {"steps": "rest", "keep": [6, 8], "state_passing": 4}], "b.keep: at step 8 some sequences"),
    (
        [{"steps": 900, "keep": [700]}, {"start": 700, "steps": "rest"}],
        "the phases up to 'a' have 900 steps, the task has total_steps 1000",
    ),
]


@pytest.mark.parametrize(("items", "message"), CASES, ids=[case[1] for case in CASES])
def test_what_makes_no_curriculum_is_one_line(items: list[dict[str, Any]], message: str) -> None:
    with refused(re.escape(message), ConfigError) as caught:
        phases(*items)
    assert str(caught.value).startswith("x.yaml: curriculum")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("names: {implict: A}", "report.names: .*implict.*did you mean 'implicit'"),
        ("front: {figures: [acuracy-by-length]}", "report.front.figures: .*did you mean 'accuracy-by-length'"),
        ("names: {implicit: A, explicit: A}", "report.names: implicit and explicit would both be shown as 'A'"),
        ("names: {implicit: explicit}", "report.names: implicit and explicit would both be shown as 'explicit'"),
    ],
)
def test_names_and_figures_of_the_report_are_known_ones(tiny: ExperimentFile, part: str, message: str) -> None:
    tiny.edit("name: tiny", f"name: tiny\nreport: {{{part}}}")
    with refused(message, ConfigError):
        tiny.load()


def test_every_branch_is_trained_from_the_trunk_and_evaluated(language: ExperimentFile) -> None:
    nodes, trunk = build_graph(language.load()), "train/trunk-s1/bounded"
    assert nodes[trunk].config["phase"]["keep"] == [700, 800, 900]
    assert "start" not in nodes[trunk].upstream
    for share in (70, 80, 90):
        branch = nodes[f"train/trunk-s1/free-{share}"]
        phase = branch.config["phase"]
        assert (branch.upstream["start"], phase["index"], phase["start_step"]) == (trunk, 1, 10 * share)
    ends = [f"evaluate/trunk-s1/{phase}/perplexity" for phase in ("bounded", "free-70", "free-80", "free-90")]
    assert [key for key in nodes if key.startswith("evaluate/trunk-s1/")] == ends
    assert {*ends} <= {*nodes["report"].upstream.values()}


def test_a_change_of_a_free_phase_leaves_the_trunk_and_other_branches(language: ExperimentFile) -> None:
    finish(language.plan())
    language.edit("solver: {tol: 0.04}", "solver: {tol: 0.04, max_iter: 23}")
    branches = {f"train/trunk-s{seed}/free-70" for seed in (0, 1)}
    evaluations = {f"evaluate/trunk-s{seed}/free-70/perplexity" for seed in (0, 1)}
    assert keys(language.plan(), "stale") == {*branches, *evaluations, "report"}


def test_another_branch_at_a_kept_step_makes_nothing_stale_but_the_report(language: ExperimentFile) -> None:
    solver = "{mode: fixed_point, max_iter: 4, phantom_steps: 1}"
    one = (
        f"phases:\n- {{name: bounded, steps: rest, keep: [0.7, 0.8], solver: {solver}}}\n"
        f"- {{name: free-70, after: bounded, start: 0.7, steps: rest, solver: {solver}}}\n"
    )
    path = language.beside("curricula/bounded-then-free-branches.yaml", one)
    finish(language.plan())
    path.write_text(one + f"- {{name: free-80, after: bounded, start: 0.8, steps: rest, solver: {solver}}}\n")
    plan = language.plan()
    assert keys(plan, "stale") == {"report"}
    assert keys(plan, "missing") == {
        f"{key}" for s in (0, 1) for key in (f"train/trunk-s{s}/free-80", f"evaluate/trunk-s{s}/free-80/perplexity")
    }


ITEM = "evaluations:\n  word-problem:\n    kind: word_problem\n"
MODES = "    modes:\n      - {name: blockwise, eval_mode: blockwise, eval_block_len: 4}\n"


def evaluated(experiment: ExperimentFile) -> set[str]:
    return {node.name for node in build_graph(experiment.load()).values() if node.stage == "evaluate"}


def test_runs_are_chosen_by_name_or_pattern(tiny: ExperimentFile) -> None:
    tiny.edit(ITEM, f"{ITEM}    runs: [impl*]\n")
    assert evaluated(tiny) == {"implicit-s0/free/word-problem", "implicit-s1/free/word-problem"}


def test_the_jacobian_has_no_modes(tiny: ExperimentFile) -> None:
    tiny.edit(ITEM + MODES, "evaluations:\n  word-problem: {kind: jacobian}\n")
    assert build_graph(tiny.load())["evaluate/implicit-s0/free/word-problem"].config == {"kind": "jacobian"}


def test_a_sweep_is_not_done_for_explicit_runs_which_would_stand_in_the_report_twice(tiny: ExperimentFile) -> None:
    sweep = "    sweep: {eval_max_iter: [1, 4]}\n"
    nodes = build_graph(tiny.add(f"  compute:\n    kind: word_problem\n{sweep}{MODES}").load())
    assert nodes["evaluate/implicit-s0/free/compute"].config["sweep"] == {"eval_max_iter": [1, 4]}
    assert evaluated(tiny) - {"implicit-s0/free/compute", "implicit-s1/free/compute"} == {
        f"{name}/word-problem" for name in ("implicit-s0/free", "implicit-s1/free", "explicit-s0/explicit")
    }


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ("    lengths: [8]\n", "    lengths: [16]\n"),
        ("    runs: [explicit]\n", "    runs: [implicit]\n"),
    ],
)
def test_two_evaluations_of_a_kind_give_different_numbers(tiny: ExperimentFile, settings: str, others: str) -> None:
    tiny.edit(ITEM, f"{ITEM}{settings}").add(f"  other:\n    kind: word_problem\n{others}{MODES}")
    assert any(name.endswith("/other") for name in evaluated(tiny))


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


def test_all_arguments_go_to_the_harness_in_their_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr("implicit_llm.evaluation.lm_eval_harness.main", lambda words: given.append(words))
    options = ["--model", "hf", "-t", "piqa", "--model_args", "pretrained=x,eval_tol=0.1", "--limit=2", "--help"]
    calls = [options, ["run", "--help"], ["ls", "tasks", "--include_path", "there"]]
    for words in calls:
        output(capsys, "evaluate", "harness", *words)
    assert given == calls
