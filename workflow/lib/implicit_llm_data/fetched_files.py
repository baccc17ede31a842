"""Which files prefetch has fetched of a repository of the Hugging Face hub, by the record that it writes beside them.

    hub/<owner>/<name>/...              the files
    hub/<owner>/<name>.fetched.json     {"fetches": [{"need": {kind, name, revision, split}, "commit", "files": [...]}]}
    models/<owner>/<name>/<revision>/   the same for models, of which several revisions can be wanted; "main" for None

The record is written after the last file, so that a fetch that was interrupted is not taken for the whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs.errors import UserError

FOLDER, MODELS = "hub", "models"  # below the folder of fetched files, with one folder for each repository in it
FETCH = "type `implicit-llm prefetch --config FILE` with the experiment's FILE where there is a network"


class FetchedFilesError(UserError):
    """What lies in a folder is a part, or another version, of what is wanted; the message names it and the fix."""


@dataclass(frozen=True)
class Wanted:
    """kind: "dataset", "tokenizer" or "model"; revision None takes any; split: of a data set, else None."""

    kind: str
    revision: str | None
    split: str | None = None


def fetched_files(folder: Path, wanted: Wanted) -> list[Path] | None:
    """The fetched files in the order of their paths; None where nothing was fetched, but perhaps put there by hand.

    Raises: FetchedFilesError when the fetch was not finished, is of another revision, or a file is not as fetched.
    """
    record = folder.with_name(f"{folder.name}.fetched.json")
    if not record.exists():
        traces = folder / ".cache" / "huggingface"
        if traces.exists():
            raise FetchedFilesError(
                f"{folder}: a fetch into it was not finished; {FETCH}, or remove {traces} if all files are there"
            )
        return None
    sizes = _sizes(record, wanted)
    for name, size in sizes.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise FetchedFilesError(f"{path}: {state}; {FETCH}")
    return sorted(folder / name for name in sizes)


def fetched_model(name: str, revision: str | None, downloads: Path) -> Path:
    """The folder of a model of the hub, fetched or put there by hand.

    Raises: FetchedFilesError when it is not there, or not as it was fetched.
    """
    folder = downloads / MODELS / name / (revision or "main")
    if fetched_files(folder, Wanted("model", revision)) is None and not folder.is_dir():
        raise FetchedFilesError(f"{folder}: {name} has not been fetched; {FETCH}")
    return folder


def _sizes(record: Path, wanted: Wanted) -> dict[str, int]:
    """Bytes of each file of the fetch that is wanted. Raises: FetchedFilesError."""
    try:
        fetches = [_Fetch.of(values) for values in json.loads(record.read_bytes())["fetches"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FetchedFilesError(f"{record}: no record of a fetch ({error}); remove it and {FETCH}") from error
    fetches = [fetch for fetch in fetches if (fetch.kind, fetch.split) == (wanted.kind, wanted.split)]
    if not fetches:
        what = wanted.kind if wanted.split is None else f"split '{wanted.split}' of the {wanted.kind}"
        raise FetchedFilesError(f"{record}: the {what} is not among what was fetched; {FETCH}")
    fitting = [fetch for fetch in fetches if fetch.is_of(wanted.revision)]
    if not fitting:
        found = f"revision {fetches[0].revision or 'main'} (commit {fetches[0].commit[:12]})"
        raise FetchedFilesError(f"{record}: {found} was fetched, the config names {wanted.revision}; {FETCH}")
    return fitting[0].sizes


@dataclass(frozen=True)
class _Fetch:
    kind: str
    split: str | None
    revision: str | None
    commit: str
    sizes: dict[str, int]

    @classmethod
    def of(cls, values: Any) -> _Fetch:
        """Raises: KeyError, TypeError or ValueError for anything but an entry of the record."""
        need, sizes = values["need"], {file["path"]: int(file["size"]) for file in values["files"]}
        return cls(need["kind"], need["split"], need["revision"], str(values["commit"]), sizes)

    def is_of(self, revision: str | None) -> bool:
        """Whether it may stand for `revision`: its name, or its commit, of which the first characters suffice."""
        if revision is None or revision == self.revision:
            return True
        return len(revision) >= 7 and self.commit.startswith(revision)
