from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from implicit_llm_contracts.runs.identity import Identity, compute_fingerprint


@pytest.fixture
def identity_text() -> Callable[..., str]:
    def make(stage: str = "train", name: str = "x", upstream: dict[str, str] | None = None, **config: Any) -> str:
        parts: dict[str, Any] = {"stage": stage, "config": config, "code": "c0de", "upstream": upstream or {}}
        return json.dumps({**parts, "name": name, "fingerprint": compute_fingerprint(**parts)})

    return make


@pytest.fixture
def identity(identity_text: Callable[..., str]) -> Identity:
    return Identity.parse(identity_text())


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "demo" / "train" / "x"
