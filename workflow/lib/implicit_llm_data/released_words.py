"""Read word problems from files of the authors' generator, without torch and without executing a pickle's code.

A file is the result of `torch.save` for {"inputs": [N, L], "targets": [N, L], "vocab_size": [1]}, mostly as int64. Its
name is {train or test}_{group}_L{length}_P{percent of identities}.bin, such as train_A5_L256_P090.bin.

Source of the format: microsoft/implicit_languagemodels, state_tracking/dataset.py.
"""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from implicit_llm_contracts.errors import UserError

DTYPES = {"LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "ByteStorage": "|u1"}
LOCAL_HEADER = struct.Struct("<26x2H")  # in a zip archive; the numbers are the lengths of the name and extra field


class ReleasedWordsError(UserError):
    """A file is missing, damaged, or does not contain word problems of the wanted kind."""


def read_words(path: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Return inputs and targets of shape (N, L), mapped from the file, and the size of the vocabulary.

    Raises: ReleasedWordsError.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (item for item in archive.namelist() if item.endswith("data.pkl"))
            with archive.open(name) as file:
                found = _Tensors(file, path, archive, name.removesuffix("data.pkl")).load()
        inputs_NL, targets_NL = found["inputs"], found["targets"]
        if inputs_NL.shape != targets_NL.shape or inputs_NL.ndim != 2:
            raise ValueError(f"inputs {inputs_NL.shape} and targets {targets_NL.shape} are no pair of tables")
        return inputs_NL, targets_NL, int(found["vocab_size"].ravel()[0])
    except FileNotFoundError as error:
        raise ReleasedWordsError(f"{path}: is missing; put it there, or correct `folder`") from error
    except Exception as error:  # damaged bytes can raise any exception
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ReleasedWordsError(
            f"{path}: is no file of word problems of torch.save ({reason}); fetch it again"
        ) from error


class _Tensors(pickle.Unpickler):
    """An unpickler that returns tensors as arrays mapped from the file, and refuses all names that it does not need."""

    def __init__(self, file: Any, path: Path, archive: zipfile.ZipFile, prefix: str) -> None:
        super().__init__(file)
        self._path, self._archive, self._prefix = path, archive, prefix

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name} is no tensor of integers")

    def persistent_load(self, pid: Any) -> np.ndarray:
        _, dtype, key, _, count = pid
        item = self._archive.getinfo(f"{self._prefix}data/{key}")
        if item.compress_type != zipfile.ZIP_STORED or item.file_size < count * np.dtype(dtype).itemsize:
            raise pickle.UnpicklingError(f"the numbers {key} are compressed or cut off")
        with open(self._path, "rb") as file:
            file.seek(item.header_offset)
            lengths = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
        start = item.header_offset + LOCAL_HEADER.size + sum(lengths)
        return np.memmap(self._path, dtype, "r", start, (count,)) if count else np.empty(0, dtype)


def _tensor(storage: np.ndarray, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> np.ndarray:
    """Return the array of a tensor. Raises: UnpicklingError if the tensor is not contiguous."""
    count = math.prod(size)
    if stride != tuple(math.prod(size[place + 1 :]) for place in range(len(size))) or offset + count > storage.size:
        raise pickle.UnpicklingError("a tensor is not contiguous")
    return storage[offset : offset + count].reshape(size)
