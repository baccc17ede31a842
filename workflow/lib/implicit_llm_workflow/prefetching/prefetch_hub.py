"""Fetching files of the Hugging Face hub below the downloads folder: resumable, checked, with a manifest beside them.

    hub/<owner>/<name>/...              the files, where the jobs look for them
    hub/<owner>/<name>.fetched.json     of each fetch the need, the commit, and path, size and sha256 of each file
    models/<owner>/<name>/<revision>/   the same for models, of which several revisions can be wanted; "main" for null

The manifest is written last; while it is there and the sizes agree, nothing is fetched and no network is needed. It
has one fetch for each need, of a data set all of one commit: others are taken out before their files are replaced.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from implicit_llm_workflow.file_digests import CONFIG_FILE, INDEX_FILE, PICKLE_FILE, WEIGHTS_FILE
from implicit_llm_workflow.prefetching.prefetch_http import FetchError
from implicit_llm_workflow.prefetching.prefetch_needs import HubFiles

FOLDER, MODELS = "hub", "models"
MODEL_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
TEXT_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".txt")
TOKENIZER_FILE = "tokenizer.json"
BLOCK_BYTES = 1 << 22
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub describes it: the sha256 of what is in large-file storage, else the id of the git blob."""

    path: str
    size: int
    sha256: str | None
    blob_id: str


@dataclass(frozen=True)
class FetchedFile:
    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Fetch:
    """A finished one."""

    need: HubFiles
    commit: str
    files: list[FetchedFile]

    @property
    def in_words(self) -> str:
        size = sum(file.size for file in self.files)
        return f"{len(self.files)} files, {size / 1e9:,.2f} GB, commit {self.commit[:12]}"


def hub_folder(need: HubFiles, downloads: Path) -> Path:
    if need.kind == "model":
        return downloads / MODELS / need.name / (need.revision or "main")
    return downloads / FOLDER / need.name


def manifest_path(need: HubFiles, downloads: Path) -> Path:
    folder = hub_folder(need, downloads)
    return folder.with_name(f"{folder.name}.fetched.json")


def fetched_before(need: HubFiles, downloads: Path) -> str | None:
    """What is there, in words; None unless all files of the manifest are, at their sizes and of the wanted revision."""
    fetch = find_fetch(need, downloads)
    return None if fetch is None else fetch.in_words


def find_fetch(need: HubFiles, downloads: Path) -> Fetch | None:
    """The finished fetch of what is needed, as `fetched_before`."""
    folder = hub_folder(need, downloads)
    fetch = next((fetch for fetch in _fetches(need, downloads) if fetch.need == need), None)
    if fetch is None or not fetch.files or any(_size(folder / file.path) != file.size for file in fetch.files):
        return None
    return fetch


def put_by_hand(need: HubFiles, downloads: Path) -> int:
    """Number of usable files that somebody put there; 0 where an earlier fetch, perhaps a part of it, may be theirs."""
    folder = hub_folder(need, downloads)
    if (folder / ".cache" / "huggingface").exists() or manifest_path(need, downloads).exists():
        return 0
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if need.kind == "model":
        return len(paths) if CONFIG_FILE in paths else 0
    return sum(path == TOKENIZER_FILE if need.kind == "tokenizer" else _is_text(path) for path in paths)


def fetch_hub_files(need: HubFiles, downloads: Path) -> str:
    """Fetch what is missing and check every file against the hub's digests. Returns: what there is now, in words.

    Raises: FetchError.
    """
    from huggingface_hub import HfApi, snapshot_download

    folder, repo_type = hub_folder(need, downloads), "dataset" if need.kind == "dataset" else "model"
    try:
        api = HfApi()
        commit = api.repo_info(need.name, repo_type=repo_type, revision=need.revision).sha
        tree = api.list_repo_tree(need.name, repo_type=repo_type, revision=commit, recursive=True)
        wanted = wanted_files(need, [_remote(entry) for entry in tree if hasattr(entry, "blob_id")])
        require_space(folder, wanted)
        others = _others(need, downloads, str(commit))
        _write_manifest(need, downloads, others)
        snapshot_download(
            need.name,
            repo_type=repo_type,
            revision=commit,
            local_dir=folder,
            allow_patterns=[glob.escape(file.path) for file in wanted],
        )
    except FetchError:
        raise
    except Exception as error:  # of the hub, its client and the network: many kinds, all the same to the user
        raise FetchError(f"{need.kind} {need.name}: {_first_line(error)}; {_advice(need, folder)}") from error
    fetch = Fetch(need, str(commit), check_files(need, folder, wanted))
    _write_manifest(need, downloads, [*others, fetch])
    return fetch.in_words


def wanted_files(need: HubFiles, files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """The tokenizer; a model's config, weights and tokenizer; or of a data set's text files those with the split in
    their name, all if none of them says.

    Raises: FetchError when there is none.
    """
    if need.kind == "model":
        return _model_files(need, list(files))
    if need.kind == "tokenizer":
        found = [file for file in files if file.path == TOKENIZER_FILE]
    else:
        texts = [file for file in files if _is_text(file.path)]
        found = [file for file in texts if need.split in _words(file.path)] or texts
    if not found:
        what = TOKENIZER_FILE if need.kind == "tokenizer" else f"file of text ({', '.join(TEXT_SUFFIXES)})"
        raise FetchError(f"{need.kind} {need.name}: has no {what} on the hub; name another in the config")
    return found


def _model_files(need: HubFiles, files: list[RemoteFile]) -> list[RemoteFile]:
    """Of the weights the safetensors, whole or in shards; only where there are none the pickle."""
    names = {file.path for file in files}
    if WEIGHTS_FILE in names:
        weights = {WEIGHTS_FILE}
    elif INDEX_FILE in names:
        weights = {INDEX_FILE, *(name for name in names if _SHARD.fullmatch(name))}
    else:
        weights = {PICKLE_FILE} & names
    if CONFIG_FILE not in names or not weights:
        raise FetchError(
            f"model {need.name}: has no {CONFIG_FILE} with {WEIGHTS_FILE} or {PICKLE_FILE} on the hub; name another"
        )
    return [file for file in files if file.path in weights or file.path in MODEL_FILES]


def require_space(folder: Path, wanted: Iterable[RemoteFile]) -> None:
    """Raises: FetchError, with both numbers, when the file system has less room than the files that are missing."""
    needed = sum(file.size for file in wanted if _size(folder / file.path) != file.size)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise FetchError(
            f"{folder}: {needed / 1e9:,.1f} GB are to be fetched and {free / 1e9:,.1f} GB are free; "
            "free some space or give another --downloads"
        )


def check_files(need: HubFiles, folder: Path, wanted: Iterable[RemoteFile]) -> list[FetchedFile]:
    """Hash every file and compare it with the hub's digest. Raises: FetchError; the file that differs is removed."""
    from tqdm import tqdm

    wanted = list(wanted)
    files = []
    total = sum(file.size for file in wanted)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"checking {need.name}", disable=None) as bar:
        for remote in wanted:
            path = folder / remote.path
            try:
                sha256, blob_id, size = _digests(path, bar)
            except OSError as error:
                raise FetchError(f"{path}: cannot be read ({error.strerror}); run prefetch again") from error
            if sha256 != remote.sha256 if remote.sha256 is not None else blob_id != remote.blob_id:
                path.unlink()
                raise FetchError(f"{path}: did not have the digest that the hub gives; removed, run prefetch again")
            files.append(FetchedFile(remote.path, size, sha256))
    return files


def _digests(path: Path, bar: Any) -> tuple[str, str, int]:
    """sha256, id as a git blob, and size."""
    size = path.stat().st_size
    sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with open(path, "rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            sha256.update(block)
            blob.update(block)
            bar.update(len(block))
    return sha256.hexdigest(), blob.hexdigest(), size


def _fetches(need: HubFiles, downloads: Path) -> list[Fetch]:
    """Those of the manifest; none if there is none that can be read."""
    try:
        values = json.loads(manifest_path(need, downloads).read_bytes())
        return [
            Fetch(HubFiles(**item["need"]), item["commit"], [FetchedFile(**file) for file in item["files"]])
            for item in values["fetches"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _others(need: HubFiles, downloads: Path, commit: str) -> list[Fetch]:
    """The fetches that one of `need` at `commit` leaves valid."""
    others = [fetch for fetch in _fetches(need, downloads) if fetch.need != need]
    return [fetch for fetch in others if fetch.commit == commit or fetch.need.kind != need.kind]


def _write_manifest(need: HubFiles, downloads: Path, fetches: list[Fetch]) -> None:
    """Without fetches there is none."""
    path = manifest_path(need, downloads)
    if not fetches:
        path.unlink(missing_ok=True)
        return
    values = {"fetches": [asdict(fetch) for fetch in fetches]}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def _remote(entry: Any) -> RemoteFile:
    return RemoteFile(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id)


def _is_text(path: str) -> bool:
    name = path.rpartition("/")[2].lower().removesuffix(".gz").removesuffix(".zst")
    return name.endswith(TEXT_SUFFIXES) and not name.startswith(".")


def _words(path: str) -> set[str]:
    """As the jobs read the names: "data/train-00000-of-01650.parquet" has "train" among them."""
    for separator in "/._":
        path = path.replace(separator, "-")
    return set(path.split("-"))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _advice(need: HubFiles, folder: Path) -> str:
    what = f"{TOKENIZER_FILE} elsewhere and put it" if need.kind == "tokenizer" else "its files elsewhere and put them"
    return f"check name, revision and network, or fetch {what} into {folder}"
