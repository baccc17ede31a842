"""A small experiment in a temporary folder, run by the real Snakemake, with stages that need no torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.fault.forks import Server
from tests.limits import wait_until
from tests.unit.workflow.experiments import TEST_SETS, ExperimentFile

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "implicit_llm"
DATA = Path(__file__).parent / "data"
NOTHING = "Nothing to be done"
DEADLINE_S = 120
# The jobs of tiny.yaml.
PHASES = ("implicit-s0/unrolled", "implicit-s0/free", "explicit-s0/explicit")
EVALUATED = {f"evaluate/{phase}/word-problem" for phase in PHASES[1:]}
ALL = {"data/s3-train", *TEST_SETS, *(f"train/{phase}" for phase in PHASES), *EVALUATED, "report"}


@dataclass
class Project:
    """A folder with the experiment <name>.yaml, and a stand-in for the library that is found before the real one."""

    dir: Path
    library: Path
    name: str = "tiny"
    variables: dict[str, str] = field(default_factory=dict)  # of the environment, on top
    profile: str = "profiles/local"

    @property
    def results(self) -> Path:
        return self.dir / "results" / self.name

    @property
    def config(self) -> Path:
        return self.dir / f"{self.name}.yaml"

    @property
    def driver(self) -> list[str]:
        """The words of a call of Snakemake."""
        cores = ["--cores", "2"] if self.profile == "profiles/local" else []
        return ["snakemake", "--profile", self.profile, "--configfile", self.config.name, *cores]

    @property
    def environment(self) -> dict[str, str]:
        """This Python and these sources, nothing of the caller's MLflow or Snakemake."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW", "SNAKEMAKE"))}
        return {
            **inherited,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(self.library.parent), str(self.dir / "workflow" / "lib")]),
            **self.variables,
        }

    def snakemake(self, *arguments: str, code: int = 0) -> str:
        """What `snakemake ...` prints, both streams; it must end with this exit code."""
        return self.command(*self.driver, *arguments, code=code)

    def command(self, *words: str, code: int = 0) -> str:
        """What the command prints, both streams; Snakemake and `implicit-llm` run in forks of one server."""
        if words[0] not in ("snakemake", "implicit-llm"):
            return subprocess.check_output(
                words, cwd=self.dir, env=self.environment, stderr=subprocess.STDOUT, text=True
            )
        with tempfile.TemporaryDirectory() as folder:
            streams = {name: f"{folder}/{name}" for name in ("stdout", "stderr")}
            order = {"words": words, "cwd": str(self.dir), "environment": self.environment, **streams}
            ended = _server().run(order)
            output = "".join(Path(path).read_text() for path in streams.values() if os.path.exists(path))
        assert ended == code, output
        assert code != 2 or "Traceback" not in output  # it was refused in a line
        return output

    @contextmanager
    def held(self, *arguments: str, cores: int = 1) -> Iterator[subprocess.Popen[str]]:
        """A call of Snakemake that has reached its first training, which waits for `release`; killed in the end."""
        hold = self.dir / "hold"
        hold.touch()
        with subprocess.Popen(
            [*self.driver, *arguments, "--cores", str(cores)],  # with one this job runs and the others wait
            cwd=self.dir,
            env=self.environment | {"TINY_HOLD": str(hold)},
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as driver:
            try:
                wait_until(hold.with_suffix(".reached").exists)
                yield driver
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(driver.pid, signal.SIGKILL)

    def release(self) -> None:
        (self.dir / "hold").unlink()

    def manifest(self, key: str) -> dict[str, Any]:
        return dict(json.loads((self.results / key / "manifest.json").read_text()))

    def declared(self, key: str) -> str:
        """The path at which the rule of a job declares the manifest of the result that is shown."""
        return f"results/{self.name}/{key}/work/{self.manifest(key)['fingerprint'][:16]}/manifest.json"

    def starts(self, key: str) -> int:
        """How often a job began to compute, with former settings too."""
        return sum(
            path.read_text().count('"stage_started"') for path in (self.results / key).glob("work/*/journal.jsonl")
        )

    def append(self, path: Path, text: str) -> None:
        path.write_text(path.read_text() + text)

    def edit(self, path: Path, old: str, new: str) -> None:
        ExperimentFile(path).edit(old, new)

    def copy_to(self, folder: Path, *, keeps_times: bool = True) -> Project:
        """The project, its results and its library at another place."""
        root = self.dir.parent
        shutil.copytree(root, folder, copy_function=shutil.copy2 if keeps_times else shutil.copyfile)
        return Project(folder / self.dir.relative_to(root), folder / self.library.relative_to(root), self.name)

    def planned(self, *arguments: str) -> set[str]:
        """Run directories, below results/<name>, of the jobs that a dry run announces."""
        output = self.snakemake("--dry-run", *arguments)
        return set(re.findall(rf"output: results/{self.name}/(\S+)/work/[0-9a-f]+/manifest\.json", output))


@cache
def _server() -> Server:
    return Server("tests.workflow.command_server")


def project_in(folder: Path, name: str = "tiny") -> Project:
    return Project(folder / "project", folder / "site" / "implicit_llm", name)


def make_project(folder: Path, name: str = "tiny") -> Project:
    """The experiment before its first run, with the curricula of these tests beside it, without MLflow."""
    project = _copy_driver(project_in(folder, name), f"{name}.yaml")
    shutil.copytree(DATA / "curricula", project.dir / "curricula")
    _make_library(project.library)
    # Importing MLflow takes longer than all the rest; its absence stops nothing.
    (project.library.parent / "mlflow.py").write_text("raise ImportError('left out of this test')\n")
    project.results.parent.mkdir()
    (project.results.parent / "mlflow.db").touch()
    return project


def make_real_project(folder: Path) -> Project:
    """The same place for an experiment with the library itself, small.yaml."""
    return _copy_driver(Project(folder / "project", LIBRARY), "small.yaml")


def _copy_driver(project: Project, config: str) -> Project:
    for name in ("workflow", "profiles"):
        shutil.copytree(ROOT / name, project.dir / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Snakefile", project.dir)
    shutil.copy(DATA / config, project.config)
    return project


def _make_library(library: Path) -> None:
    """The real packages for data and report and the real configurations, with stages that write a line each."""
    site, ignored = library.parent, shutil.ignore_patterns("__pycache__")
    for package in ("lib/implicit_llm_data", "report/implicit_llm_report"):
        shutil.copytree(ROOT / "workflow" / package, site / Path(package).name, ignore=ignored)
    shutil.copytree(DATA / "packages", site, ignore=ignored, dirs_exist_ok=True)
    for stage in (site / "implicit_llm_data" / "stages").glob("[a-z]*.py"):
        shutil.copy(DATA / "data_stage.py", stage)
    for kind in (LIBRARY / "evaluation" / "kinds").glob("[a-z]*.py"):
        shutil.copy(DATA / "evaluate_stage.py", library / "evaluation" / "kinds" / kind.name)
    shutil.copytree(LIBRARY / "configs", library / "configs")


_BLOCK = re.compile(r"(?<=# ---- A new site edits from here)(.*?)(?=# ---- to here)", re.DOTALL)


def edit_site(profile: Path, block: str) -> None:
    """Put `block`, the value of __variables__, into the profile; two spaces before each line of it."""
    text = profile.read_text()
    assert len(_BLOCK.findall(text)) == 1
    profile.write_text(_BLOCK.sub(lambda match: f"\n__variables__:\n{block.rstrip()}\n", text))
