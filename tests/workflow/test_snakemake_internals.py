"""What Snakemake's private parts, on which the driver builds, do: seen in what a small workflow runs.

Without a job graph that is made after the targets are known, or without its forced files, a stale result would silently
count as fresh: these tests fail then, also where the names are still there.
"""

import re
import shutil
from pathlib import Path

import pytest

from implicit_llm_workflow.rules.snakemake_internals import UnsupportedSnakemake, around_job_graph
from tests.workflow.tiny_project import LIBRARY, NOTHING, ROOT, Project

SNAKEFILE = """
from implicit_llm_workflow.rules import snakemake_internals as internals

def before():
    print("targets", internals.targets(workflow), internals.does_run_jobs(workflow))
    print("is made", [name for name in ("b", "./b", "x") if internals.is_made(workflow, name)])

def after():
    print("forced", sorted(internals.forced_outputs(workflow, lambda: ["a", "b", "c"])))
    internals.force(workflow, config.get("stale", "").split(","))

if workflow.is_main_process:
    internals.around_job_graph(workflow, before, after)

onstart:
    print("makes", sorted(internals.outputs_to_make(workflow)))

rule all:
    input: "b", "c"

rule a:
    output: "a"
    resources: hardware="h100"
    params: hardware=lambda wildcards: internals.resource_of(workflow, "a", "hardware")
    shell: "echo {params.hardware} > {output}"

rule b:
    input: "a"
    output: "b"
    shell: "touch {output}"

rule c:
    output: "c"
    shell: "touch {output}"
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A finished workflow of which Snakemake has no records, so that it decides by the files alone."""
    folder = tmp_path_factory.mktemp("internals")
    (folder / "Snakefile").write_text(SNAKEFILE)
    project = Project(folder, LIBRARY, variables={"PYTHONPATH": str(ROOT / "workflow" / "lib")})
    said = project.command("snakemake", "--cores", "1")
    assert "targets [] True\nis made ['b', './b']\nforced []\nmakes ['a', 'b', 'c']\n" in said
    assert (folder / "a").read_text() == "h100\n"
    shutil.rmtree(folder / ".snakemake")
    return project


def dry_run(project: Project, *words: str) -> str:
    return project.command("snakemake", "--dry-run", "--cores", "1", *words)


def planned(project: Project, *words: str) -> set[str]:
    return set(re.findall(r"^ +output: (\w)$", dry_run(project, *words), re.MULTILINE))


@pytest.mark.parametrize(
    ("words", "jobs"),
    [
        ([], set()),
        (["--config", "stale=a"], {"a", "b"}),  # what is made from it follows
        (["--config", "stale=b"], {"b"}),
        (["c", "--config", "stale=a"], set()),  # no target needs it
    ],
)
def test_a_forced_result_and_what_follows_runs_as_far_as_a_target_needs_it(
    done: Project, words: list[str], jobs: set[str]
) -> None:
    assert planned(done, *words) == jobs


def test_targets_and_what_the_user_forces_are_known_when_the_graph_is_made(done: Project) -> None:
    assert re.search(r"targets \['b'\] False\n(.*\n)*forced \['a'\]\n", dry_run(done, "b", "-R", "a"))
    assert "forced ['b']\n" in dry_run(done, "-f", "b")
    assert NOTHING in dry_run(done)


def test_a_snakemake_that_cannot_be_told_is_refused() -> None:
    with pytest.raises(UnsupportedSnakemake, match="snakemake>="):
        around_job_graph(object(), lambda: None, lambda: None)


CONFIG_OF_JOBS = """
from implicit_llm_workflow.rules import snakemake_internals as internals

if workflow.is_main_process:
    internals.around_job_graph(
        workflow, lambda: internals.give_config_file(workflow, Path("given.json")), lambda: None
    )

rule a:
    output: "a"
    run: Path(output[0]).write_text(config["word"])  # in a process of its own
"""


def test_jobs_read_the_config_file_that_they_are_given(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(CONFIG_OF_JOBS)
    for word in ("named", "given"):
        (tmp_path / f"{word}.json").write_text(f'{{"word": "{word}"}}')
    project = Project(tmp_path, LIBRARY, variables={"PYTHONPATH": str(ROOT / "workflow" / "lib")})
    project.command("snakemake", "--cores", "1", "--configfile", "named.json")
    assert (tmp_path / "a").read_text() == "given"
