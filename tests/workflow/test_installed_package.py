"""The package as `pip install .` leaves it, without the checkout around it."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from implicit_llm_workflow.commands.experiments import InitError, write_project
from implicit_llm_workflow.commands.options import make_plan
from implicit_llm_workflow.project_dirs import PROJECT_DIR
from tests.unit.workflow.experiments import ExperimentFile
from tests.workflow.tiny_project import Project

JOB = "data/a5-test-L16-h0.2"
SNAKEMAKE = ("snakemake", "--profile", "profiles/local", "--configfile", "workflow/config/demo.yaml")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds; this environment has the packages it depends on."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "pip", "wheel", str(PROJECT_DIR), "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*build, "--wheel-dir", str(folder)], timeout=300, check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    script = folder / "implicit-llm"  # as pip makes it
    script.write_text(f"#!{sys.executable}\nfrom implicit_llm_workflow.console import main\nmain()\n")
    script.chmod(0o755)
    return folder / "site"


def test_a_switch_makes_the_wheel_that_depends_on_the_executor_plugin(site: Path, tmp_path: Path) -> None:
    assert (site / "snakemake_executor_plugin_submitit" / "__init__.py").is_file()
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=PROJECT_DIR, env={**os.environ, "IMPLICIT_LLM_PLUGIN": "separate"}, check=True)
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    names = wheel.namelist()
    assert not [name for name in names if name.startswith("snakemake_executor_plugin_submitit")]
    (metadata,) = [name for name in names if name.endswith("METADATA")]
    assert "Requires-Dist: snakemake-executor-plugin-submitit" in wheel.read(metadata).decode()
    wrong = {**os.environ, "IMPLICIT_LLM_PLUGIN": "seperate"}
    done = subprocess.run(build, cwd=PROJECT_DIR, env=wrong, capture_output=True, text=True, check=False)
    assert "IMPLICIT_LLM_PLUGIN: 'seperate' is not allowed; write separate, or unset it" in done.stderr + done.stdout


def command(folder: Path, site: Path, *words: str) -> str:
    path = os.pathsep.join([str(site.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    return Project(folder, site / "implicit_llm", variables={"PATH": path}).command(*words)


@pytest.fixture(scope="module")
def study(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `init` of the installed package has filled."""
    folder = tmp_path_factory.mktemp("own")
    command(folder, site, "implicit-llm", "init", "study")
    return folder / "study"


def test_a_folder_of_ones_own_runs_the_workflow_of_the_installed_package(site: Path, study: Path) -> None:
    planned = command(study, site, *SNAKEMAKE, "--dry-run")
    jobs = set(re.findall(r"output: results/demo/(\S+)/work/[0-9a-f]+/manifest\.json", planned))
    nodes = make_plan("demo", study / "results").nodes.values()
    assert jobs == {node.key for node in nodes if node.stage != "excerpt"}  # those are made on demand


def test_an_edited_experiment_of_the_folder_holds_there(site: Path, study: Path, tmp_path: Path) -> None:
    folder, manifest = tmp_path / "study", f"results/demo/{JOB}/manifest.json"
    shutil.copytree(study, folder)
    ExperimentFile(folder / "workflow" / "config" / "demo.yaml").edit("num_samples: 512", "num_samples: 64")
    command(folder, site, *SNAKEMAKE, "--", manifest)
    made = json.loads((folder / manifest).read_text())
    assert made["identity"]["config"]["num_samples"] == made["summary"]["num_samples"] == 64


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text("rule mine:\n")
    with pytest.raises(InitError, match="Snakefile: is there already"):
        write_project(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["Snakefile"]
    (tmp_path / "Snakefile").rename(tmp_path / "README.md")
    assert "README.md" not in write_project(tmp_path)
    assert (tmp_path / "README.md").read_text() == "rule mine:\n"


def test_the_first_command_finds_its_model_in_the_installed_package(site: Path, tmp_path: Path) -> None:
    out = command(tmp_path, site, "implicit-llm", "try", "--length", "40", "--words", "2")
    assert re.search("2 of 2 sequences are right at every token.*Next: implicit-llm init", out, re.DOTALL)
    assert not (tmp_path / "results").exists()  # it neither reads nor makes any
