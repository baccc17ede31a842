"""The driver itself: bad configuration, a second driver, a killed one."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

from implicit_llm_workflow.rules.snakemake_driver import hold_lock
from tests.workflow.tiny_project import DEADLINE_S, NOTHING, ROOT, Project, make_project


def test_a_mistake_in_the_configuration_is_one_line_and_exit_code_2(project: Project) -> None:
    project.edit(project.config, "hard_fraction: 0.5", "hard_fraction: 1.5")
    output = project.snakemake("--dry-run", code=2)
    assert "Traceback" not in output
    errors = [line for line in output.splitlines() if "rror" in line]
    assert len(errors) == 1
    assert re.fullmatch(r"error: tiny\.yaml: data\.s3\.train\.hard_fraction: expected a number from 0 to .*", errors[0])


def test_a_checkout_that_would_run_the_code_of_another_one_is_refused(built: Project) -> None:
    project = replace(built, variables={"PYTHONPATH": str(ROOT / "workflow" / "lib")})
    output = project.snakemake("--dry-run", code=2)
    assert "Traceback" not in output
    assert (
        f"error: {project.dir}: the installed package implicit_llm_workflow belongs to another tree, {ROOT}" in output
    )
    assert f"`cd {project.dir} && make setup" in output


def test_an_unknown_target_is_refused_with_the_nearest_and_all_that_have_a_name(project: Project) -> None:
    for target, meant in (
        ("trian", "train"),
        ("results/tiny/train/implicit-s0/fre/manifest.json", "results/tiny/train/implicit-s0/free/manifest.json"),
    ):
        output = project.snakemake("--dry-run", target, code=2)
        assert "Traceback" not in output
        assert f"\nerror: {target}: no target of tiny.yaml, by name there are " in output
        assert f"; did you mean '{meant}'?" in output
        (names,) = re.findall("by name there are (.*);", output)
        assert {"all", "train", "tiny"} <= set(names.split(", "))
    assert project.planned("results/tiny/../tiny/report/manifest.json") == set()


def test_another_experiment_than_that_of_the_call_is_refused_as_such(project: Project) -> None:
    output = project.snakemake("--dry-run", "demo", code=2)
    advice = "type `snakemake --configfile workflow/config/demo.yaml` with your other options"
    assert f"\nerror: demo: is an experiment of its own, and this call is of tiny.yaml; {advice}" in output
    assert "did you mean" not in output


def test_a_target_that_configfile_has_swallowed_is_named(built: Project) -> None:
    output = built.snakemake("--dry-run", "--configfile", "tiny.yaml", "results/tiny/report/manifest.json", code=2)
    assert "error: results/tiny/report/manifest.json: is a target, and --configfile takes every word" in output
    assert "Traceback" not in output


def test_a_store_of_mlflow_that_cannot_be_made_stops_nothing(project: Project) -> None:
    (project.results.parent / "mlflow.db").unlink()
    (project.results / "report" / "manifest.json").unlink()
    assert "MLflow: mlflow is not installed; type `pip install mlflow`; the jobs run without it" in project.snakemake()
    assert (project.results / "report" / "manifest.json").is_file()


def test_a_second_driver_is_refused_but_may_look(built: Project) -> None:
    with hold_lock(built.results / ".driver.lock"):
        output = built.snakemake(code=2)
        assert "\nerror: results/tiny/.driver.lock: another Snakemake" in output
        assert "Traceback" not in output
        assert NOTHING in built.snakemake("--dry-run")


def test_after_a_kill_of_everything_the_next_call_goes_on(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    with project.held() as driver:
        os.killpg(driver.pid, signal.SIGKILL)
    assert not (project.results / "report" / "manifest.json").exists()
    done = sorted(path.stat().st_mtime_ns for path in project.results.glob("data/*/manifest.json"))
    project.snakemake()
    assert (project.results / "report" / "manifest.json").is_file()
    assert sorted(path.stat().st_mtime_ns for path in project.results.glob("data/*/manifest.json"))[: len(done)] == done


def test_ctrl_c_waits_for_what_runs_and_a_second_one_shows_no_traceback(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    with project.held() as driver:
        driver.send_signal(signal.SIGINT)
        assert driver.stdout is not None
        output = ""
        while "Terminating processes on user request" not in output:
            line = driver.stdout.readline()
            assert line, output
            output += line
        driver.send_signal(signal.SIGINT)
        project.release()
        output += driver.communicate(timeout=DEADLINE_S)[0]
    assert driver.returncode == 1
    assert "Traceback" not in output
    assert json.loads((project.results / ".driver.json").read_text()) == {"profile": "profiles/local"}
    assert len(list(project.results.glob("train/*/*/manifest.json"))) == 1  # the job that ran has finished
