"""The device of a job, on machines with and without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from implicit_llm.device import NoGpu, choose_device
from implicit_llm.evaluation.inputs import load_model


@pytest.mark.parametrize(
    ("has_gpu", "wanted", "chosen"),
    [
        (False, "auto", "cpu"),
        (False, "cpu", "cpu"),
        (True, "auto", "cuda"),
        (True, "cpu", "cpu"),
        (True, "cuda", "cuda"),
    ],
)
def test_auto_takes_a_gpu_if_there_is_one(
    has_gpu: bool, wanted: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert choose_device(wanted) == chosen


def test_an_evaluation_on_a_gpu_that_is_not_there_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = SimpleNamespace(path="work/model/config.json")
    trained: Any = SimpleNamespace(dir=tmp_path, manifest=SimpleNamespace(files=[file]))
    with pytest.raises(NoGpu, match="use --device auto or cpu") as caught:
        load_model(trained, {"device": "cuda"})
    assert caught.value.exit_code == 2
