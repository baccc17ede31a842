"""What `status` says of the small experiment while Snakemake works on it."""

import json
import re
import subprocess
import time
from typing import Any

from implicit_llm_workflow.commands.options import make_plan
from implicit_llm_workflow.results.job_states import outputs_of
from tests.workflow.tiny_project import Project

FREE, FAILING = "train/implicit-s0/free", "evaluate/explicit-s0/explicit/word-problem"
DEADLINE_S = 90


def status(project: Project) -> dict[str, Any]:
    return dict(json.loads(project.command("implicit-llm", "status", "--config", project.config.name, "--json")))


def states(found: dict[str, Any]) -> dict[str, str]:
    return {job["job"]: job["state"] for job in found["jobs"]}


def test_a_job_at_work_and_one_that_failed_are_told_and_then_all_is_done(project: Project) -> None:
    project.edit(project.config, "tol: 0.1", "tol: 0.2")
    project.edit(project.config, "eval_block_len: 4", "eval_block_len: 2")
    hold = project.dir / "hold"
    hold.touch()
    faults = {"TINY_HOLD": str(hold), "TINY_FAIL": FAILING.removeprefix("evaluate/")}
    with subprocess.Popen(
        project.driver, cwd=project.dir, env=project.environment | faults, stdout=subprocess.PIPE, text=True
    ) as driver:
        try:
            found, end = status(project), time.monotonic() + DEADLINE_S
            while (states(found)[FREE], states(found)[FAILING]) != ("running", "failed"):
                assert time.monotonic() < end, states(found)
                found = status(project)
            assert found["driver"] == {"pid": driver.pid, "is_alive": True}
            assert found["stages"]["data"] == {**dict.fromkeys(found["stages"]["data"], 0), "done": 3}
            (failed,) = [job for job in found["jobs"] if job["state"] == "failed"]
            assert (failed["why"], failed["failure_class"]) == ("RuntimeError: made to fail", "bug")
            assert failed["last_lines"][-1].endswith("RuntimeError: made to fail")
            assert states(found)["evaluate/implicit-s0/free/word-problem"] in ("stale", "waiting")
        finally:
            hold.unlink()
        driver.communicate(timeout=DEADLINE_S)
    assert driver.returncode == 1
    found = status(project)
    assert (found["driver"]["is_alive"], states(found)[FREE], states(found)[FAILING]) == (False, "done", "failed")
    assert found["next"] == "snakemake --configfile tiny.yaml --profile profiles/local"
    project.command(*found["next"].split(), "--cores", "2")
    assert set(states(status(project)).values()) == {"done"}


def test_the_outputs_by_which_a_job_is_known_again_are_those_of_its_rule(built: Project) -> None:
    said = built.snakemake("--dry-run", "--forceall")
    declared = {frozenset(line.split(", ")) for line in re.findall(r"^ +output: (.*)$", said, re.MULTILINE)}
    plan = make_plan(str(built.config), built.results.parent)
    assert {frozenset(outputs_of(plan, node)) for node in plan.nodes.values()} <= declared
