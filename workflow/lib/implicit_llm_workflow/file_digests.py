"""Digests of files that belong to an identity though no job made them, each computed once for a state of the file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from implicit_llm_contracts.runs.atomic import write_once
from implicit_llm_contracts.runs.places import local_folder

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_FILE = "pytorch_model.bin"


class FileDigests:
    """sha256 of files, remembered in `cache` with size and time of change: checkpoints have gigabytes."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def __call__(self, path: Path) -> str | None:
        """The digest; None for what is no file."""
        try:
            status = path.stat()
        except OSError:
            return None
        if not path.is_file():
            return None
        key, state = str(path.resolve()), [status.st_size, status.st_mtime_ns]
        known = self._read()
        if known.get(key, [None])[:-1] != state:
            with open(path, "rb") as file:
                known[key] = [*state, hashlib.file_digest(file, "sha256").hexdigest()]
            self._write(known)
        return known[key][-1]

    def _read(self) -> dict[str, list]:
        try:
            values = json.loads(self._cache.read_bytes())
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}

    def _write(self, values: dict[str, list]) -> None:
        with suppress(OSError):  # it is only faster with it
            write_once(self._cache, json.dumps(values, indent=1))


def safe_digests(folder: Path, digest: Callable[[Path], str | None]) -> dict[str, str]:
    """Of config.json and the safetensors of a model: what a job reads of it. Empty where there is no `local_folder`."""
    root = local_folder(folder)
    if root is None:
        return {}
    names = [CONFIG_FILE, *_weights(root)]
    found = {name: digest(root / name) for name in names}
    return {name: sha256 for name, sha256 in found.items() if sha256 is not None}


def _weights(folder: Path) -> list[str]:
    """Of several sets the one that is loaded."""
    if (folder / WEIGHTS_FILE).is_file():
        return [WEIGHTS_FILE]
    try:
        shards = set(json.loads((folder / INDEX_FILE).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [WEIGHTS_FILE]
    return [INDEX_FILE, *sorted(name for name in shards if isinstance(name, str) and Path(name).name == name)]
