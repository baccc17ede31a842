"""Where a foreign checkpoint lies, and which of its files are read.

{"path": "models/pythia-70m"}                     below the folder of fetched files, or else the working directory
{"hub": "EleutherAI/pythia-70m", "revision": ...}  as `implicit-llm prefetch` fetched it:
    models/<owner>/<name>/<revision, or main>/
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs import UserError, fetched_model, local_folder, sha256_of

CONFIG_FILE = "config.json"
PICKLE_FILE = "pytorch_model.bin"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)


class CheckpointError(UserError):
    """A foreign checkpoint is missing, damaged, or of a kind that is not read."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Where it comes from. Exactly one of path and hub; revision (of the hub) None takes what was fetched, unpinned.

    sha256: digests that the files named must have. A pickle (pytorch_model.bin) is read only if it is among them.
    """

    path: str | None = None
    hub: str | None = None
    revision: str | None = None
    sha256: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.hub is None):
            raise ValueError("needs either path (a directory) or hub (a name), not both")

    @property
    def digests(self) -> dict[str, str]:
        return self.sha256 or {}


@dataclass(frozen=True)
class Checkpoint:
    """The files of a checkpoint that is there; `about` is what records say of where it comes from."""

    folder: Path
    config: Mapping[str, Any]
    weights: tuple[str, ...]
    others: tuple[str, ...]
    about: Mapping[str, Any]


def find_checkpoint(wanted: CheckpointConfig, downloads: Path) -> Checkpoint:
    """Look for the checkpoint and compare its files with the digests. Raises: CheckpointError, FetchedFilesError."""
    about: dict[str, Any] = {"path": wanted.path}
    if wanted.hub is not None:
        folder, commit = fetched_model(wanted.hub, wanted.revision, downloads)
        about = {"hub": wanted.hub, "revision": wanted.revision, "commit": commit}
    else:
        folder = _folder_of(Path(str(wanted.path)), downloads)
    config = _config(folder)
    weights = _weights(folder, wanted)
    digests = {name: sha256_of(folder / name) for name in (CONFIG_FILE, *weights)}
    _compare(folder, wanted.digests, digests)
    about["sha256"] = digests
    others = tuple(name for name in (*TOKENIZER_FILES, "generation_config.json") if (folder / name).is_file())
    return Checkpoint(folder, config, weights, others, about)


def _folder_of(path: Path, downloads: Path) -> Path:
    folder = local_folder(path, downloads)
    if folder is None:
        raise CheckpointError(
            f"checkpoint.path: {path} is no directory, neither below {downloads} nor below the working directory; "
            "correct the path, or put the checkpoint there"
        )
    return folder


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: has no {CONFIG_FILE}; give the directory of a checkpoint") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); fetch it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: holds no JSON object; fetch it again")
    return config


def _weights(folder: Path, wanted: CheckpointConfig) -> tuple[str, ...]:
    """Names of the files with weights, the index of shards included; of several sets the one that is loaded."""
    if (folder / WEIGHTS_FILE).is_file():
        return (WEIGHTS_FILE,)
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: is no index of weights ({error}); fetch it again") from error
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise CheckpointError(f"{folder / name}: is named in {INDEX_FILE} and not there; fetch it again")
        return (INDEX_FILE, *names)
    return (_vouched_pickle(folder, wanted),)


def _vouched_pickle(folder: Path, wanted: CheckpointConfig) -> str:
    path = folder / PICKLE_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder}: has no {WEIGHTS_FILE}; give a checkpoint in that format")
    if PICKLE_FILE not in wanted.digests:
        raise CheckpointError(
            f"{path}: is a pickle; if it comes from whom you trust, name its digest, in the experiment file as "
            f"`checkpoint: {{..., sha256: {{{PICKLE_FILE}: {sha256_of(path)}}}}}`, manually as "
            f"`--sha256 {PICKLE_FILE}={sha256_of(path)}`; only tensors are read from it even then"
        )
    return PICKLE_FILE


def _compare(folder: Path, wanted: Mapping[str, str], found: Mapping[str, str]) -> None:
    for name, digest in sorted(wanted.items()):
        has = found.get(name) or (sha256_of(folder / name) if (folder / name).is_file() else None)
        if has != digest:
            what = "is not there" if has is None else f"has sha256 {has}"
            raise CheckpointError(
                f"{folder / name}: {what}, expected {digest}; correct checkpoint.sha256, or bring back that file"
            )
