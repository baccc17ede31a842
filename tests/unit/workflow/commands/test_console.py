import json
import os
import re
from pathlib import Path

import pytest
from typer.main import get_command

from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_workflow import console
from implicit_llm_workflow.commands.jobs import parse_inputs
from implicit_llm_workflow.commands.options import OptionError
from tests.unit.workflow.console_calls import loaded_after, loaded_by, output, refusal, run, where
from tests.unit.workflow.experiments import ExperimentFile, finish
from tests.unit.workflow.run_dirs import event, finish_with, metrics, real_plan, write_journal

COMMANDS = get_command(console.app).commands
GROUPED = {f"{group} {name}": it for group in COMMANDS for name, it in getattr(COMMANDS[group], "commands", {}).items()}
HELPS = {name: it.help for name, it in {**COMMANDS, **GROUPED}.items() if not hasattr(it, "commands")}


def test_a_command_that_shows_something_loads_no_heavy_package(tiny: ExperimentFile) -> None:
    plan = real_plan(tiny)
    for phase in ("unrolled", "free"):
        write_journal(plan, f"train/implicit-s0/{phase}", event("stage_started"), metrics(1, 1, loss=1.0))
    (tiny.path.parent / "tasks_1-20_v1-2.tar.gz").write_bytes(b"damaged")
    babi = ("prefetch", "--config", "miniature", "--downloads", str(tiny.path.parent))
    shown = ("status", "status --jobs", "explain", "estimate --json", "verify", "gc", "report --numbers")
    calls = [("--help",), ("evaluate", "harness", "--help"), babi, *((*it.split(), *where(tiny)) for it in shown)]
    assert loaded_by(*calls, ("compare", "implicit-s0", "implicit-s0/unrolled", *where(tiny))) == []


def test_making_data_loads_no_models() -> None:
    use = "from implicit_llm_jobs import stage; from implicit_llm_data.stages import catbabi, token_shard, word_problem"
    assert loaded_after(use) == ["numpy"]


@pytest.mark.parametrize("command", sorted(HELPS))
def test_every_command_explains_itself_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    out = output(capsys, *command.split(), "--help")
    example = out.split("Example")[1].partition("╭")[0]
    assert re.search(rf"implicit-llm {command}\b", example)
    # Without a name Typer shows the type, `<int range>`, and `<bool>` where an option takes nothing.
    assert re.findall(r"<(?:bool|int|float|str|path|list|dir|file)\b", out) == []


@pytest.mark.parametrize(("below", "options"), [("docs", ()), (".", ("--results", "reslts"))])
def test_a_folder_without_results_is_named_and_so_is_that_of_the_checkout(
    capsys: pytest.CaptureFixture[str],
    tiny: ExperimentFile,
    monkeypatch: pytest.MonkeyPatch,
    below: str,
    options: tuple[str, ...],
) -> None:
    checkout = tiny.path.parent
    (checkout / "Snakefile").touch()
    (checkout / "docs").mkdir()
    monkeypatch.chdir(checkout / below)
    err = refusal(capsys, "status", "--config", str(tiny.path), *options)
    assert f"the results of {checkout} are in {checkout / 'results'}" in err
    monkeypatch.chdir(checkout)
    (checkout / "results").rmdir()  # as before the first run
    output(capsys, "status", "--config", str(tiny.path))


def test_a_command_in_a_checkout_that_is_not_the_installed_one_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "workflow" / "lib" / "implicit_llm_workflow").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path / "docs")
    said = refusal(capsys, "status")
    assert f"error: {tmp_path}: the installed package implicit_llm_workflow belongs to another tree" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["status", "--confg", "demo"], "No such option: --confg (Possible options: --config, --json)"),
        (["accept"], "Missing argument 'TARGET'"),
        (["train", "--nodes", "x"], "Invalid value for '--nodes': "),
        (["evaluate", "word-problm"], "No such command 'word-problm'. Did you mean 'word-problem'"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_with_the_help_to_type(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    err = refusal(capsys, *words)
    assert err.startswith(f"error: {message}")
    assert err.endswith(f"; type `implicit-llm {words[0]} --help`\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["preflight", "--hardware", "v100", "--device", "cda"],
            "Invalid value for '--device': ",
        ),
        (["mlflow", "rebuild", "--results", "/proc/none"], "/proc/none: no such directory"),
        (
            ["job", "--run-dir", "x", "--identity", "{}", "--threads", "-1"],
            "--threads: expected an integer",
        ),
        (
            ["train", "--run-dir", "x", "--identity", "{}", "--grace-s", "-1"],
            "--grace-s: expected a number",
        ),
    ],
)
def test_a_wrong_value_is_one_line_with_the_fix(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert refusal(capsys, *words).startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("status train/implicit-s0/fre", "did you mean 'train/implicit-s0/free'"),
        ("verify data/s3-trian", "did you mean 'data/s3-train'"),
        ("status train/*/fre", "train/*/fre: no job matches; "),
        ("compare implicit-s7 implicit-s0", "implicit-s7: experiment tiny has no such run; did you mean 'implicit-s"),
        ("compare implicit-s explicit", "implicit-s: experiment tiny has no such run; did you mean 'implicit-s"),
        ("compare implicit-s0 explicit", "implicit-s0: has not finished; type: snakemake "),
        ("compare ./ explicit", ": is in no run directory of a finished job; name a job, its folder or a file in it"),
        ("explain --identity", "--identity: needs one job"),
        ("lineage report", "report: has not finished; type: snakemake --configfile "),
        ("accept report", "--why: is missing"),
        ("report --only train/implicit-s0/free", "is no figure or table of the experiment; "),
        ("estimate --hardware h20", "did you mean 'h200'"),
    ],
)
def test_a_mistake_about_an_experiment_is_one_line_that_says_what_to_type(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny: ExperimentFile,
    command: str,
    message: str,
) -> None:
    monkeypatch.chdir(tiny.path.parent)
    assert message in refusal(capsys, *command.split(), *where(tiny))


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("data", "there is no job of stage data and kind wordproblem"),
        ("daata", "there is no job of stage daata"),
        ("train", "is that of a job of the stage train; type `implicit-llm train`"),
    ],
)
def test_an_identity_that_no_job_has_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stage: str, message: str
) -> None:
    identity = Identity(stage, "s3", {"kind": "wordproblem"}, "c0de", {}).to_json()
    code, _, err = run(capsys, "job", "--run-dir", str(tmp_path / "s3"), "--identity", identity)
    assert (code, message in err) == (2, True)


def test_debug_shows_the_traceback_wherever_it_stands(tiny: ExperimentFile) -> None:
    tiny.edit("group: S3", "group: Q3")
    for words in (["--debug", "status"], ["status", "--debug"]):
        with pytest.raises(Exception, match="is no group"):
            console.main([*words, "--config", str(tiny.path)])


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("broken\n  here"), 1, "error: ValueError: broken here; add --debug for the traceback\n"),
        (type("Preempted", (Exception,), {"exit_code": 75})("saved"), 75, "error: saved\n"),
        (type("Wrong", (ValueError,), {"exit_code": 2})("tau: 2"), 2, "error: tau: 2\n"),
    ],
)
def test_the_exit_code_says_what_kind_of_error_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, message: str
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(console, "app", fail)
    assert run(capsys, "status") == (code, "", message)


@pytest.fixture
def identity(capsys: pytest.CaptureFixture[str], tiny: ExperimentFile) -> str:
    return output(capsys, "explain", "--identity", "data/s3-test-L8-h0.5", "--config", str(tiny.path))


def test_a_job_is_run_from_its_identity_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, identity: str
) -> None:
    run_dir = tmp_path / "run"
    output(capsys, "job", "--run-dir", str(run_dir), "--identity", identity, "--log", f"{run_dir}/job.log")
    assert json.loads((run_dir / "manifest.json").read_text())["summary"]["num_samples"] == 32
    assert "done" in (run_dir / "job.log").read_text()


@pytest.mark.parametrize(
    ("stage", "option", "value"),
    [
        ("data", "device", "cpu"),
        ("data", "batch-size", "4"),
        ("checkpoint", "threads", "2"),
        ("evaluate", "downloads", "elsewhere"),
        ("report", "kernels", "torch"),
        ("excerpt", "threads", "2"),
    ],
)
def test_an_option_that_does_nothing_in_a_job_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stage: str, option: str, value: str
) -> None:
    identity = Identity(stage, "x", {}, "c0de", {}).to_json()
    code, _, err = run(capsys, "job", "--run-dir", str(tmp_path / "x"), "--identity", identity, f"--{option}", value)
    assert (code, err) == (2, f"error: --{option}: does nothing in a job of the stage {stage}; remove it\n")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("given", "seen"), [(None, "1"), ("0", "0")])
def test_jobs_do_not_look_at_the_hub_unless_told_to(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    identity: str,
    given: str | None,
    seen: str,
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    if given is not None:
        monkeypatch.setenv("HF_HUB_OFFLINE", given)
    output(capsys, "job", "--run-dir", str(tmp_path / "run"), "--identity", identity)
    assert os.environ["HF_HUB_OFFLINE"] == seen


def test_an_edited_identity_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, identity: str) -> None:
    edited = identity.replace('"length":8', '"length":9')
    code, _, err = run(capsys, "job", "--run-dir", str(tmp_path / "run"), "--identity", edited)
    assert (code, "fingerprint" in err.splitlines()[-1]) == (2, True)


def test_many_inputs_come_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "inputs.json"
    path.write_text(json.dumps({f"shard-{number}": f"results/{number}" for number in range(2000)}))
    inputs = parse_inputs(["tokenizer=t", f"@{path}"])
    assert len(inputs) == 2001
    assert (inputs["tokenizer"], inputs["shard-1999"]) == (Path("t"), Path("results/1999"))


@pytest.mark.parametrize("text", ["{", "[]", '{"role": 1}', '{"data": "a"}'])
def test_a_file_that_holds_no_inputs_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "inputs.json").write_text(text)
    with pytest.raises(OptionError, match=re.escape(f"--input @{tmp_path}/inputs.json")):
        parse_inputs(["data=x", f"@{tmp_path}/inputs.json"])


@pytest.mark.parametrize("options", [["data"], ["=x"], ["data="], ["data=x", "data=y"], ["@nowhere.json"]])
def test_an_input_without_role_or_directory_is_refused(options: list[str]) -> None:
    with pytest.raises(OptionError, match="--input"):
        parse_inputs(options)


def test_the_headline_shows_each_mode_and_marks_stale_numbers(
    capsys: pytest.CaptureFixture[str], tiny: ExperimentFile
) -> None:
    plan = tiny.plan()
    finish(plan)
    for run_name in ("implicit-s0/free", "implicit-s1/free", "explicit-s0/explicit"):
        accuracy = 1.0 if "s1" in run_name else 0.992
        accuracies = {
            "s3-test-L8-h0.5": {"blockwise": accuracy, "sequential": None},
            "s3-test-L16-h0.5": {"blockwise": 0},
        }
        finish_with(plan, f"evaluate/{run_name}/word-problem", {"accuracy_last10": accuracies})
    out = output(capsys, "report", "--numbers", *where(tiny))
    assert "s3, word-problem: accuracy_last10" in out
    # Stale, as made-up code digests are not the real ones.
    spread = r"99\.6 % \(99\.2 % to 100\.0 %, 2 seeds\)"
    assert re.search(rf"implicit/free \(stale\) +blockwise +{spread} +0\.0 % \(0\.0 % to 0\.0 %, 2 seeds\)\n", out)
    assert re.search(r"explicit/explicit \(stale\) +sequential +- +-\n", out)
    assert "mlflow ui --backend-store-uri sqlite:///" in out


def test_the_headline_of_language_models_shows_mean_and_spread_over_seeds(
    capsys: pytest.CaptureFixture[str], language: ExperimentFile
) -> None:
    plan = language.plan()
    finish(plan)
    for seed, perplexity in ((0, 20.0), (1, 22.0)):
        by_length = {"text-test.L32": {"blockwise": perplexity}, "text-test.L64": {"blockwise": None}}
        finish_with(plan, f"evaluate/trunk-s{seed}/free-80/perplexity", {"perplexity": by_length})
    finish_with(plan, "evaluate/babi-s0/explicit/questions", {"accuracy": {"babi-test": {"parallel": 0.5}}})
    out = output(capsys, "report", "--numbers", *where(language))
    for part in (
        "text, perplexity: perplexity",
        r"trunk/free-80 \(stale\) +blockwise +21 \(20 to 22, 2 seeds\) +-\n",
        r"trunk/free-90 \(stale\) +- +- +-\n",
        "babi, questions: accuracy",
        r"babi/explicit \(stale\) +parallel +50\.0 %\n",
    ):
        assert re.search(part, out), part
