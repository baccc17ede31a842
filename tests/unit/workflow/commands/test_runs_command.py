"""The list of runs, for people and for machines."""

from __future__ import annotations

import json
import re

import pytest
from rich.console import Console

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.planning.plan import Plan
from implicit_llm_workflow.results.compare import find_model
from implicit_llm_workflow.results.job_states import observe
from implicit_llm_workflow.results.status import runs_table
from implicit_llm_workflow.results.text import number_text, share_text, time_text
from tests.unit.workflow.console_calls import run, where
from tests.unit.workflow.experiments import ExperimentFile
from tests.unit.workflow.run_dirs import event, finish_with, held, metrics, real_plan, work_of, write_journal

MLFLOW_ID = "0123456789abcdef0123456789abcdef"
EXPLICIT, FREE, UNROLLED = "train/explicit-s0/explicit", "train/implicit-s0/free", "train/implicit-s0/unrolled"


@pytest.fixture
def worked(tiny: ExperimentFile) -> ExperimentFile:
    """One phase done, one at work, one failed."""
    plan = real_plan(tiny)
    finish_with(plan, UNROLLED, {"global_step": 4, "metrics": {"loss": 1.25}})
    (work_of(plan, UNROLLED) / "mlflow.json").write_text(json.dumps({"run_id": MLFLOW_ID}))
    values = {"loss": 0.5, "residual": 0.0301, "num_iter": 7.25, "unconverged_share": 0.012}
    write_journal(plan, FREE, event("stage_started"), metrics(7, 5, **values), torn='{"kind": "metr')
    write_journal(plan, EXPLICIT, event("stage_started"), event("stage_failed", error="ValueError: no"))
    return tiny


def listed(capsys: pytest.CaptureFixture[str], tiny: ExperimentFile, *arguments: str) -> list[str]:
    """Run and phase of each run in the order of the list."""
    code, out, err = run(capsys, "runs", *where(tiny), *arguments, "--json")
    assert code == 0, err
    return [f"{item['run']}/{item['phase']}" for item in json.loads(out)["runs"]]


def table_text(plan: Plan, width: int) -> list[str]:
    jobs = [job for job in observe(plan).values() if job.node.stage == "train"]
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(runs_table(jobs))
    return captured.get().splitlines()


def test_each_phase_is_a_line_that_says_how_it_is_doing(
    capsys: pytest.CaptureFixture[str], worked: ExperimentFile
) -> None:
    plan = real_plan(worked)
    with held(plan.run_dir(plan.nodes[FREE]) / "work" / ".lock"):
        code, out, _ = run(capsys, "runs", *where(worked))
    assert code == 0
    assert re.search(r"^implicit-s0 +done +unrolled +4/4 +1\.25 +- +- +- +\d+ (?:s|min)$", out, re.MULTILINE)
    assert re.search(r"^implicit-s0 +running +free +7/10 +0\.5 +0\.03 +7\.25 +1\.2 % +\d+ d$", out, re.MULTILINE)
    assert re.search(r"^implicit-s1 +waiting +free +-/10 +- ", out, re.MULTILINE)
    assert re.search(r"^explicit-s0 +failed +explicit +-/10 ", out, re.MULTILINE)
    assert out.splitlines()[0] == "1 of 5 jobs done, 1 running, 1 failed, 2 waiting"


def test_the_table_fits_a_terminal(worked: ExperimentFile) -> None:
    lines = table_text(real_plan(worked), 100)
    assert len(lines) == 6  # no line of a run is broken
    assert all(len(line) <= 100 for line in lines)


def test_a_long_name_is_broken_and_not_cut(tiny: ExperimentFile) -> None:
    tiny.path.write_text(tiny.path.read_text().replace("explicit:\n    data", f"{'x' * 70}:\n    data"))
    text = "".join(line.split(" ")[0] for line in table_text(tiny.plan(), 100))
    assert "x" * 70 + "-s0" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ["implicit-s0/unrolled", "implicit-s0/free", "implicit-s1/unrolled", "implicit-s1/free"]),
        (("*/free",), ["implicit-s0/free", "implicit-s1/free"]),
        (("implicit-s0",), ["implicit-s0/unrolled", "implicit-s0/free"]),
        (("implicit",), [f"implicit-s{s}/{p}" for s in (0, 1) for p in ("unrolled", "free")]),
        (("imp*s1/free", "train/implicit-s0/free"), ["implicit-s0/free", "implicit-s1/free"]),
        (("--status", "done"), ["implicit-s0/unrolled"]),
        (("--status", "done", "--status", "stopped"), ["implicit-s0/unrolled", "implicit-s0/free"]),
    ],
)
def test_runs_are_chosen(
    capsys: pytest.CaptureFixture[str], worked: ExperimentFile, arguments: tuple[str, ...], expected: list[str]
) -> None:
    found = listed(capsys, worked, *arguments)
    assert found == ([*expected, "explicit-s0/explicit"] if not arguments else expected)


def test_machines_get_everything(capsys: pytest.CaptureFixture[str], worked: ExperimentFile) -> None:
    _, out, _ = run(capsys, "runs", *where(worked), "--status", "failed", "--json")
    (found,) = json.loads(out)["runs"]
    assert (found["job"], found["why"], found["mlflow_run_id"]) == (EXPLICIT, "ValueError: no", None)
    assert found["progress"]["end_step"] == 10
    assert found["age_s"] > 0


@pytest.mark.parametrize(
    ("name", "label", "keys"),
    [
        (FREE, "implicit-s0/free", [FREE]),
        ("implicit-s0/unrolled", "implicit-s0/unrolled", [UNROLLED]),
        ("implicit-s0", "implicit-s0/free", [FREE]),
        ("implicit", "implicit/free", [FREE, "train/implicit-s1/free"]),
        ("implicit/unrolled", "implicit/unrolled", [UNROLLED, "train/implicit-s1/unrolled"]),
        ("explicit", "explicit-s0/explicit", [EXPLICIT]),
        ("explicit/", "explicit-s0/explicit", [EXPLICIT]),
    ],
)
def test_a_run_is_found_by_what_people_call_it(tiny: ExperimentFile, name: str, label: str, keys: list[str]) -> None:
    assert find_model(name, tiny.plan()) == (label, keys)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("implicit-s3", "has no such run; did you mean 'implicit-s"),
        ("qqq", "has no such run; valid: explicit-s0, implicit-s0, implicit-s1"),
        ("plicit", "has no such run; did you mean"),
    ],
)
def test_a_name_of_no_run_is_refused(tiny: ExperimentFile, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_model(name, tiny.plan())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (12345, "12,345"),
        (1e-7, "1e-07"),
        (0.123456, "0.1235"),
        (5061.3, "5,061"),
        (2.5e12, "2.5e+12"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number_text(value) == text


def test_times_and_shares_have_a_unit_that_fits() -> None:
    assert [time_text(s) for s in (None, 0, 89, 90, 5000, 6000, 86400 * 20)] == [
        "-", "0 s", "89 s", "2 min", "83 min", "1.7 h", "20 d",
    ]  # fmt: skip
    assert [share_text(share) for share in (None, 0.0, 0.004, 0.5, 1.0)] == ["-", "0 %", "0.4 %", "50 %", "100 %"]
