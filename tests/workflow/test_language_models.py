"""Data in pieces, a trunk with branches and evaluations of several kinds, as Snakemake sees them."""

from pathlib import Path

import pytest

from tests.workflow.tiny_project import NOTHING, Project, make_project

SHARDS = {f"data/text-shard-{number:05d}" for number in range(10)}
BRANCH = {"train/trunk-s0/free-80", "evaluate/trunk-s0/free-80/perplexity"}
TRUNK = {"train/trunk-s0/bounded", "evaluate/trunk-s0/bounded/perplexity"}
ALL = {
    *("data/babi-text", "data/babi-train", "data/babi-valid", "data/babi-test"),
    *("data/text-tokenizer", *SHARDS, "data/text-train", "data/text-test"),
    *("train/babi-s0/explicit", "evaluate/babi-s0/explicit/catbabi"),
    *TRUNK,
    *BRANCH,
    "report",
}


@pytest.fixture(scope="module")
def built_language(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The finished experiment. Not to be changed: take `language` for that."""
    project = make_project(tmp_path_factory.mktemp("language"), "language")
    assert project.planned() == ALL
    project.snakemake()
    return project


@pytest.fixture
def language(built_language: Project, tmp_path: Path) -> Project:
    return built_language.copy_to(tmp_path / "copy")


def test_each_kind_of_job_has_its_own_rule_and_is_done_once(built_language: Project) -> None:
    for key in ALL:
        assert (built_language.results / key / "manifest.json").is_file(), key
    stream = built_language.manifest("data/text-train")
    assert stream["summary"] == {"num_inputs": len(stream["identity"]["upstream"])} == {"num_inputs": 10}
    assert NOTHING in built_language.snakemake()


def test_gradient_checkpointing_is_the_machines_choice(language: Project) -> None:
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
