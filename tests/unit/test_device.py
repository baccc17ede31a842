"""Device and kernels of a job, on machines with and without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from implicit_llm.device import NoGpu, choose_device, select_kernels_for
from implicit_llm.evaluation.trained_model import load_model
from implicit_llm.kernels import selection


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(selection, "_missing_for_triton", lambda: None)
    monkeypatch.setattr(selection._Process, "backend", None)
    monkeypatch.delenv(selection.ENVIRONMENT, raising=False)


def test_without_a_gpu_everything_is_on_the_cpu(bare: None) -> None:
    assert [choose_device(wanted) for wanted in ("auto", "cpu")] == ["cpu", "cpu"]


def test_with_a_gpu_auto_takes_it(with_gpu: None) -> None:
    assert [choose_device(wanted) for wanted in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]


def test_a_job_on_the_cpu_of_a_machine_with_a_gpu_takes_torch(with_gpu: None) -> None:
    assert select_kernels_for("cpu", "auto") == "torch"
    assert select_kernels_for("cpu", "triton") == "triton"
    assert select_kernels_for("cuda", "auto") == "triton"


def test_an_evaluation_on_a_gpu_that_is_not_there_is_refused_in_one_line(bare: None, tmp_path: Path) -> None:
    file = SimpleNamespace(path="work/model/config.json")
    trained: Any = SimpleNamespace(dir=tmp_path, manifest=SimpleNamespace(files=[file]))
    with pytest.raises(NoGpu, match="use --device auto or cpu") as caught:
        load_model(trained, {"device": "cuda"})
    assert caught.value.exit_code == 2
