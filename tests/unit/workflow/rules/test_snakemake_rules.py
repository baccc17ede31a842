import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_jobs.tracking import tracked_run as jobs_side
from implicit_llm_workflow.experiment_files.yaml_files import read_yaml
from implicit_llm_workflow.planning.plan import UnknownTarget
from implicit_llm_workflow.project_dirs import PROJECT_DIR
from implicit_llm_workflow.rules.snakemake_driver import Driver, announce, report
from implicit_llm_workflow.rules.snakemake_internals import profile_in_use
from implicit_llm_workflow.rules.snakemake_rules import RuleInputs, plan_from_snakemake, the_config_file
from tests.unit.workflow.experiments import ExperimentFile, finish, work_of

FREE = SimpleNamespace(run="implicit-s0", phase="free")
marked = "ancient {}".format


@pytest.mark.parametrize("is_finished", [False, True])
def test_inputs_are_the_wanted_manifests_and_ancient(tiny: ExperimentFile, is_finished: bool) -> None:
    if is_finished:
        finish(tiny.plan())
    plan = tiny.plan()
    job = RuleInputs(plan, marked)
    sources = ("data/s3-train", "train/implicit-s0/unrolled")
    manifests = [f"ancient {work_of(plan, key)}/manifest.json" for key in sources]
    assert job.upstream("train")(FREE) == manifests
    assert RuleInputs(plan, marked, is_driver=False).upstream("train")(FREE) == []
    job.forced = {sources[1]}
    assert job.upstream("train")(FREE) == [manifests[0], manifests[1].removeprefix("ancient ")]


def test_a_job_whose_manifest_was_deleted_from_its_run_directory_reads_that_folder(tiny: ExperimentFile) -> None:
    finish(tiny.plan())
    folder = tiny.plan().root / "train/implicit-s0/free"
    (folder / "manifest.json").unlink()
    plan = tiny.plan()
    job = RuleInputs(plan, marked)
    assert job.upstream("train")(FREE)[-1] == str(folder)
    evaluation = SimpleNamespace(run="implicit-s0", phase="free", evaluation="word-problem")
    assert plan.manifest(plan.nodes["train/implicit-s0/free"]) not in " ".join(job.upstream("evaluate")(evaluation))
    assert (plan.running(["report"]), plan.running(plan.wanted)) == (set(), {"train/implicit-s0/free"})


def test_paths_have_one_reading(tiny: ExperimentFile) -> None:
    plan = tiny.plan()
    job = RuleInputs(plan, marked)
    identity, inputs = Identity.read(plan.identity_text(plan.find("train/implicit-s0/free")))
    assert (identity.stage, inputs["data"]) == ("train", plan.root / "data" / "s3-train")
    with pytest.raises(UnknownTarget, match="no such job"):
        job.node("train", SimpleNamespace(run="implicit-s9", phase="free"))
    constraints = job.wildcard_constraints
    assert [name for name in ("tiny", "tiny2") if re.fullmatch(constraints["config"], name)] == ["tiny"]
    assert not re.fullmatch(constraints["run"], "a/b")
    assert not re.fullmatch(constraints["fingerprint"], "a" * 17)


def test_a_rule_that_reads_the_configuration_again_needs_it_in_one_file(tiny: ExperimentFile, tmp_path: Path) -> None:
    config, other = dict(read_yaml(tiny.path)), tmp_path / "other.yaml"
    other.write_text("name: other\n")

    def file_of(config: dict[str, Any], *paths: Path) -> str:
        files = [str(path) for path in paths]
        return the_config_file(plan_from_snakemake(config, files), files)

    assert file_of(config, tiny.path) == str(tiny.path)
    assert file_of(config, other, tiny.path) == str(tiny.path)  # which says it all
    other.write_text(tiny.path.read_text())
    for changed, paths in (({**config, "name": "other"}, [tiny.path, other]), ({**config, "name": "x"}, [tiny.path])):
        with pytest.raises(ConfigError, match=r"not the whole configuration is in .*; put it into one file"):
            file_of(changed, *paths)


def test_numbers_that_snakemake_reads_as_text_make_the_same_experiment(tiny: ExperimentFile) -> None:
    tiny.edit("batch_size: 8}", "batch_size: 8, optimizer: {eps: 1e-9}}").edit("tol: 0.1", "tol: 1e-1")
    tiny.edit("hidden_size: 16", "hidden_size: 16, layer_norm_epsilon: 1e-6")
    axis = "rate: {key: override.task.schedule.peak_learning_rate, values: [1e-3, 3e-3]}"
    tiny.edit("  explicit:\n    data", f"  explicit:\n    grid: {{{axis}}}\n    data")
    config = yaml.safe_load(tiny.path.read_text())
    assert config["override"]["task"]["optimizer"] == {"eps": "1e-9"}
    experiment = plan_from_snakemake(config, [str(tiny.path)]).experiment
    assert experiment == tiny.load()
    assert experiment.runs["explicit-rate0.001"].training.optimizer.eps == 1e-9
    assert experiment.runs["implicit"].training.model["layer_norm_epsilon"] == 1e-6


MANY = 2000


def test_many_inputs_are_named_in_a_file(language: ExperimentFile) -> None:
    plan = language.edit("num_shards: 3", f"num_shards: {MANY}").plan()
    plan.write_job_files()
    identity, inputs = Identity.read(f"@{plan.identity_file(plan.nodes['data/text-train'])}")
    assert len(inputs) == MANY
    assert inputs["shard-01999"] == plan.root / "data" / "text-shard-01999"
    assert inputs.keys() == identity.upstream.keys()


def test_every_path_belongs_to_the_rule_of_one_kind(language: ExperimentFile) -> None:
    plan = language.plan()
    job = RuleInputs(plan, marked)
    kinds = ("word_problem", "babi_text", "catbabi", "tokenizer", "token_shard", "token_stream")
    tasks = ("word_problem", "catbabi", "language_model")
    for node in plan.nodes.values():
        if node.stage == "data":
            assert [kind for kind in kinds if re.fullmatch(job.names("data", kind), node.name)] == [node.config["kind"]]
        if node.stage == "train":
            run = node.name.split("/")[0]
            assert [task for task in tasks if re.fullmatch(job.names("train", task), run)] == [node.config["task"]]
    assert re.fullmatch(job.names("evaluate", "perplexity"), "perplexity")
    assert not re.fullmatch(job.names("evaluate", "catbabi"), "perplexity")
    lacked = job.names("evaluate", "word_problem")
    assert not [text for text in ("", "a", "\n", "word-problem") if re.search(lacked, text)]


def test_many_stale_results_are_summed_up(tiny: ExperimentFile) -> None:
    said: list[str] = []
    plan = tiny.plan()
    report("stale", {f"data/{number}": "why" for number in range(20)}, plan, said.append)
    assert said[0] == f"stale: {plan.root}/data/0 (why)"
    assert said[-1] == f"stale: 8 more; `{plan.list_command}` lists them"


def test_a_job_reads_what_the_driver_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = set()
    for program, words, command in (
        ("/usr/bin/snakemake", ["--configfile", "my file.yaml"], "--configfile 'my file.yaml'"),
        ("/usr/lib/snakemake/__main__.py", ["x" * 100] * 1000, "x"),  # as `implicit-llm run` starts it
    ):
        monkeypatch.setenv(jobs_side.VARIABLE, "")  # so that it is as before after the test
        monkeypatch.setattr(sys, "argv", [program, *words])
        announce()
        assert len(os.environ[jobs_side.VARIABLE]) < 4000  # what an environment takes
        found = jobs_side.current_invocation()
        assert found["command"].startswith(f"snakemake {command}")
        ids.add(found["id"])
    assert [len(one) for one in ids] == [16, 16]


@pytest.mark.parametrize(
    ("words", "profile"),
    [("--profile profiles/gpu -n", "profiles/gpu"), ("demo --profile=gpu", "gpu"), ("--cores 1 demo", "usual")],
)
def test_the_profile_is_that_of_the_command_or_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, words: str, profile: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["snakemake", *words.split()])
    monkeypatch.setenv("SNAKEMAKE_PROFILE", "usual")
    assert profile_in_use() == profile


def test_an_interrupt_while_mlflow_gets_the_last_metrics_is_one_line(
    tiny: ExperimentFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    said: list[str] = []
    driver = Driver.__new__(Driver)
    driver._plan, driver._logger = tiny.plan(), SimpleNamespace(warning=said.append)
    monkeypatch.setattr("implicit_llm_jobs.tracking.mlflow_writer.late_works", lambda root: [root])
    monkeypatch.setattr("subprocess.run", interrupted)
    driver.after_last_job()
    assert said == ["interrupted: MLflow lacks some metrics, which `implicit-llm mlflow rebuild` adds"]


def test_a_job_that_was_started_by_hand_belongs_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "null", "{", '{"id": "x"}', "[]"):
        monkeypatch.setenv(jobs_side.VARIABLE, text)
        assert jobs_side.current_invocation() is None


RULES = sorted((PROJECT_DIR / "workflow" / "rules").glob("*.smk"))
SHELL = re.compile(r"^ +shell:\n((?: {8,}.*\n)+)", re.MULTILINE)
FIELD = re.compile(r"(?<!\{)\{([^{}]+)\}")
NUMBERS = {"threads"}  # Snakemake itself makes it an integer


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_every_field_of_a_shell_command_is_quoted(path: Path) -> None:
    commands = SHELL.findall(path.read_text(encoding="utf-8"))
    assert commands or path.stem not in ("data", "train", "evaluate", "report")
    for field in FIELD.findall("".join(commands)):
        assert field.endswith(":q") or field in NUMBERS, f"write {{{field}:q}}"
