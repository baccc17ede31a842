"""The driver itself: a first run, mistakes, a second driver, a killed one, failing jobs, Snakemake's own report.

Rows 37, 40, 47, 58 and 61 of tests/fault/README.md.
"""

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

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


FREE = "results/tiny/train/implicit-s0/free/manifest.json"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], r"trian: no target of tiny\.yaml, by name there are .*\btiny\b.*; did you mean 'train'"),
        ([FREE.replace("free", "fre")], rf"\S+/fre/manifest\.json: no target .*; did you mean '{FREE}'"),
        (
            ["demo"],
            "demo: is an experiment of its own, and this call is of tiny.yaml; "
            "type `snakemake --configfile workflow/config/demo.yaml` with your other options",
        ),
        (["--configfile", "tiny.yaml", FREE], rf"{FREE}: is a target, and --configfile takes every word"),
    ],
)
def test_a_word_that_is_no_target_is_refused_with_what_to_type(built: Project, words: list[str], said: str) -> None:
    output = built.snakemake("--dry-run", *words, code=2)
    assert re.search(rf"^error: {said}", output, re.MULTILINE)
    assert ("did you mean" in output) == ("did you mean" in said)


def test_a_target_may_be_written_as_any_path_of_it(built: Project) -> None:
    assert built.planned(FREE.replace("tiny", "tiny/../tiny")) == set()


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


def solved_by_code(project: Project) -> set[tuple[str, float]]:
    """(code digest, what that code computes) of every published result of training."""
    found = set()
    for path in project.results.glob("train/*/*/manifest.json"):
        manifest = json.loads(path.read_text())
        model = json.loads((path.parent / manifest["files"][0]["path"]).read_text())
        found.add((manifest["identity"]["code"], model["solved"]))
    return found


def test_code_that_is_edited_while_jobs_wait_is_never_published_under_the_digest_of_the_old_code(
    project: Project,
) -> None:
    stack = project.library / "models" / "stack.py"
    project.edit(stack, "tol / 2", "tol / 4")
    with project.held() as driver:
        project.edit(stack, "tol / 4", "tol / 8")
        project.release()
        output, _ = driver.communicate(timeout=DEADLINE_S)
    assert driver.returncode == 1
    assert "the code was changed since the job was planned" in output
    published = solved_by_code(project)
    assert {0.5 / 4} <= {solved for _, solved in published} <= {0.5 / 2, 0.5 / 4}  # what ran, and what was there before
    assert len({code for code, _ in published}) == len(published)
    project.snakemake()
    assert {solved for _, solved in solved_by_code(project)} == {0.5 / 8}


def test_one_run_that_fails_for_good_does_not_stop_the_others(project: Project) -> None:
    project.edit(project.config, "batch_size: 8", "batch_size: 4")
    failing = "train/explicit-s0/explicit"
    work = project.results / failing / "work"
    shutil.rmtree(work)
    work.write_text("where a folder should be")
    project.snakemake(code=1)
    assert project.planned() == {failing, "evaluate/explicit-s0/explicit/word-problem", "report"}
    done = {path: path.stat().st_mtime_ns for path in project.results.glob("train/implicit-s0/*/manifest.json")}
    work.unlink()
    project.snakemake()
    assert NOTHING in project.snakemake("--dry-run")
    assert done == {path: path.stat().st_mtime_ns for path in done}
