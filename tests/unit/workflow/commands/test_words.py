"""What a person types first: an experiment as the first argument, `run`, `list`, models by name."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import implicit_llm
from implicit_llm.models.errors import ModelConfigError
from implicit_llm_contracts.runs.atomic import write_json
from implicit_llm_workflow import console
from implicit_llm_workflow.commands.evaluate import _packaged
from implicit_llm_workflow.commands.experiments import write_project
from implicit_llm_workflow.experiment_files.experiment import load_experiment
from implicit_llm_workflow.experiment_files.yaml_files import experiment_names, experiment_path
from implicit_llm_workflow.planning.plan import DRIVER_RECORD, Plan
from implicit_llm_workflow.rules.snakemake_driver import TooCostly, check_cost
from implicit_llm_workflow.rules.snakemake_internals import command_line, starts_jobs_here
from tests.unit.workflow.experiments import ExperimentFile, output, refusal, run

ROOT = Path(__file__).parents[4]
MODEL = "s5-state-passing-s0"


@pytest.fixture(autouse=True)
def _checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout in which nothing was run yet."""
    (tmp_path / "Snakefile").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("guess", "answer"),
    [
        ("demo", "to run the experiment, type `implicit-llm run demo`"),
        ("train demo", "to run the experiment, type `implicit-llm run demo`"),
        (f"evaluate {MODEL}", f"to evaluate the model, type `implicit-llm evaluate word-problem --model {MODEL}`"),
        ("status demoo", "did you mean 'demo'?"),
        ("gc", "type `implicit-llm gc EXPERIMENT`, there are demo, "),
        ("gc --remove", "type `implicit-llm gc EXPERIMENT`, there are demo, "),
        ("accept train/* --why x", "type `implicit-llm accept EXPERIMENT TARGET`, there are demo, "),
        ("status demo paper", "paper: demo is named already; give one experiment"),
        ("status demo --config paper", "paper: demo is named already; give one experiment"),
        ("report demo train/x", "train/x: is no experiment; "),
        ("estimate demo train/x", "train/x: experiment demo has no such job; "),
        ("prefetch demo figure_4", "figure_4: experiment demo has no such job; "),
    ],
)
def test_a_guess_is_answered_by_the_command_to_type(
    capsys: pytest.CaptureFixture[str], guess: str, answer: str
) -> None:
    code, _, err = run(capsys, *guess.split())
    assert (code, err.count("\n")) == (2, 1)
    assert answer in err


def test_there_are_at_most_18_commands_and_those_of_the_rules_are_not_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = get_command(console.app).commands
    listed = [name for name, command in commands.items() if not command.hidden]
    assert len(listed) <= 18
    assert set(commands) - set(listed) == {"job", "train"}
    assert "implicit-llm try" in output(capsys, "--help").split("Options")[0]


def test_a_command_that_reads_takes_the_experiment_that_was_last_run_and_names_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert output(capsys, "status").startswith("experiment demo (")
    for name, age in (("miniature", 10), ("language-models", 100)):
        record = tmp_path / "results" / name / DRIVER_RECORD
        write_json(record, {"config": str(ROOT / f"workflow/config/{name}.yaml")})
        os.utime(record, (record.stat().st_mtime - age,) * 2)
    assert output(capsys, "status").startswith("experiment miniature (")
    code, out, err = run(capsys, "explain", "--json")
    assert (code, json.loads(out)["experiment"]) == (0, "miniature")
    assert err.startswith("experiment miniature (")
    assert output(capsys, "status", "demo").startswith("demo: ")


def test_an_experiment_that_ran_is_named_by_its_name_wherever_its_file_is(
    capsys: pytest.CaptureFixture[str], tiny: ExperimentFile
) -> None:
    mine = tiny.beside("mine/leaky.yaml", tiny.path.read_text().replace("name: tiny", "name: leaky"))
    for name, file in (("leaky", mine), ("tiny", tiny.path)):
        write_json(tiny.path.parent / "results" / name / DRIVER_RECORD, {"config": str(file)})
    for words in (("leaky",), ("--config", "leaky")):
        assert output(capsys, "status", *words).startswith("leaky: ")
    assert json.loads(output(capsys, "explain", "leaky", "data/s3-train", "--json"))["experiment"] == "leaky"
    assert "implicit: has not finished" in refusal(capsys, "compare", "leaky", "implicit", "explicit")
    assert output(capsys, "gc", "leaky").startswith("nothing to delete")
    mine.write_text(tiny.path.read_text().replace("name: tiny", "name: renamed"))
    assert "leaky.yaml is called renamed by now" in refusal(capsys, "gc", "leaky", "--remove")


def test_two_files_with_one_name_do_not_share_results(capsys: pytest.CaptureFixture[str], tiny: ExperimentFile) -> None:
    write_json(tiny.path.parent / "results/tiny" / DRIVER_RECORD, {"config": str(tiny.path)})
    copy = tiny.beside("copy.yaml", tiny.path.read_text())
    for command in (("status",), ("gc", "--remove"), ("run",)):
        said = refusal(capsys, *command, str(copy))
        assert said.startswith(f"error: {copy}: name: results/tiny has the results of {tiny.path}, which has the same")
    copy.write_text(tiny.path.read_text().replace("name: tiny", "name: copied"))
    assert output(capsys, "status", str(copy)).startswith("copied: ")
    tiny.path.rename(copy)  # the experiment goes on in another file
    assert output(capsys, "status", str(copy)).startswith("tiny: ")


def test_an_experiment_is_named_by_its_file_too(capsys: pytest.CaptureFixture[str], tiny: ExperimentFile) -> None:
    by_option = output(capsys, "status", "--config", str(tiny.path), "--jobs")
    assert output(capsys, "status", str(tiny.path), "--jobs") == by_option


def test_a_name_that_is_an_experiment_and_a_target_is_refused(
    capsys: pytest.CaptureFixture[str], tiny: ExperimentFile, tmp_path: Path
) -> None:
    named = tmp_path / "workflow/config/report.yaml"
    named.parent.mkdir(parents=True)
    named.write_text(tiny.path.read_text())
    for folder in ("models", "tasks", "curricula"):
        if (tiny.path.parent / folder).is_dir():
            (named.parent / folder).symlink_to(tiny.path.parent / folder)
    assert "report: is an experiment and a target of it" in refusal(capsys, "status", "report")
    assert output(capsys, "status", "--config", "report").startswith("tiny: ")


def test_experiments_and_trained_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "list", "--json"))
    assert {one["name"] for one in found["experiments"]} == experiment_names()
    of = {one["name"]: one for one in found["experiments"]}
    assert of["paper"]["gpu_hours"] > 1000 > of["demo"]["gpu_hours"]
    assert all(one["jobs"] > 0 and one["done"] == 0 and one["error"] is None for one in of.values())
    for model in found["models"]:
        assert implicit_llm.trained_model(model["name"]).is_dir()
        assert model["task"]
        assert model["accuracy"]
    assert MODEL in output(capsys, "list")


def test_an_experiment_of_another_folder_that_ran_here_is_listed(
    capsys: pytest.CaptureFixture[str], tiny: ExperimentFile
) -> None:
    results = tiny.path.parent / "results"
    for name in ("tiny", "former"):
        write_json(results / name / DRIVER_RECORD, {"config": str(tiny.path)})
    shown = json.loads(output(capsys, "list", "--results", str(results), "--json"))["experiments"]
    found = {one["name"]: one for one in shown}
    assert found.keys() == {*experiment_names(), "tiny", "former"}
    assert (found["tiny"]["jobs"], found["tiny"]["error"]) == (len(tiny.plan().wanted), None)
    assert "is called tiny by now; name the file" in found["former"]["error"]
    assert "by its file, such as study/mine.yaml" in output(capsys, "list")
    tiny.path.write_bytes("# caf\u00e9\n".encode("latin-1") + tiny.path.read_bytes())
    shown = json.loads(output(capsys, "list", "--results", str(results), "--json"))["experiments"]
    assert "is not valid YAML" in {one["name"]: one for one in shown}["tiny"]["error"]


def test_run_prints_the_command_of_snakemake_and_starts_it(tiny: ExperimentFile) -> None:
    folder = tiny.path.parent
    (folder / "Snakefile").write_text(f'include: "{ROOT / "Snakefile"}"\n')
    words = ("run", tiny.path.name, "data/*", "--profile", str(ROOT / "profiles/local"), "--", "-n", "--quiet", "all")
    command = [sys.executable, "-m", "implicit_llm_workflow.console", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.splitlines()[0]
    assert shown.startswith(f"$ snakemake --configfile {tiny.path.name} --profile ")
    assert "results/tiny/data/s3-train/" in shown
    assert shown.endswith(" -n --quiet all")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--resources gpu", ".*; type --resources NAME=INT"),
        ("-n --set-resources=train_catbabi:mem_mb", ".*; type --set-resources RULE:RESOURCE=VALUE"),
        ("--set-threads 2", "Invalid threads definition: .*; type --set-threads RULE=THREADS"),
        ("--retries many", r".* invalid int value: 'many'; `snakemake --help` lists its options"),
        ("--dryrn", "unrecognized arguments: --dryrn; `snakemake --help` lists its options"),
    ],
)
def test_an_option_that_snakemake_refuses_is_one_line_with_its_form(
    capsys: pytest.CaptureFixture[str], typed: str, said: str
) -> None:
    err = refusal(capsys, "run", "demo", "--", *typed.split())
    assert re.fullmatch(f"error: {typed}: Snakemake refuses this: {said}\n", err)


def test_run_outside_of_a_project_says_where_to_go(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = tmp_path / "notes"
    below.mkdir()
    monkeypatch.chdir(below)
    (below / "results").mkdir()
    assert f"there is no Snakefile here; type `cd {tmp_path}`" in refusal(capsys, "run", "demo")


def test_the_shell_completes_experiments_and_then_jobs(tmp_path: Path) -> None:
    def completed(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        variables = os.environ | words | {"_IMPLICIT_LLM_COMPLETE": "complete_bash"}
        command = [sys.executable, "-c", "from implicit_llm_workflow.console import app; app(prog_name='implicit-llm')"]
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False).stdout.split()

    assert completed("implicit-llm status mini") == ["miniature"]
    assert "train/s3-implicit-s0/free" in completed("implicit-llm explain demo train/s3")


def test_a_model_of_the_package_is_evaluated_by_its_name_on_data_that_is_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("evaluate", "word-problem", "--model", MODEL, "--lengths", "32", "--max-samples", "4")
    out = output(capsys, *words)
    assert "s5-long-test-L32-h1" in out
    assert (tmp_path / "results/state-tracking/data/s5-long-test-L32-h1/manifest.json").is_file()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("s5-state-passing-s1", MODEL),
        ("nothing/there", "and run directories of training phases"),
        (Path(), "so the run has not finished"),
    ],
)
def test_what_is_no_trained_model_and_no_finished_run_is_refused(model: str | Path, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        implicit_llm.trained_model(model)


def test_init_in_the_working_directory_names_no_folder_to_change_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")
    assert "next: implicit-llm run demo" in output(capsys, "init", ".")
    assert "next: cd study && implicit-llm run demo" in output(capsys, "init", "study")


def test_a_bare_snakemake_on_this_machine_does_not_start_an_experiment_of_days(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    write_project(folder)
    command = [sys.executable, "-m", "snakemake", "--cores", "2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert re.search(
        r"paper\.yaml: takes [\d,]+ hours of training .* type `implicit-llm run demo` .* `snakemake paper`", error
    )
    assert not (folder / "results").exists()


def test_a_folder_of_ones_own_knows_the_targets_of_its_experiment_and_of_rules_above_ours(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    write_project(folder)
    snakefile = folder / "Snakefile"
    rule = 'rule mine:\n    output:\n        "mine.txt"\n\n\ninclude:'
    snakefile.write_text(snakefile.read_text().replace("include:", rule))

    def call(target: str) -> tuple[int, list[str]]:
        words = ["snakemake", "-n", "--cores", "1", target, "--configfile", "workflow/config/demo.yaml"]
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("error: ")]

    other = "belongs to the experiment paper, and this call is of workflow/config/demo.yaml; type `snakemake "
    for target in ("paper", "results/paper/report/index.html"):
        code, (error,) = call(target)
        assert (code, error.startswith(f"error: {target}: {other}")) == (2, True)
    code, (error,) = call("figure_2")
    assert (code, error.startswith("error: figure_2: no target of workflow/config/demo.yaml, by name")) == (2, True)
    assert error.endswith("; rules of your own Snakefile must stand above its `include`")
    assert call("mine.txt") == (0, [])


@pytest.mark.parametrize(
    ("words", "is_here"),
    [
        ("--cores 2", True),
        ("--profile profiles/local", True),
        ("--executor local --cores 1", True),
        ("--executor submitit --submitit-cluster local --jobs 1", False),
        ("--profile profiles/cluster", False),
        ("--cores 2 --touch", False),
    ],
)
def test_where_jobs_start_follows_from_the_command_and_its_profiles(
    monkeypatch: pytest.MonkeyPatch, words: str, is_here: bool
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["snakemake", *words.split()])
    assert starts_jobs_here(command_line()) == is_here


@pytest.mark.parametrize("words", ["--cores 2 --configfile workflow/config/paper.yaml", "--cores 2 paper"])
def test_an_experiment_that_is_named_is_not_asked_for_its_cost(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["snakemake", *words.split()])
    plan = Plan(load_experiment(experiment_path("paper")))
    assert check_cost(command_line(), plan) is None
    monkeypatch.setattr(sys, "argv", ["snakemake", "--cores", "2"])
    with pytest.raises(TooCostly):
        check_cost(command_line(), plan)


@pytest.mark.parametrize("command", ["gc", "accept"])
def test_the_help_of_a_command_that_needs_the_experiment_promises_no_default(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert "if none is given, else demo" not in " ".join(output(capsys, command, "--help").replace("│", " ").split())
    assert "if none is given, else demo" in " ".join(output(capsys, "status", "--help").replace("│", " ").split())


def test_a_folder_that_is_there_comes_before_a_model_of_the_package(tmp_path: Path) -> None:
    assert _packaged(Path(MODEL)) == implicit_llm.trained_model(MODEL)
    (tmp_path / MODEL).mkdir()
    assert _packaged(Path(MODEL)) == Path(MODEL)
