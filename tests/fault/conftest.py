"""The server that trains, one for all tests of this folder."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fault.forks import Server
from tests.unit.training.small_runs import make_data


@dataclass(frozen=True)
class Trainer:
    """Trains phases of small models in processes of their own; a checkpoint is due after every step."""

    data: Path
    server: Server = field(default_factory=lambda: Server("tests.fault.training_server"))

    def run(self, run_dir: Path, config: dict[str, Any], order: dict[str, Any] | None = None, **env: str) -> int:
        """Exit code of the phase, or minus the signal that ended it; `order`: see training_server.py."""
        given = {"start": None, "run_dir": str(run_dir), "data": str(self.data), "config": config, **(order or {})}
        return self.server.run({**given, "runtime": {"save_steps": 1, **given.get("runtime", {})}}, **env)


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(make_data(tmp_path_factory.mktemp("data") / "demo"))
    yield trainer
    trainer.server.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a phase that is all of its run."""
    return tmp_path / "a" / "only"
