"""What a shell would run stays text, in paths and in values of a configuration; names with it are refused."""

from __future__ import annotations

import json
from pathlib import Path

from tests.workflow.tiny_project import make_project

COMMAND = "$(touch pwned); touch pwned & `touch pwned` 'x' \"y"


def traces(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name == "pwned"]


def test_no_path_and_no_value_reaches_a_shell_as_code(tmp_path: Path) -> None:
    project = make_project(tmp_path / COMMAND)
    project.config.write_text(project.config.read_text() + f"report: {{title: {json.dumps(COMMAND)}}}\n")
    project.snakemake()
    manifest = json.loads((project.results / "report" / "manifest.json").read_text())
    assert manifest["identity"]["config"]["title"] == COMMAND
    assert traces(tmp_path) == []
