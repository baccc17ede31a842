from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.runs.identity import Identity


@pytest.fixture
def make_identity() -> Callable[..., Identity]:
    def make(stage: str = "train", name: str = "x", upstream: dict[str, str] | None = None, **config: Any) -> str:
        return Identity(stage, name, config, "c0de", upstream or {})

    return make


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "demo" / "train" / "x"
