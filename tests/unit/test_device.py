"""The device of a job, on machines with and without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from implicit_llm.device import NoGpu, choose_device
from implicit_llm.evaluation.inputs import load_model


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_without_a_gpu_everything_is_on_the_cpu(bare: None) -> None:
    assert [choose_device(wanted) for wanted in ("auto", "cpu")] == ["cpu", "cpu"]


def test_with_a_gpu_auto_takes_it(with_gpu: None) -> None:
    assert [choose_device(wanted) for wanted in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]


def test_an_evaluation_on_a_gpu_that_is_not_there_is_refused_in_one_line(bare: None, tmp_path: Path) -> None:
    file = SimpleNamespace(path="work/model/config.json")
    trained: Any = SimpleNamespace(dir=tmp_path, manifest=SimpleNamespace(files=[file]))
    with pytest.raises(NoGpu, match="use --device auto or cpu") as caught:
        load_model(trained, {"device": "cuda"})
    assert caught.value.exit_code == 2
