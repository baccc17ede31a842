"""A page with a stale number is not made: the number, its producer and the command are named."""

from pathlib import Path

import pytest

from implicit_llm_contracts.runs import Identity, Manifest
from implicit_llm_workflow.commands.jobs import Job, run_job
from implicit_llm_workflow.planning.code_digest import JobCode, job_digest
from implicit_llm_workflow.results.missing import StaleNumbers, stale_error
from tests.unit.report.sample_runs import SampleRun, make_runs

RUNS = (SampleRun("a5-explicit", "A5", False, 0.2, (0.2,), steps=20, seeds=(0, 1), lengths=(16,)),)
EVALUATION = "evaluate/a5-explicit-s0/explicit/word-problem"


@pytest.fixture
def roles(tmp_path: Path) -> dict[str, Path]:
    return make_runs(tmp_path / "results" / "demo", RUNS)


def make(folder: Path, roles: dict[str, Path], upstream: dict[str, str]) -> None:
    code = job_digest(JobCode("implicit_llm_report.stage"))
    identity = Identity("report", "report", {"experiment": "demo"}, code, upstream)
    run_job(Job(folder, identity.to_json(), [f"{role}={path}" for role, path in roles.items()]))


def fingerprints(roles: dict[str, Path]) -> dict[str, str]:
    return {role: Manifest.read(path / "manifest.json").fingerprint for role, path in roles.items()}


def metrics_of(run_dir: Path) -> Path:
    return next(run_dir.glob("work/*/metrics.json"))


def test_an_input_of_another_fingerprint_stops_the_report(tmp_path: Path, roles: dict[str, Path]) -> None:
    stale = EVALUATION.replace("/", ":", 1)
    with pytest.raises(StaleNumbers) as caught:
        make(tmp_path / "report", roles, fingerprints(roles) | {stale: "f" * 64})
    message = str(caught.value)
    assert f"stale numbers: accuracies of {EVALUATION}: its manifest carries fingerprint" in message
    assert f"wanted is {'f' * 16}" in message
    command = "snakemake --configfile workflow/config/demo.yaml --profile profiles/local"
    assert f"{command} {roles[stale]}/manifest.json" in message
    assert "implicit-llm report --config demo --missing" in message
    assert not (tmp_path / "report" / "index.html").exists()


def test_every_changed_number_is_named_not_the_first_alone(tmp_path: Path, roles: dict[str, Path]) -> None:
    wanted = fingerprints(roles)
    for path in roles.values():
        if "evaluate" in path.parts:
            file = metrics_of(path)
            file.write_text(file.read_text().replace("0.", "1.", 1))
    with pytest.raises(StaleNumbers, match="stale numbers") as caught:
        make(tmp_path / "report", roles, wanted)
    for seed in (0, 1):
        assert f"accuracies of {EVALUATION.replace('-s0', f'-s{seed}')}" in str(caught.value)
    assert ": expected sha256 " in str(caught.value)


def test_a_whole_input_is_not_stale_and_a_lost_file_is(roles: dict[str, Path]) -> None:
    wanted = fingerprints(roles)
    assert stale_error(wanted, roles, "demo") is None
    run_dir = roles[EVALUATION.replace("/", ":", 1)]
    metrics_of(run_dir).unlink()
    message = str(stale_error(wanted, roles, "demo"))
    assert f"rm -f {run_dir}/manifest.json &&" in message
    assert "found no file" in message
