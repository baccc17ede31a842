"""What is installed: versions that are the same in every file, and the library alone, without the extras."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import implicit_llm
from tests.pages import ROOT
from tests.unit.workflow.experiments import run

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = map(Requirement, [*PROJECT["dependencies"], *EXTRAS["workflow"], *EXTRAS["evaluation"]])
RANGES = {item.name.replace("_", "-").lower(): item.specifier for item in REQUIREMENTS}


def pins(name: str) -> list[Requirement]:
    lines = (ROOT / "constraints" / name).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "-c "))]


def test_the_gpu_environment_has_the_versions_that_made_the_kept_results() -> None:
    made_by: dict[str, set[str]] = {}
    with tarfile.open(ROOT / "results/reference/state-tracking/inputs.tar.xz") as kept:
        for member in kept:
            provenance = json.load(kept.extractfile(member)) if member.name.endswith("/provenance.json") else {}
            if str(provenance.get("device")).startswith("NVIDIA"):
                for package, version in provenance["versions"].items():
                    made_by.setdefault(package, set()).add(version)
    assert len(made_by) > 5
    pinned = {pin.name: {item.version for item in pin.specifier} for pin in pins("gpu.txt")}
    assert {package: pinned.get(package) for package in made_by} == made_by


@pytest.mark.parametrize("machine", ["cpu.txt", "gpu.txt"])
def test_the_pinned_versions_lie_in_the_ranges(machine: str) -> None:
    pinned = pins("common.txt") + pins(machine)
    assert len({pin.name for pin in pinned}) == len(pinned)
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


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("PYTHON", "error: {python} is not Python 3.11 or 3.12; set PYTHON=python3.12"),
        ("VENV", "error: the Python in {venv} is not 3.11 or 3.12; type: rm -r {venv}"),
    ],
)
def test_an_old_python_is_refused_before_anything_is_installed(tmp_path: Path, old: str, said: str) -> None:
    python = tmp_path / "bin" / "python"  # stands for one of another version
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    given = {"PYTHON": sys.executable, "VENV": str(tmp_path / "new")} | {
        old: str(python if old == "PYTHON" else tmp_path)
    }
    words = ["make", "--no-print-directory", "setup", *(f"{name}={value}" for name, value in given.items())]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == said.format(python=python, venv=tmp_path)
    assert done.stdout == ""


ADVICE = "in the project's checkout type: pip install '.[all]'"
MISSING = rf"error: No module named '\w+'; {re.escape(ADVICE)}\n"
USE = """
import torch
from transformers import AutoModelForCausalLM
import implicit_llm
model = AutoModelForCausalLM.from_pretrained(implicit_llm.trained_model("s5-state-passing-s0")).eval()
answers = model(torch.randint(120, (1, 8))).logits.argmax(-1)
model.save_pretrained("saved")
print(tuple(answers.shape))
"""


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of the installed distributions that these need, with theirs."""
    found: set[str] = set()
    waiting = list(requirements)
    while waiting:
        item = Requirement(waiting.pop())
        if item.name in found or (item.marker is not None and not item.marker.evaluate({"extra": ""})):
            continue
        try:
            waiting += distribution(item.name).requires or []
        except PackageNotFoundError:
            continue
        found.add(item.name)
    return found


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages with the library's requirements only."""
    folder = tmp_path_factory.mktemp("light")
    for name in closure(PROJECT["dependencies"]):
        found = distribution(name)
        for top in {path.parts[0] for path in found.files or [] if path.parts[0] != ".."}:
            if not (folder / top).exists() and top != "__pycache__":
                (folder / top).symlink_to(Path(str(found.locate_file(top))))
    return folder


def run_light(light: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [light, ROOT, ROOT / "workflow" / "lib", ROOT / "workflow" / "report"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, paths)), "HOME": str(cwd)}
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_trained_model_loads_answers_and_saves_without_the_workflow(light: Path, tmp_path: Path) -> None:
    assert not {"snakemake", "mlflow", "pandas", "lm_eval"}.intersection(path.name for path in light.iterdir())
    done = run_light(light, tmp_path, "-c", USE)
    assert done.stdout == "(1, 8)\n", done.stderr
    assert (tmp_path / "saved" / "README.md").is_file()


def test_the_command_says_what_to_install(light: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    done = run_light(light, tmp_path, "-m", "implicit_llm_workflow.console", "status", "--config", "demo")
    assert done.returncode == 2
    assert re.fullmatch(MISSING, done.stderr)
