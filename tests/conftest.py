"""For all tests."""

import fcntl
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from implicit_llm_contracts.runs import faults

if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd"))):
    os.environ["TRITON_INTERPRET"] = "1"  # there is no GPU; Triton looks at it when something first imports it

# `make test &` or `nohup` leaves SIGINT ignored, and so it would be in what the tests start: no Ctrl-C would end it.
signal.signal(signal.SIGINT, signal.default_int_handler)

ONE_WORKER = ("workflow/plugins/submitit/tests/", "tests/slurm/", "tests/browser/")  # they share a Slurm or a browser


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: one of them mostly waits, for Slurm, a browser or a process that was killed."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs a whole file or one of the folders above; the long ones start first, and fill the gaps last."""
    from xdist.scheduler import LoadFileScheduling

    class FileOrFolder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in ONE_WORKER if nodeid.startswith(folder)), super()._split_scope(nodeid))

    config.option.loadscopereorder = False
    return FileOrFolder(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What the tests import stays to the end: the garbage collector need not look at these million objects."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers the unit tests, whose files take seconds, come last, so that all workers end together."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: "unit" in item.path.parts)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`once(name, make)` is the folder that `make(folder)` fills, once for all workers of this run; read it only."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def filled(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                folder.mkdir(exist_ok=True)
                make(folder)
                done.touch()
        return folder

    return filled


@pytest.fixture(scope="session")
def empty_store(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """An initialised MLflow store; making one takes seconds, so that tests copy it."""
    from implicit_llm_jobs.tracking.mlflow_store import initialise

    return once("store", lambda folder: initialise(f"sqlite:///{folder / 'mlflow.db'}")) / "mlflow.db"


@pytest.fixture(autouse=True)
def _fault_points_count_from_zero() -> None:
    """A test that forks hands its count of passages on, and with it those of the tests before."""
    faults.reset()


@pytest.fixture(autouse=True)
def _environment_as_found() -> Iterator[None]:
    """Commands that a test runs in this process set variables for theirs, such as the tracking server."""
    with mock.patch.dict(os.environ):
        yield
