"""A small experiment in a temporary folder, run by the real Snakemake, with stages that need no torch."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.fault.forks import Server

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "implicit_llm"
DATA = Path(__file__).parent / "data"
NOTHING = "Nothing to be done"
DEADLINE_S = 120


@dataclass
class Project:
    """A folder with the experiment <name>.yaml, and a stand-in for the library that is found before the real one."""

    dir: Path
    library: Path
    name: str = "tiny"
    variables: dict[str, str] = field(default_factory=dict)  # of the environment, on top

    @property
    def results(self) -> Path:
        return self.dir / "results" / self.name

    @property
    def config(self) -> Path:
        return self.dir / f"{self.name}.yaml"

    @property
    def driver(self) -> list[str]:
        """The words of a call of Snakemake."""
        return ["snakemake", "--profile", "profiles/local", "--configfile", self.config.name, "--cores", "2"]

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
        with tempfile.TemporaryDirectory() as folder:
            streams = {name: Path(folder, name) for name in ("stdout", "stderr")}
            if words[0] in ("snakemake", "implicit-llm"):
                paths = {name: str(path) for name, path in streams.items()}
                order = {"words": words, "cwd": str(self.dir), "environment": self.environment, **paths}
                ended = _server().run(order)
            else:
                with streams["stdout"].open("w") as file:
                    ended = subprocess.call(words, cwd=self.dir, env=self.environment, stdout=file, stderr=file)
            output = "".join(path.read_text() for path in streams.values() if path.exists())
        assert ended == code, output
        return output

    @contextmanager
    def held(self) -> Iterator[subprocess.Popen[str]]:
        """A call of Snakemake that has reached its first training, which waits for `release`; killed in the end."""
        hold = self.dir / "hold"
        hold.touch()
        with subprocess.Popen(
            [*self.driver, "--cores", "1"],  # so that this job runs and the others wait
            cwd=self.dir,
            env=self.environment | {"TINY_HOLD": str(hold)},
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as driver:
            try:
                end = time.monotonic() + DEADLINE_S
                while not hold.with_suffix(".reached").exists():
                    assert time.monotonic() < end
                    time.sleep(0.05)
                yield driver
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(driver.pid, signal.SIGKILL)

    def release(self) -> None:
        (self.dir / "hold").unlink()

    def edit(self, path: Path, old: str, new: str) -> None:
        """Replace text that must be there."""
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def copy_to(self, folder: Path, *, keeps_times: bool = True) -> Project:
        """The project, its results and its library at another place."""
        root = self.dir.parent
        shutil.copytree(root, folder, copy_function=shutil.copy2 if keeps_times else shutil.copyfile)
        return Project(folder / self.dir.relative_to(root), folder / self.library.relative_to(root), self.name)

    def planned(self, *arguments: str) -> set[str]:
        """Run directories, below results/<name>, of the jobs that a dry run announces."""
        output = self.snakemake("--dry-run", *arguments)
        return set(re.findall(rf"output: results/{self.name}/(\S+)/manifest\.json", output))


@cache
def _server() -> Server:
    return Server("tests.workflow.command_server")


def project_in(folder: Path, name: str = "tiny") -> Project:
    return Project(folder / "project", folder / "site" / "implicit_llm", name)


def make_project(folder: Path, name: str = "tiny") -> Project:
    """The experiment before its first run, with the curricula of these tests beside it."""
    project = _copy_driver(project_in(folder, name))
    shutil.copy(DATA / f"{name}.yaml", project.config)
    shutil.copytree(DATA / "curricula", project.dir / "curricula")
    _make_library(project.library)
    _leave_out_mlflow(project)
    return project


def make_real_project(folder: Path) -> Project:
    """The same place for an experiment with the library itself, small.yaml."""
    project = _copy_driver(Project(folder / "project", LIBRARY))
    shutil.copy(DATA / "small.yaml", project.config)
    return project


def _copy_driver(project: Project) -> Project:
    for name in ("workflow", "profiles"):
        shutil.copytree(ROOT / name, project.dir / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Snakefile", project.dir)
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


def _leave_out_mlflow(project: Project) -> None:
    """Importing MLflow takes longer than all the rest; its absence stops nothing."""
    (project.library.parent / "mlflow").mkdir()
    (project.library.parent / "mlflow" / "__init__.py").write_text("raise ImportError('left out of this test')\n")
    project.results.parent.mkdir()
    (project.results.parent / "mlflow.db").touch()
