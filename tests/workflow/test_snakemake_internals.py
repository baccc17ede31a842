"""What Snakemake's undocumented parts, on which the driver builds, do: seen in what a small workflow runs.

They pass with the lowest and the newest release that the project allows.
"""

import re
import shutil
from pathlib import Path

import pytest

from tests.workflow.tiny_project import LIBRARY, NOTHING, ROOT, Project

SNAKEFILE = """
from implicit_llm_workflow.rules import snakemake_internals as internals

rule all:
    input: "b", "c"

rule a:
    output: "a"
    resources: hardware="h100"
    params: hardware=lambda wildcards: internals.resource_of(workflow, "a", "hardware")
    shell: "echo {params.hardware} > {output}"

rule b:
    input: lambda wildcards: forced and "a" or ancient("a")
    output: "b"
    shell: "touch {output}"

rule c:
    output: "c"
    shell: "touch {output}"

forced = set()

if workflow.is_main_process:
    call = internals.command_line()
    forced = internals.forced_outputs(workflow, call, {"a", "b", "c"})
    print("targets", sorted(call.targets), "runs", internals.does_run_jobs(workflow, call), "forced", sorted(forced))

    rule:
        name: "readable/b"
        input: "b"

onstart:
    print("makes", sorted(internals.outputs_to_make(workflow)))
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A finished workflow of which Snakemake has no records, so that it decides by the files alone."""
    folder = tmp_path_factory.mktemp("internals")
    (folder / "Snakefile").write_text(SNAKEFILE)
    project = Project(folder, LIBRARY, variables={"PYTHONPATH": str(ROOT / "workflow" / "lib")})
    said = project.command("snakemake", "--cores", "1")
    assert "targets [] runs True forced []\n" in said
    assert "makes ['a', 'b', 'c']\n" in said
    assert (folder / "a").read_text() == "h100\n"
    shutil.rmtree(folder / ".snakemake")
    return project


def dry_run(project: Project, *words: str) -> str:
    return project.command("snakemake", "--dry-run", "--cores", "1", *words)


@pytest.mark.parametrize(
    ("words", "said", "jobs"),
    [
        ([], "targets [] runs False forced []", set()),
        (["-R", "a"], "targets [] runs False forced ['a']", {"a", "b"}),  # what is made from it follows
        (["-R", "a", "--", "c"], "targets ['c'] runs False forced ['a']", {"a"}),
        (["-f", "b"], "targets ['b'] runs False forced ['b']", {"b"}),
        (["-F"], "targets [] runs False forced ['a', 'b', 'c']", {"a", "b", "c"}),
    ],
)
def test_what_the_user_forces_is_known_to_the_snakefile_and_what_is_made_from_it_follows(
    done: Project, words: list[str], said: str, jobs: set[str]
) -> None:
    output = dry_run(done, *words)
    assert f"{said}\n" in output
    assert set(re.findall(r"^ +output: (\w)$", output, re.MULTILINE)) == jobs
    assert (NOTHING in output) == (not jobs)


@pytest.mark.parametrize("words", [["--summary"], ["--dag"], ["--rulegraph"], ["--list"], ["--lint"], ["--unlock"]])
def test_a_call_that_looks_at_jobs_is_told_from_one_that_runs_them(done: Project, words: list[str]) -> None:
    with_lints = words == ["--lint"]
    assert "runs False" in done.command("snakemake", "--cores", "1", *words, code=int(with_lints))


def test_a_rule_may_have_a_path_for_a_name(done: Project) -> None:
    (done.dir / "b").unlink()
    output = dry_run(done, "readable/b")
    assert set(re.findall(r"^ +output: (\w)$", output, re.MULTILINE)) == {"b"}
    (done.dir / "b").touch()


CONFIG_OF_JOBS = """
from implicit_llm_workflow.rules import snakemake_internals as internals

rule a:
    output: "a"
    run: Path(output[0]).write_text(config["word"])  # in a process of its own

if workflow.is_main_process:
    internals.give_config_file(workflow, Path("given.json"))
"""


def test_jobs_read_the_config_file_that_they_are_given(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(CONFIG_OF_JOBS)
    for word in ("named", "given"):
        (tmp_path / f"{word}.json").write_text(f'{{"word": "{word}"}}')
    project = Project(tmp_path, LIBRARY, variables={"PYTHONPATH": str(ROOT / "workflow" / "lib")})
    project.command("snakemake", "--cores", "1", "--configfile", "named.json")
    assert (tmp_path / "a").read_text() == "given"
