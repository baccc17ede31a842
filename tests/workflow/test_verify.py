"""`implicit-llm verify`, and the commands that it prints run as they are printed."""

import re
from pathlib import Path

from tests.workflow.tiny_project import NOTHING, Project

BROKEN = ("data/s3-train", "train/explicit-s0/explicit")


def vouched_files(project: Project) -> dict[Path, tuple[bytes, int]]:
    """Content and time of what the jobs of the experiment made."""
    paths = [path for path in project.results.glob("*/**/work/*/*") if path.suffix in (".json", ".txt")]
    files = [path for path in paths if path.name not in ("manifest.json", "provenance.json", "mlflow.json")]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_the_printed_commands_rebuild_what_is_broken_and_nothing_else(project: Project) -> None:
    assert "none broken" in project.command("implicit-llm", "verify", "--config", "tiny.yaml")
    whole = vouched_files(project)
    victims = {next(path for path in whole if path.is_relative_to(project.results / job)) for job in BROKEN}
    for path in victims:
        path.write_bytes(path.read_bytes()[::-1])
    output = project.command("implicit-llm", "verify", "--config", "tiny.yaml", code=1)
    assert set(re.findall(r"\(job (\S+)\)", output)) == set(BROKEN)
    for command in re.findall("^    +(.*)$", output, re.MULTILINE):
        project.command("bash", "-c", command)
    assert "none broken" in project.command("implicit-llm", "verify", "--config", "tiny.yaml")
    now = vouched_files(project)
    assert {path: now[path][0] for path in whole} == {path: content for path, (content, _) in whole.items()}
    assert {path for path in whole if now[path][1] != whole[path][1]} == victims
    assert NOTHING in project.snakemake()
