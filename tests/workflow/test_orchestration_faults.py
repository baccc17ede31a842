"""Jobs that fail, wait, or miss a file: what was finished stays, and nothing has a name that it does not merit.

Rows 37, 43, 45 and 47 of tests/fault/README.md.
"""

import json
import shutil

from tests.workflow.tiny_project import DEADLINE_S, Project

UNROLLED, FREE, EXPLICIT = "train/implicit-s0/unrolled", "train/implicit-s0/free", "train/explicit-s0/explicit"


def manifests(project: Project) -> set[str]:
    return {path.parent.relative_to(project.results).as_posix() for path in project.results.rglob("*/manifest.json")}


def solved_by_code(project: Project) -> set[tuple[str, float]]:
    """(code digest, what that code computes) of every published result of training."""
    found = set()
    for job in manifests(project) & {UNROLLED, FREE, EXPLICIT}:
        manifest = project.manifest(job)
        model = project.results / job / manifest["files"][0]["path"]
        found.add((manifest["identity"]["code"], json.loads(model.read_text())["solved"]))
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
    work = project.results / EXPLICIT / "work"
    shutil.rmtree(work)
    work.write_text("where a folder should be")
    project.snakemake(code=1)
    assert {UNROLLED, FREE, "evaluate/implicit-s0/free/word-problem"} <= manifests(project)
    done = {path: path.stat().st_mtime_ns for path in project.results.glob("train/implicit-s0/*/manifest.json")}
    rest = {EXPLICIT, "evaluate/explicit-s0/explicit/word-problem", "report"}
    assert project.planned() == rest
    work.unlink()
    project.snakemake()
    assert rest <= manifests(project)
    assert done == {path: path.stat().st_mtime_ns for path in done}
