"""A data set of the Hugging Face hub: from fetched files, else streamed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs.fetched_files import FETCH, HubFiles, fetched_files
from implicit_llm_data.text.corpus_file import CorpusError, CorpusFile, Document, TextFormat, checked
from implicit_llm_data.text.corpus_paths import hand_put_files, named_files


class StreamedFile:
    """One file of a data set that is read over the network as it is needed."""

    size = None

    def __init__(self, name: str, dataset: Any, number: int, text_format: TextFormat) -> None:
        self.name = f"{name}#{number}"
        self._dataset = dataset
        self._number = number
        self._format = text_format

    def read(self) -> Iterator[Document]:
        field = self._format.field
        try:
            rows = self._dataset.shard(self._dataset.num_shards, self._number)
            for count, row in enumerate(rows, start=1):
                where = f"{self.name}: row {count}"
                if field not in row:
                    raise CorpusError(f"{where}: no field '{field}' (found: {', '.join(row):.200}); set corpus.field")
                yield checked(row[field], where, self._format, 0)
        except (OSError, ValueError, RuntimeError) as error:
            raise CorpusError(f"{self.name}: {_first_line(error)}; try again, or fetch it first: {FETCH}") from error


def open_hub(name: tuple[str, str | None, str], downloads: Path, text_format: TextFormat) -> Sequence[CorpusFile]:
    """The files of a data set, `name` being its name, revision and split.

    Raises: CorpusError when it is neither fetched nor to be had; FetchedFilesError when it is not what was fetched.
    """
    dataset, revision, split = name
    wanted = HubFiles("dataset", dataset, revision, split)
    folder, paths = wanted.folder(downloads), fetched_files(wanted, downloads)
    if paths is None:
        paths = hand_put_files(folder, split)
    if paths:
        return named_files(folder, paths, text_format)
    if is_offline():
        raise CorpusError(
            f"{dataset}: no files of it in {folder} and the hub is offline; {FETCH}, or set HF_HUB_OFFLINE=0"
        )
    try:
        from datasets import load_dataset

        stream = load_dataset(dataset, revision=revision, split=split, streaming=True)
    except (OSError, ValueError, RuntimeError) as error:  # also what datasets and huggingface_hub raise
        raise CorpusError(f"{dataset}: {_first_line(error)}; correct dataset, revision or split, or {FETCH}") from error
    return [StreamedFile(dataset, stream, number, text_format) for number in range(stream.num_shards)]


def is_offline() -> bool:
    """Whether the environment forbids the network, as huggingface_hub and datasets understand it."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"} for name in names)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
