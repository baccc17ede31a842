"""`implicit-llm explain` and `implicit-llm accept` beside the Snakemake that they speak of."""

import json
import re
import shlex
import shutil

from tests.workflow.test_staleness import TRAINED
from tests.workflow.tiny_project import EVALUATED, NOTHING, Project

EXPERIMENT = ("--config", "tiny.yaml")


def explained(project: Project, *arguments: str) -> dict[str, dict]:
    """What `explain` says of each job."""
    values = json.loads(project.command("implicit-llm", "explain", *arguments, *EXPERIMENT, "--json"))
    assert values["total"]["jobs"] == sum(job["runs"] for job in values["jobs"])
    return {job["job"]: job for job in values["jobs"]}


def running(jobs: dict[str, dict]) -> set[str]:
    return {key for key, job in jobs.items() if job["runs"]}


def edit_model(project: Project) -> None:
    project.edit(project.library / "models" / "stack.py", "tol / 2", "tol / 3")


def accept_edited_model(project: Project) -> None:
    edit_model(project)
    project.command("implicit-llm", "accept", "train/*", "--why", "half or a third", *EXPERIMENT)


def test_what_is_explained_is_what_snakemake_runs(project: Project) -> None:
    edit_model(project)
    jobs = explained(project)
    assert running(jobs) == project.planned() == TRAINED
    free = jobs["train/implicit-s0/free"]
    assert free["code"]["files"] == ["implicit_llm.models.stack (solve)"]
    assert free["difference"]["changed_inputs"] == ["train/implicit-s0/unrolled"]
    assert (free["cost"]["unit"], free["cost"]["basis"]) == ("cpu", "as last time")
    assert free["cost"]["hours"] > 0
    text = project.command("implicit-llm", "explain", *EXPERIMENT)
    assert "implicit_llm.models.stack (solve)" in text
    assert f"{len(TRAINED)} of 9 jobs will run" in text


def test_a_missing_result_is_explained_as_snakemake_takes_it(project: Project) -> None:
    target = "train/implicit-s0/unrolled"
    shutil.rmtree(project.results / target)
    assert running(explained(project)) == running(explained(project, target)) == project.planned() == {target}
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    (project.results / "train/explicit-s0/explicit/manifest.json").write_text("{")
    assert running(explained(project)) == project.planned()
    assert explained(project)["train/explicit-s0/explicit"]["cost"]["basis"] == "done before, is taken up again"


def test_what_is_accepted_stays_and_can_be_built_upon_until_it_is_revoked(project: Project) -> None:
    accept_edited_model(project)
    assert NOTHING in project.snakemake()
    shutil.rmtree(project.dir / ".snakemake")
    assert NOTHING in project.snakemake()
    project.edit(project.config, "eval_block_len: 4", "eval_block_len: 8")
    assert project.planned() == {*EVALUATED, "report"}
    project.snakemake()
    project.command("implicit-llm", "accept", "--revoke", "train/*", *EXPERIMENT)
    assert project.planned() == TRAINED


def test_forcing_an_accepted_job_says_how_to_revoke_that(project: Project) -> None:
    accept_edited_model(project)
    job = "train/explicit-s0/explicit"
    accepted, target = project.manifest(job), f"results/tiny/{job}/manifest.json"
    refused = project.snakemake(target, "--forcerun", target, code=2)
    (advice,) = re.findall(r"type `(implicit-llm accept --revoke [^`]+)`", refused)
    assert project.manifest(job) == accepted
    project.command(*shlex.split(advice))
    project.snakemake(target, "--forcerun", target)
    assert project.manifest(job) != accepted
