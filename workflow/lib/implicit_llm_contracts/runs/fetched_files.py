"""Find the files of the Hugging Face hub that `prefetch` fetched into the downloads folder, by their record.

    hub/<owner>/<name>/...                  files of a data set or of a tokenizer
    models/<owner>/<name>/<revision>/...    files of a model; the folder is "main" if no revision is named
    <folder>/.fetched/<split or kind>.json  {"revision": ..., "commit": ..., "sizes": {"path": bytes}}

The record is written after the last file, so an interrupted fetch never counts as complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.errors import ConfigError, UserError
from implicit_llm_contracts.runs.atomic import read_object, size_difference, write_json

CONFIG_FILE, PICKLE_FILE = "config.json", "pytorch_model.bin"  # files of a model
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
OTHER_MODEL_FILES = (  # fetched with config and weights, if the repository has them
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
TEXT_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".txt")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}  # pyarrow's names by the suffix of a text file
FETCH = "type `implicit-llm prefetch EXPERIMENT` where there is a network"


def is_text(path: str) -> bool:
    """Return whether a file contains documents; a data set also has other files, such as a README."""
    name = PurePosixPath(path.lower())
    inside = name.with_suffix("") if name.suffix in COMPRESSIONS else name
    return inside.suffix in TEXT_SUFFIXES and not name.name.startswith(".")


def words_of(path: str) -> set[str]:
    """Return the words of a path; "data/train-00000-of-01650.parquet" contains "train"."""
    return set(re.split("[-/._]", path))


class FetchedFilesError(UserError):
    """The files in a folder are incomplete or of another version; the message names the folder and the fix."""


@dataclass(frozen=True)
class HubFiles:
    """The wanted files of a repository on the hub.

    kind: "dataset" for the text files of `split`, "tokenizer" for tokenizer.json, or "model" for config, weights and
    tokenizer. revision: commit or tag; None accepts any.
    """

    kind: str
    name: str
    revision: str | None
    split: str | None = None

    def folder(self, downloads: Path) -> Path:
        if self.kind == "model":
            return downloads / "models" / self.name / (self.revision or "main")
        return downloads / "hub" / self.name

    def record(self, downloads: Path) -> Path:
        return self.folder(downloads) / ".fetched" / f"{self.split or self.kind}.json"

    def all_records(self, downloads: Path) -> list[Path]:
        """Return the paths of all records in the folder: those of splits and the tokenizer, or that of the model."""
        return sorted(self.record(downloads).parent.glob("*.json"))


@dataclass(frozen=True)
class Fetched:
    """The record of a finished fetch. `sizes`: the bytes of each file by its path."""

    revision: str | None
    commit: str
    sizes: dict[str, int]

    @classmethod
    def read(cls, path: Path) -> Fetched:
        """Read a record. Raises: FetchedFilesError if the file is missing or is not a record."""
        try:
            return fill(cls, json.loads(path.read_bytes()), path.name)
        except (OSError, ValueError, ConfigError) as error:
            raise FetchedFilesError(f"{path}: no record of a fetch ({error}); remove it and {FETCH}") from error

    def __str__(self) -> str:
        return f"{len(self.sizes)} files, {sum(self.sizes.values()) / 1e9:,.2f} GB, commit {self.commit[:12]}"

    def write(self, path: Path) -> None:
        write_json(path, self)

    def changed_files(self, folder: Path) -> Iterator[str]:
        """Yield a message for each recorded file that is missing or has another size."""
        for name, size in self.sizes.items():
            if difference := size_difference(folder / name, size):
                yield f"{folder / name}: {difference}"


def find_fetched(wanted: HubFiles, downloads: Path) -> Fetched | None:
    """Return the record of the finished fetch, or None if nothing was fetched and any files are the user's own.

    Raises: FetchedFilesError if the fetch is unfinished or of another revision, if its record is damaged, or if a file
    is missing or has another size.
    """
    folder, record = wanted.folder(downloads), wanted.record(downloads)
    if not record.exists():
        traces = folder / ".cache" / "huggingface"
        if wanted.all_records(downloads) or traces.exists():
            what = wanted.kind if wanted.split is None else f"split '{wanted.split}' of the {wanted.kind}"
            raise FetchedFilesError(
                f"{folder}: the {what} is not among what was fetched; {FETCH}, or remove {traces} if all files are "
                "there"
            )
        return None
    found = Fetched.read(record)
    revision = wanted.revision or found.revision
    if revision != found.revision and not is_pinned(revision, found.commit):
        has = f"revision {found.revision or 'main'} (commit {found.commit[:12]})"
        raise FetchedFilesError(f"{record}: {has} was fetched, the config names {wanted.revision}; {FETCH}")
    for line in found.changed_files(folder):
        raise FetchedFilesError(f"{line}; {FETCH}")
    return found


def is_pinned(revision: str | None, commit: str) -> bool:
    """Return whether the revision is this commit, or at least its first 7 digits; a branch or tag may move."""
    return revision is not None and len(revision) >= 7 and commit.startswith(revision)


def fetched_model(name: str, revision: str | None, downloads: Path) -> tuple[Path, str | None]:
    """Return the folder of a model of the hub and its commit, which is None for files that the user supplied.

    Raises: FetchedFilesError if the model is missing or differs from its record.
    """
    wanted = HubFiles("model", name, revision)
    folder, found = wanted.folder(downloads), find_fetched(wanted, downloads)
    if found is None and not folder.is_dir():
        raise FetchedFilesError(f"{folder}: {name} has not been fetched; {FETCH}")
    return folder, None if found is None else found.commit


def weight_files(folder: Path) -> list[str]:
    """Return the names of the safetensors that are loaded for a model: the whole file, or the index and its shards.

    If there are neither, return the name of the whole file.
    """
    shards = read_object(folder / INDEX_FILE).get("weight_map")
    if (folder / WEIGHTS_FILE).is_file() or not isinstance(shards, dict):
        return [WEIGHTS_FILE]
    return [INDEX_FILE, *sorted({str(name) for name in shards.values()})]
