"""What a shell would run stays text: in paths, in names, in values of a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from implicit_llm_contracts.runs.errors import ConfigError
from tests.unit.workflow.experiments import ExperimentFile
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


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("name: tiny", "name: 'tiny;touch pwned'", "name"),
        ("  s3:\n", "  's3;touch pwned':\n", "data"),
        ("  implicit:\n", "  'implicit$(touch pwned)':\n", "runs"),
        ("  word-problem:\n", "  'word`touch pwned`':\n", "evaluations"),
        ("model: mamba2-implicit", "model: '../../$(touch pwned)'", "model"),
        ("curriculum: explicit", "curriculum: 'x;touch pwned'", "curriculum"),
    ],
)
def test_a_name_with_a_command_in_it_is_refused(tiny: ExperimentFile, old: str, new: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        tiny.edit(old, new).load()
