"""A corpus: many documents in many files, shared out to shards by whole files and read in constant memory.

{"source": "python_library"}
{"source": "files", "files": ["books.jsonl.gz", "more/*.txt"], "field": "text"}
{"source": "hub", "dataset": "EleutherAI/the_pile_deduplicated", "split": "train", "field": "text"}
"""

import glob
import hashlib
import io
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from implicit_llm_contracts.config.text import Corpus, CorpusFiles, HubCorpus, LibraryCorpus
from implicit_llm_contracts.runs import FETCH, HubFiles, fetched_files, is_text, words_of
from implicit_llm_data.text.corpus_file import CorpusError, CorpusFile, Document, TextFormat, checked, stored_file

# With its copies, chunks and tokens a document takes about six times its size in memory (measured on 34 MiB of prose),
# so that this one, a hundred long novels, keeps a job below 2 GiB.
MAX_DOCUMENT_BYTES = 1 << 27

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")


@dataclass(frozen=True)
class DocumentSplit:
    """A share of `test_fraction`, in [0, 1), of the documents; those with equal keys are on one side."""

    test_fraction: float
    seed: int

    def of(self, key: bytes) -> Split:
        """The split of the documents with this `Document.split_key`."""
        value = hashlib.blake2b(key, digest_size=8, salt=self.seed.to_bytes(16, "little")).digest()
        return "test" if int.from_bytes(value, "little") < int(self.test_fraction * (1 << 64)) else "train"


@dataclass(frozen=True)
class CorpusShare:
    """The files of one shard. listing: all files of the corpus in brief, which the shards of a data set agree on."""

    files: Sequence[CorpusFile]
    listing: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of the files as they are stored."""
        return sum(file.size for file in self.files)

    def documents(self) -> Iterator[Document]:
        """Every document, in a fixed order; `position` counts over all files. Raises: CorpusError."""
        before = 0
        for file in self.files:
            for document in file.read():
                yield document._replace(position=before + document.position)
            before += file.size


def open_share(config: Corpus, downloads: Path, shard: int = 0, num_shards: int = 1) -> CorpusShare:
    """The files number `shard`, `shard + num_shards`, ... of the corpus; `downloads` is the folder of fetched files.

    Raises: CorpusError when there are none, or fewer than shards.
    """
    limit = config.max_document_bytes or MAX_DOCUMENT_BYTES
    match config:
        case LibraryCorpus():
            files = library_files(TextFormat("text", limit))
        case CorpusFiles():
            files = find_files(config.files, downloads, TextFormat(config.field, limit, config.split_by))
        case HubCorpus():
            wanted = HubFiles("dataset", config.dataset, config.revision, config.split)
            files = hub_files(wanted, downloads, TextFormat(config.field, limit))
    if num_shards > len(files):
        raise CorpusError(
            f"num_shards: {num_shards} shards are more than the corpus has files, {len(files)}; "
            f"use at most {len(files)}, or cut the corpus into more files"
        )
    names_and_sizes = json.dumps([[file.name, file.size] for file in files])
    listing = {"num_files": len(files), "sha256": hashlib.sha256(names_and_sizes.encode("ascii")).hexdigest()}
    return CorpusShare(files[shard::num_shards], listing)


def hub_files(wanted: HubFiles, downloads: Path, text_format: TextFormat) -> list[CorpusFile]:
    """The files of a data set of the hub, named relative to its folder: so they are the same on every machine.

    Raises: CorpusError when none is there; FetchedFilesError when they are not what was fetched.
    """
    folder, paths = wanted.folder(downloads), fetched_files(wanted, downloads)
    if paths is None:  # somebody put them there: those with the split in their name, or all, if none of them says
        there = [path for path in sorted(folder.rglob("*")) if path.is_file() and is_text(path.name)]
        paths = [path for path in there if wanted.split in words_of(path.relative_to(folder).as_posix())] or there
    if not paths:
        raise CorpusError(f"{wanted.name}: it has not been fetched to {folder}; {FETCH}")
    return [stored_file(path.relative_to(folder).as_posix(), path, text_format) for path in paths]


def find_files(patterns: Sequence[str], downloads: Path, text_format: TextFormat) -> list[CorpusFile]:
    """The files in the order of `patterns`, those of one pattern sorted by name; none twice.

    A relative name is looked up in `downloads` and, if nothing is there, in the working directory.
    Raises: CorpusError for a pattern without files, or a file of an unknown kind.
    """
    found: dict[Path, CorpusFile] = {}
    for pattern in patterns:
        for name, path in _matches(pattern, downloads):
            found.setdefault(path.resolve(), stored_file(name, path, text_format))
    return list(found.values())


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


# The documentation and sources of the running Python's standard library are a corpus that is on every machine. They are
# read where they lie. Tests, caches, installed packages and what describes this very installation are left out.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TOPICS = "pydoc_data/topics.py"  # its texts are documents of their own; their spelling as Python strings is not wanted


def library_files(text_format: TextFormat) -> list[CorpusFile]:
    """All files, then all chapters of the language reference, in a fixed order.

    Raises: CorpusError for a Python that has no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, folder_names, file_names in os.walk(root):
        folder_names[:] = [name for name in folder_names if name not in LEFT_OUT and not name.startswith("config-")]
        paths = [Path(folder, name) for name in file_names]
        names += [path.relative_to(root).as_posix() for path in paths if _is_wanted(path)]
    if not names:
        raise CorpusError(f"{root}: this Python has no sources; install them, or use a corpus with `source: files`")
    files = [
        CorpusFile(name, (root / name).stat().st_size, partial(_read_source, root / name, text_format))
        for name in sorted(names)
        if name != TOPICS
    ]
    topics: dict[str, str] = {}
    with suppress(ImportError):  # some distributions leave it out
        from pydoc_data import topics as module

        topics = module.topics
    for topic, text in sorted(topics.items()):  # as `help()` shows it
        name, size = f"pydoc/{topic}", len(text.encode())
        files.append(CorpusFile(name, size, partial(_read_topic, text, name, text_format, size)))
    return files


def _read_source(path: Path, text_format: TextFormat) -> Iterator[Document]:
    data = path.read_bytes()
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0] if path.suffix == ".py" else "utf-8"
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return  # a few files are there to be in another encoding
    yield checked(text, str(path), text_format, len(data))


def _read_topic(*document: Any) -> Iterator[Document]:
    yield checked(*document)


def _is_wanted(path: Path) -> bool:
    is_text = path.suffix in (".py", ".txt") and not path.name.startswith("_sysconfigdata")
    return is_text and path.is_file() and not path.is_symlink()
