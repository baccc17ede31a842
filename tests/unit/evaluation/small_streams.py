"""Small streams of tokens for tests of the evaluation, made of documents as the data stages write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from implicit_llm_contracts.runs.manifest import FileRecord, sha256_of
from implicit_llm_data.shard_writer import write_index

VOCAB, END_OF_TEXT = 12, 0


def write_stream(folder: Path, tokens: Sequence[int] | np.ndarray, vocab_size: int = VOCAB) -> list[Path]:
    """Write the stream to `folder`; the files it consists of."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokens.bin"
    path.write_bytes(np.asarray(tokens).astype("<u2").tobytes())
    part = FileRecord("tokens.bin", path.stat().st_size, sha256_of(path))
    source = {"kind": "token_stream", "split": "test", "end_of_text": END_OF_TEXT}
    return [path, write_index(folder, {"vocab_size": vocab_size, "length": 16, "source": source}, [part])]


def random_documents(lengths: Sequence[int], vocab_size: int = VOCAB) -> list[int]:
    """Documents of so many random tokens, each with end-of-text behind it, one after another."""
    random = np.random.default_rng(0)
    documents = [[*random.integers(1, vocab_size, length).tolist(), END_OF_TEXT] for length in lengths]
    return [token for document in documents for token in document]
