"""Files of a corpus by name or pattern."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from implicit_llm_data.text.corpus_file import CorpusError, TextFile, TextFormat


def find_files(patterns: Sequence[str], downloads: Path, text_format: TextFormat) -> list[TextFile]:
    """The files in the order of `patterns`, those of one pattern sorted by name; none twice.

    A relative name is looked up in `downloads` and, if nothing is there, in the working directory.
    Raises: CorpusError for a pattern without files, or a file of an unknown kind.
    """
    found: dict[Path, TextFile] = {}
    for pattern in patterns:
        for name, path in _matches(pattern, downloads):
            found.setdefault(path.resolve(), TextFile(name, path, text_format))
    return list(found.values())


def hand_put_files(folder: Path, split: str) -> list[Path]:
    """Files of a data set that somebody put there: those with `split` in their name, or all, if none of them says."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and _is_text(path)]
    return [path for path in paths if split in _words(path.relative_to(folder))] or paths


def named_files(folder: Path, paths: Sequence[Path], text_format: TextFormat) -> list[TextFile]:
    """With names relative to `folder`, so that they are the same on every machine."""
    return [TextFile(path.relative_to(folder).as_posix(), path, text_format) for path in paths]


def _matches(pattern: str, downloads: Path) -> list[tuple[str, Path]]:
    """Names and paths; a name is relative to where it was found, so that it is the same on every machine."""
    roots = [Path("/")] if Path(pattern).is_absolute() else [downloads, Path()]
    for root in roots:
        names = glob.glob(pattern, root_dir=root, recursive=True)
        if (root / pattern).is_file():  # a name with brackets in it
            names = [pattern]
        files = [(name, root / name) for name in sorted(names) if (root / name).is_file()]
        if files:
            return files
    places = " or ".join(str(root.absolute()) for root in roots)
    raise CorpusError(f"files: nothing matches '{pattern}' in {places}; correct the name, or fetch the file")


def _is_text(path: Path) -> bool:
    """Whether it holds documents: data sets bring a README and descriptions too."""
    name = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    return name.endswith((".parquet", ".jsonl", ".ndjson", ".txt")) and not name.startswith(".")


def _words(path: Path) -> set[str]:
    text = path.as_posix()
    for separator in "/._":
        text = text.replace(separator, "-")
    return set(text.split("-"))
