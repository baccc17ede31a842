"""The versions that the project asks for are the same in every file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import implicit_llm
from tests.unit.workflow.console_calls import run

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = map(Requirement, [*PROJECT["dependencies"], *EXTRAS["workflow"], *EXTRAS["evaluation"]])
RANGES = {item.name.replace("_", "-").lower(): item.specifier for item in REQUIREMENTS}


def test_the_pinned_versions_lie_in_the_ranges() -> None:
    lines = (ROOT / "constraints" / "cpu.txt").read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    known = [pin for pin in pinned if pin.name.replace("_", "-").lower() in RANGES]
    assert len(known) > 10
    for pin in known:
        (version,) = [item.version for item in pin.specifier]
        assert RANGES[pin.name.replace("_", "-").lower()].contains(version), pin


def test_the_environments_of_the_machines_have_a_torch_in_the_range() -> None:
    for path in sorted((ROOT / "envs").glob("*.yaml")):
        versions = re.findall(r"torch==([0-9.]+)", path.read_text(encoding="utf-8"))
        assert versions, path
        assert all(RANGES["torch"].contains(version) for version in versions), path


def test_the_snakefile_asks_for_the_lowest_snakemake_of_the_range() -> None:
    asked = re.search(r'min_version\("([0-9.]+)"\)', (ROOT / "Snakefile").read_text(encoding="utf-8"))
    assert asked is not None
    assert f">={asked[1]}" in str(RANGES["snakemake"]).split(",")


def test_the_command_tells_the_version_of_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"implicit-llm {implicit_llm.__version__}\n", "")
