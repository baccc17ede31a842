"""The driver itself: a first run, bad configuration, a second driver, a killed one, Snakemake's own report."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

from implicit_llm_workflow.rules.snakemake_driver import hold_lock
from tests.workflow.tiny_project import ALL, DEADLINE_S, NOTHING, ROOT, Project, make_project

COMMAND = "$(touch pwned); touch pwned & `touch pwned` 'x' \"y"
NOWHERE = "http://127.0.0.1:9"  # the port of the discard protocol, where nothing listens


def test_every_job_leaves_a_manifest_and_a_log_and_a_second_run_does_nothing(built: Project) -> None:
    for key in ALL:
        assert (built.results / key / "manifest.json").is_file(), key
        assert "done" in (built.results / key / "job.log").read_text(), key
    first, second = (built.manifest(f"train/implicit-s0/{phase}") for phase in ("unrolled", "free"))
    assert second["identity"]["upstream"]["start"] == first["fingerprint"]
    assert NOTHING in built.snakemake()


def test_what_a_shell_would_run_stays_text_in_paths_and_in_values_of_a_configuration(tmp_path: Path) -> None:
    project = make_project(tmp_path / COMMAND)
    project.append(project.config, f"report: {{title: {json.dumps(COMMAND)}}}\n")
    project.snakemake()
    assert project.manifest("report")["identity"]["config"]["title"] == COMMAND
    assert not list(tmp_path.rglob("pwned"))


def test_snakemakes_report_is_made_offline_and_holds_page_figures_and_tables_with_their_captions(
    project: Project,
) -> None:
    lost = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    replace(project, variables={**lost, "no_proxy": "", "NO_PROXY": ""}).snakemake("--report", "report.html")
    text = (project.dir / "report.html").read_text()
    for name in ("index.html", "figures/accuracy-by-length.svg", "figures/solver-health.svg", "tables/published.csv"):
        assert f"results/tiny/report/{name}" in text
    assert "Accuracy on the last ten tokens against the length of the test sequences" in text


def test_a_mistake_in_the_configuration_is_one_line_and_exit_code_2(project: Project) -> None:
    project.edit(project.config, "hard_fraction: 0.5", "hard_fraction: 1.5")
    output = project.snakemake("--dry-run", code=2)
    (error,) = [line for line in output.splitlines() if "rror" in line]
    assert re.fullmatch(r"error: tiny\.yaml: data\.s3\.train\.hard_fraction: expected a number from 0 to .*", error)


def test_a_checkout_that_would_run_the_code_of_another_one_is_refused(built: Project) -> None:
    project = replace(built, variables={"PYTHONPATH": str(ROOT / "workflow" / "lib")})
    output = project.snakemake("--dry-run", code=2)
    named = f"error: {project.dir}: the installed package implicit_llm_workflow belongs to another tree, {ROOT}"
    assert re.search(rf"{re.escape(named)}.*`cd {project.dir} && make setup", output)


def test_an_unknown_target_is_refused_with_the_nearest_and_all_that_have_a_name(project: Project) -> None:
    for target, meant in (
        ("trian", "train"),
        ("results/tiny/train/implicit-s0/fre/manifest.json", "results/tiny/train/implicit-s0/free/manifest.json"),
    ):
        output = project.snakemake("--dry-run", target, code=2)
        line = f"\nerror: {target}: no target of tiny.yaml, by name there are (.*); did you mean '{meant}'"
        (names,) = re.findall(line, output)
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


def test_a_store_of_mlflow_that_cannot_be_made_stops_nothing(project: Project) -> None:
    (project.results.parent / "mlflow.db").unlink()
    (project.results / "report" / "manifest.json").unlink()
    assert "MLflow: mlflow is not installed; type `pip install mlflow`; the jobs run without it" in project.snakemake()
    assert (project.results / "report" / "manifest.json").is_file()


def test_a_second_driver_is_refused_but_may_look(built: Project) -> None:
    with hold_lock(built.results / ".driver.lock"):
        assert "\nerror: results/tiny/.driver.lock: another Snakemake" in built.snakemake(code=2)
        assert NOTHING in built.snakemake("--dry-run")


def test_after_a_kill_of_everything_the_next_call_goes_on(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    with project.held() as driver:
        os.killpg(driver.pid, signal.SIGKILL)
    assert not (project.results / "report" / "manifest.json").exists()
    done = {path: path.stat().st_mtime_ns for path in project.results.glob("data/*/manifest.json")}
    project.snakemake()
    assert project.manifest("report")
    assert {path: path.stat().st_mtime_ns for path in done} == done


def test_ctrl_c_waits_for_what_runs_and_a_second_one_shows_no_traceback(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    with project.held() as driver:
        driver.send_signal(signal.SIGINT)
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
