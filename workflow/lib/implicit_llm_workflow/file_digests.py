"""Compute the digests of files that no job made, for identities of jobs, and cache them by size and time."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs.atomic import read_object, write_once
from implicit_llm_contracts.runs.fetched_files import CONFIG_FILE, weight_files
from implicit_llm_contracts.runs.manifest import sha256_of
from implicit_llm_contracts.runs.places import corpus_files, downloads_folder, local_folder


class Remembered:
    """A cache of values that were computed from files, each for one state of its file.

    `path`: the cache file; without one, the cache ends with this process. The cache only saves time, so a cache file
    that cannot be read or written is ignored.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._is_changed = False

    @cached_property
    def _known(self) -> dict[str, Any]:
        return {} if self._path is None else read_object(self._path)

    def find(self, key: str, state: Any, look: Callable[[], Any]) -> Any:
        """Return the value that was cached for `key` in this state, or else cache and return the result of `look`.

        State and value must be representable in JSON. `save` writes new values to the cache file.
        """
        match self._known.get(key):
            case [known, found] if known == state:
                return found
        found = look()
        self._known[key] = [state, found]
        self._is_changed = True
        return found

    def save(self) -> None:
        """Write the cache file if a value is new."""
        if self._path is not None and self._is_changed:
            with suppress(OSError):
                write_once(self._path, json.dumps(self._known, sort_keys=True))
            self._is_changed = False


class FileDigests:
    """A function that computes the sha256 of an unchanged file only once, because checkpoints have gigabytes.

    `cache`: the JSON file that stores each digest with the size and modification time of the hashed file.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = Remembered(cache)

    def __call__(self, path: Path) -> str | None:
        """Return the digest, or None if the path is not a file."""
        found = self._find(path) if path.is_file() else None
        self._cache.save()
        return found

    def of_corpus(self, patterns: Sequence[str]) -> dict[str, str]:
        """Return the digests of a corpus's files by name; show the progress. The result is empty if no file matches."""
        from tqdm import tqdm

        files, digests = corpus_files(patterns, downloads_folder()), {}
        size = sum(path.stat().st_size for path in files.values())
        how: dict[str, Any] = {"unit": "B", "unit_scale": True, "leave": False, "delay": 2.0, "disable": None}
        with tqdm(total=size, desc="hashing the corpus", **how) as bar:
            for name, path in files.items():
                digests[name] = self._find(path)
                bar.update(path.stat().st_size)
        self._cache.save()
        return digests

    def _find(self, path: Path) -> str:
        status = path.stat()
        state = [status.st_size, status.st_mtime_ns]
        digest: str = self._cache.find(str(path.resolve()), state, lambda: sha256_of(path))
        return digest


def safe_digests(folder: Path, digest: Callable[[Path], str | None]) -> dict[str, str]:
    """Return the digests of a model's config.json, its safetensors and their index by name, without missing files.

    The result is empty if `local_folder` finds no folder. Names in the index that contain a folder are skipped.
    """
    root = local_folder(folder)
    if root is None:
        return {}
    names = [CONFIG_FILE, *weight_files(root)]
    found = {name: digest(root / name) for name in names if Path(name).name == name}
    return {name: sha256 for name, sha256 in found.items() if sha256 is not None}
