"""Experiments of every kind through Snakemake: that of docs/experiments.md, language models, and the real library."""

import re
import sqlite3
from pathlib import Path

import pytest

from tests.pages import ROOT, commands_of
from tests.unit.workflow.experiments import ExperimentFile
from tests.workflow.tiny_project import LIBRARY, NOTHING, Project, make_project, make_real_project

# Commands of docs/experiments.md, which these tests type as a reader would.
INIT, STATUS, ESTIMATE, DRY_RUN, RUN, HEADLINE, EXPLAIN = commands_of("docs/experiments.md")


def typed(folder: Path, words: list[str]) -> str:
    return Project(folder, LIBRARY).command(*words)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """The folder with the files of the page."""
    typed(tmp_path, INIT)
    folder = tmp_path / INIT[-1]
    page = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"^```yaml\n# (\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        assert not (folder / name).exists()
        (folder / name).write_text(text)
    return folder


def test_the_files_of_the_page_plan_what_it_says(study: Path) -> None:
    waiting = re.findall(r"^\S+  +waiting ", typed(study, STATUS), re.MULTILINE)
    assert (
        len(waiting) == len(set(re.findall(r"output: (\S+)/work/[0-9a-f]+/manifest\.json", typed(study, DRY_RUN)))) > 15
    )
    assert "z60-implicit" in typed(study, ESTIMATE)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_experiment_of_the_page_runs_and_a_change_reruns_the_free_phases(study: Path) -> None:
    config = study / "workflow" / "config"
    ExperimentFile(config / "solvable.yaml").edit("total_steps: 2000", "total_steps: 200")
    typed(study, RUN)
    numbers = typed(study, HEADLINE)
    assert re.search(r"^z60 +z60-implicit/free ", numbers, re.MULTILINE)
    assert re.search(r"^accuracy_last10 z60-test-\S+ blockwise-8-token +0?\.?[0-9]+ ", numbers, re.MULTILINE)
    assert "<svg" in (study / "results" / "solvable" / "report" / "index.html").read_text()
    with sqlite3.connect(study / "results" / "mlflow.db") as store:
        assert {status for (status,) in store.execute("select status from runs")} == {"FINISHED"}
    ExperimentFile(config / "curricula" / "short-bounded.yaml").edit("tol: 0.05", "tol: 0.02")
    stale = re.findall(r"^(\S+) +stale", typed(study, EXPLAIN), re.MULTILINE)
    groups, free = ("a5", "z60"), "implicit-s0/free"
    jobs = {f"{job}" for it in groups for job in (f"train/{it}-{free}", f"evaluate/{it}-{free}/word-problem")}
    assert sorted(stale) == sorted({*jobs, "report"})


ALL = {
    *("data/babi-text", "data/babi-train", "data/babi-valid", "data/babi-test"),
    *("data/text-tokenizer", *(f"data/text-shard-{number:05d}" for number in range(10))),
    *("data/text-train", "data/text-test"),
    *("train/babi-s0/explicit", "evaluate/babi-s0/explicit/catbabi"),
    *("train/trunk-s0/bounded", "evaluate/trunk-s0/bounded/perplexity"),
    *("train/trunk-s0/free-80", "evaluate/trunk-s0/free-80/perplexity"),
    "report",
}


@pytest.fixture(scope="module")
def built_language(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The finished experiment, not to be changed."""
    project = make_project(tmp_path_factory.mktemp("language"), "language")
    assert project.planned() == ALL
    project.snakemake()
    return project


def test_each_kind_of_job_has_its_own_rule_and_is_done_once(built_language: Project) -> None:
    for key in ALL:
        assert (built_language.results / key / "manifest.json").is_file(), key
    stream = built_language.manifest("data/text-train")
    assert stream["summary"] == {"num_inputs": len(stream["identity"]["upstream"])} == {"num_inputs": 10}
    assert NOTHING in built_language.snakemake()


def test_gradient_checkpointing_is_the_machines_choice(built_language: Project, tmp_path: Path) -> None:
    language = built_language.copy_to(tmp_path / "copy")
    option = ("--set-resources", "train_language_model:gradient_checkpointing=on")
    assert NOTHING in language.snakemake(*option)
    language.edit(language.dir / "curricula" / "branches.yaml", "max_iter: 24", "max_iter: 25")
    language.snakemake(*option)
    logs = {path.parent.name: path.read_text() for path in language.results.glob("train/trunk-s0/*/job.log")}
    assert [phase for phase, text in logs.items() if "gradient checkpointing: True" in text] == ["free-80"]


@pytest.mark.parametrize(
    ("experiment", "some"),
    [
        (
            "paper",
            {f"train/mamba2-130m-implicit-s0/free-{share}" for share in (70, 80, 90)} | {"data/pile-shard-01649"},
        ),
        ("miniature", {"train/text-llama3-explicit-long-s1/explicit", "evaluate/babi-implicit-s0/free/catbabi"}),
    ],
)
def test_the_project_has_jobs_for_its_large_experiments(
    built_language: Project, tmp_path: Path, experiment: str, some: set[str]
) -> None:
    project = built_language.copy_to(tmp_path / "copy")
    project.name = experiment
    (project.dir / "workflow" / "config" / f"{experiment}.yaml").rename(project.config)
    assert project.planned() >= {*some, "report"}


def test_a_data_set_is_made_and_tracked(tmp_path: Path) -> None:
    project = make_real_project(tmp_path)
    target = "results/tiny/data/s3-train/manifest.json"
    project.snakemake(target)
    assert project.manifest("data/s3-train")["summary"]["num_samples"] == 256
    with sqlite3.connect(project.dir / "results" / "mlflow.db") as store:
        query = "select runs.name, tags.value from runs join tags using (run_uuid) where key = 'command'"
        ((name, command),) = store.execute(query)
    assert name == "data/s3-train"
    assert target in command
    assert NOTHING in project.snakemake(target)
