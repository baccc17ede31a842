"""Fetch files of the Hugging Face hub into the downloads folder, pinned to a commit and checked by the hub's digests.

`snapshot_download` resumes what was interrupted. While the record of the fetch is there and the sizes agree, nothing is
fetched and no network is needed.
"""

import glob
import re
from collections.abc import Mapping
from pathlib import Path

from implicit_llm_contracts.runs.atomic import require_space
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.fetched_files import (
    TEXT_SUFFIXES,
    Fetched,
    FetchedFilesError,
    HubFiles,
    find_fetched,
    is_text,
    words_of,
)
from implicit_llm_workflow.file_digests import CONFIG_FILE, INDEX_FILE, PICKLE_FILE, WEIGHTS_FILE
from implicit_llm_workflow.text import first_line

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
TOKENIZER_FILE = "tokenizer.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


class FetchError(UserError):
    """A file could not be fetched; the message says what to do by hand."""


def fetched_before(need: HubFiles, downloads: Path) -> Fetched | None:
    """The finished fetch that makes another one needless."""
    try:
        return find_fetched(need, downloads)
    except FetchedFilesError:
        return None


def put_by_hand(need: HubFiles, downloads: Path) -> int:
    """Number of usable files that somebody put there; 0 where an earlier fetch, perhaps a part of it, may be theirs."""
    folder = need.folder(downloads)
    if (folder / ".cache" / "huggingface").exists() or need.all_records(downloads):
        return 0
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if need.kind == "model":
        return len(paths) if CONFIG_FILE in paths else 0
    return sum(path == TOKENIZER_FILE if need.kind == "tokenizer" else is_text(path) for path in paths)


def fetch_hub_files(need: HubFiles, downloads: Path) -> Fetched:
    """Fetch what is missing and compare each file with the hub's digest. Raises: FetchError, StorageError."""
    from huggingface_hub import HfApi, snapshot_download

    api, folder = HfApi(), need.folder(downloads)
    repo_type = "dataset" if need.kind == "dataset" else "model"
    try:
        commit = str(api.repo_info(need.name, repo_type=repo_type, revision=need.revision).sha)
        tree = api.list_repo_tree(need.name, repo_type=repo_type, revision=commit, recursive=True)
        sizes = wanted_files(need, {entry.path: entry.size for entry in tree if hasattr(entry, "size")})
        missing = {path: size for path, size in sizes.items() if not (folder / path).is_file()}
        require_space(folder, sum(missing.values()), f"{len(missing)} files of {need.kind} {need.name}")
        for record in need.all_records(downloads):
            if record == need.record(downloads) or Fetched.read(record).commit != commit:
                record.unlink()  # its files may be replaced
        snapshot_download(
            need.name,
            repo_type=repo_type,
            revision=commit,
            local_dir=folder,
            allow_patterns=[glob.escape(path) for path in sizes],
        )
        found = api.verify_repo_checksums(need.name, repo_type=repo_type, revision=commit, local_dir=folder)
    except UserError:
        raise
    except Exception as error:  # of the hub, its client and the network: many kinds, all the same to the user
        raise FetchError(f"{need.kind} {need.name}: {first_line(error)}; {_advice(need, folder)}") from error
    for path in (item["path"] for item in found.mismatches if item["path"] in sizes):
        (folder / path).unlink()
        raise FetchError(f"{folder / path}: did not have the digest that the hub gives; removed, run prefetch again")
    fetched = Fetched(need.revision, commit, sizes)
    fetched.write(need.record(downloads))
    return fetched


def wanted_files(need: HubFiles, sizes: Mapping[str, int]) -> dict[str, int]:
    """The tokenizer; a model's config, weights and tokenizer; or of a data set's text files those with the split in
    their name, all if none of them says.

    Raises: FetchError when there is none.
    """
    if need.kind == "model":
        found = _model_files(need, sizes)
    elif need.kind == "tokenizer":
        found = [path for path in sizes if path == TOKENIZER_FILE]
    else:
        texts = [path for path in sizes if is_text(path)]
        found = [path for path in texts if need.split in words_of(path)] or texts
    if not found:
        what = TOKENIZER_FILE if need.kind == "tokenizer" else f"file of text ({', '.join(TEXT_SUFFIXES)})"
        raise FetchError(f"{need.kind} {need.name}: has no {what} on the hub; name another in the config")
    return {path: sizes[path] for path in found}


def _model_files(need: HubFiles, names: Mapping[str, int]) -> list[str]:
    """Of the weights the safetensors, whole or in shards; only where there are none the pickle."""
    if WEIGHTS_FILE in names:
        weights = {WEIGHTS_FILE}
    elif INDEX_FILE in names:
        weights = {INDEX_FILE, *(name for name in names if _SHARD.fullmatch(name))}
    else:
        weights = {PICKLE_FILE} & names.keys()
    if CONFIG_FILE not in names or not weights:
        raise FetchError(
            f"model {need.name}: has no {CONFIG_FILE} with {WEIGHTS_FILE} or {PICKLE_FILE} on the hub; name another"
        )
    return [name for name in names if name in weights or name in MODEL_FILES]


def _advice(need: HubFiles, folder: Path) -> str:
    what = f"{TOKENIZER_FILE} elsewhere and put it" if need.kind == "tokenizer" else "its files elsewhere and put them"
    return f"check name, revision and network, or fetch {what} into {folder}"
