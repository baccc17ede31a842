from __future__ import annotations

from types import SimpleNamespace

import pytest

from implicit_llm_contracts.runs.logs import wants_bar


def test_a_bar_is_for_terminals_outside_of_snakemake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: True))
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    assert wants_bar("auto")
    monkeypatch.setenv("SNAKEMAKE_PROFILE", "profiles/local")
    assert not wants_bar("auto")
    assert wants_bar("bar")
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: False))
    monkeypatch.delenv("SNAKEMAKE_PROFILE")
    assert not wants_bar("auto")
