"""Phases on the axis of global steps: chains, branches, and what is refused."""

import re
from typing import Any

import pytest

from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.experiment_files.curricula import Phase, build_phases
from implicit_llm_workflow.planning.graph import build_graph
from tests.unit.workflow.experiments import ExperimentFile, finish, keys


def phases(*items: dict[str, Any], total_steps: int = 1000) -> dict[str, Phase]:
    """Phases of explicit models, named by their letters where no name is given."""
    named = [{"name": chr(ord("a") + index), "solver": None, **item} for index, item in enumerate(items)]
    return {phase.name: phase for phase in build_phases(named, total_steps, "x.yaml: curriculum")}


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
    made = phases(*items)
    assert {name: (it.index, it.start_step, it.end_step, it.after) for name, it in made.items()} == found
    assert made["a"].keep == ((700, 900) if "keep" in items[0] else ())


def test_the_steps_of_the_published_schedule_are_rounded_alike() -> None:
    branches = [{"after": "a", "start": share, "steps": "rest"} for share in (0.7, 0.8, 0.9)]
    found = phases({"steps": "rest", "keep": [0.7, 0.8, 0.9]}, *branches, total_steps=197_411)
    assert [found[name].start_step for name in "bcd"] == [138_188, 157_929, 177_670]


def test_only_kept_steps_are_added_to_the_identity() -> None:
    plain, kept = phases({"steps": "rest"})["a"], phases({"steps": "rest", "keep": [10]})["a"]
    assert plain.identity() == {"name": "a", "index": 0, "start_step": 0, "end_step": 1000, "solver": None}
    assert kept.identity() == {**plain.identity(), "keep": [10]}


CASES: list[tuple[list[dict[str, Any]], str]] = [
    (
        [{"steps": 0.5}, {"after": "aa", "steps": "rest"}],
        "after: there is no phase 'aa' before this one; did you mean 'a'?",
    ),
    ([{"steps": 0.5, "after": "b"}, {"steps": "rest"}], "a.after: there is no phase 'b' before this one"),
    ([{"steps": "rest"}, {"after": "b", "steps": "rest"}], "b.after: there is no phase 'b' before this one"),
    (
        [{"steps": "rest", "keep": [0.8]}, {"start": 0.7, "steps": "rest"}],
        "b.start: phase 'a' does not keep step 700; add 0.7 to the list `keep` of 'a'",
    ),
    ([{"steps": 500}, {"start": 600, "steps": "rest"}], "b.start: step 600 is outside of phase 'a', steps 0 to 500"),
    ([{"steps": "rest", "start": 5}], "a.start: the first phase starts at step 0; remove the key"),
    (
        [{"steps": 500, "keep": [0.6]}, {"steps": "rest"}],
        "a.keep: step 600 is not between the phase's start 0 and end 500",
    ),
    ([{"steps": 1001}], "a.steps: the phase ends at step 1001, the task has total_steps 1000"),
    ([{"steps": 500}, {"steps": 1000}], "b.steps: the phase ends at step 1500, the task has total_steps 1000"),
    ([{"steps": "rest"}, {"steps": "rest"}], "b.steps: no step of the 1000 is left"),
    ([{"steps": "rest"}, {"steps": 10}], "b.steps: no step of the 1000 is left"),
    (
        [{"steps": 900, "keep": [700]}, {"start": 700, "steps": "rest"}],
        "the phases up to 'a' have 900 steps, the task has total_steps 1000",
    ),
]


@pytest.mark.parametrize(("items", "message"), CASES, ids=[case[1] for case in CASES])
def test_what_makes_no_curriculum_is_one_line(items: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        phases(*items)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("x.yaml: curriculum")


def test_every_branch_is_trained_from_the_trunk_and_evaluated(language: ExperimentFile) -> None:
    nodes = build_graph(language.load())
    trunk = nodes["train/trunk-s1/bounded"]
    assert trunk.config["phase"]["keep"] == [700, 800, 900]
    assert "start" not in trunk.upstream
    for share in (70, 80, 90):
        branch = nodes[f"train/trunk-s1/free-{share}"]
        assert branch.upstream["start"] == trunk.key
        assert (branch.config["phase"]["index"], branch.config["phase"]["start_step"]) == (1, 10 * share)
    ends = ("bounded", "free-70", "free-80", "free-90")
    assert [key for key in nodes if key.startswith("evaluate/trunk-s1/")] == [
        f"evaluate/trunk-s1/{phase}/perplexity" for phase in ends
    ]
    assert "evaluate:trunk-s1/free-70/perplexity" in nodes["report"].upstream


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
