"""A pickle of weights: tensors by name, or one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.published import read_pickle


@pytest.mark.parametrize("is_zip", [True, False])
def test_tensors_are_read_by_name(tmp_path: Path, is_zip: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.arange(3)}, path, _use_new_zipfile_serialization=is_zip)
    (read,) = read_pickle(path).items()
    assert read[0] == "a"
    assert torch.equal(read[1], torch.arange(3))


@pytest.mark.parametrize(
    "content", [b"", b".", b"X", b"X\x01\x00\x00\x00\xff.", b"h\x01.", b"\x80\x02}q\x00.", b"<html>"]
)
def test_whatever_the_damage_is_it_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    with pytest.raises(ModelConfigError, match=r"pytorch_model\.bin: cannot be read .*damaged") as caught:
        read_pickle(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [[1, 2], torch.zeros(2), {"step": 3}, {"model": {"a": torch.zeros(2)}}, {0: torch.zeros(2)}]
)
def test_what_is_no_tensors_by_name_is_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(content, path)
    with pytest.raises(ModelConfigError, match=r"holds more than tensors by name; .*safetensors"):
        read_pickle(path)


def test_a_file_that_is_not_there_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_pickle(tmp_path / "pytorch_model.bin")
