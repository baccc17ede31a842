"""Calls of `implicit-llm` inside the tests, and in an interpreter of their own."""

import subprocess
import sys

import pytest

from implicit_llm_workflow import console
from tests.unit.workflow.experiments import ExperimentFile

HEAVY = ("torch", "transformers", "mlflow", "snakemake", "numpy", "implicit_llm")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    with pytest.raises(SystemExit) as stopped:
        console.main(list(arguments))
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command prints that ends with this exit code."""
    ended, out, err = run(capsys, *arguments)
    assert ended == code, err
    return out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that is refused."""
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def loaded_after(*statements: str) -> list[str]:
    """Which of the heavy packages a fresh interpreter has loaded after the statements."""
    code = "; ".join([*statements, "import sys", f"print(*[name for name in {HEAVY!r} if name in sys.modules])"])
    return subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120).splitlines()[-1].split()


def loaded_by(*calls: tuple[str, ...]) -> list[str]:
    """Which of the heavy packages these commands load, one after the other."""
    call = f"for words in {calls!r}:\n    try:\n        main([*words])\n    except SystemExit:\n        pass"
    return loaded_after("from implicit_llm_workflow.console import main", f"exec({call!r})")


def where(experiment: ExperimentFile) -> tuple[str, ...]:
    """The options that name the experiment and its results."""
    return ("--config", str(experiment.path), "--results", str(experiment.path.parent / "results"))
