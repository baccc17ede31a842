"""Read the documents of a corpus of many files in constant memory; each shard consists of whole files.

The configuration names one of three sources:

    {"source": "python_library"}
    {"source": "files", "files": ["books.jsonl.gz", "more/*.txt"], "field": "text"}
    {"source": "hub", "dataset": "EleutherAI/the_pile_deduplicated", "split": "train", "field": "text"}

A file is parquet, JSON lines or plain text; JSON lines and plain text may be compressed. A plain-text file is one
document. However long a file is, only one document (with parquet: one batch of rows) is in memory.
"""

import codecs
import hashlib
import io
import json
import os
import sysconfig
import tokenize
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from implicit_llm_contracts.config.text import Corpus, CorpusFiles, HubCorpus, LibraryCorpus
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.fetched_files import (
    COMPRESSIONS,
    FETCH,
    HubFiles,
    find_fetched,
    is_text,
    words_of,
)
from implicit_llm_contracts.runs.manifest import sha256_of
from implicit_llm_contracts.runs.places import corpus_digest, corpus_files, local_files

# A document needs several times its size in memory, because of its copies and tokens. With documents of at most this
# size (about a hundred long novels), a job needs less than 2 GiB.
MAX_DOCUMENT_BYTES = 1 << 27

Split = Literal["train", "test", "validation"]
PARQUET_ROWS = 64  # rows read at once: enough to hide the cost of a call, few enough to fit into memory


class CorpusError(UserError):
    """A text file is missing, damaged or not as configured; the message names the file or the setting."""


class Document(NamedTuple):
    """A document as text and as UTF-8.

    position: the bytes of the stored file that have been read at the end of the document; `CorpusShare.documents` adds
    the sizes of the files before it. group: the value of the field `split_by`; None without this field.
    """

    text: str
    utf8: bytes
    position: int
    group: str | None = None

    @property
    def split_key(self) -> bytes:
        """The bytes that determine the split of the document: its group or, without a group, its text."""
        return self.utf8 if self.group is None else self.group.encode()


@dataclass(frozen=True)
class TextFormat:
    """The format of documents: the field of the text, and the limit in bytes for the text and for a JSON line.

    split_by: the field that names the document's group, if there is one.
    """

    field: str
    max_document_bytes: int
    split_by: str | None = None

    @property
    def fields(self) -> dict[str, str]:
        """The fields to read, the text first, each with the configuration key that names it."""
        return {self.field: "field"} | ({self.split_by: "split_by"} if self.split_by else {})


@dataclass(frozen=True)
class CorpusFile:
    """A file of the corpus.

    name: the same on every machine. size: bytes as stored. read: returns the documents in order, including empty ones.
    """

    name: str
    size: int
    read: Callable[[], Iterator[Document]]


@dataclass(frozen=True)
class DocumentSplit:
    """The division of documents into splits by a seeded hash of their keys; equal keys are in the same split.

    test_fraction, validation_fraction: the expected shares of distinct keys; their sum must be below 1. The test
    documents do not depend on `validation_fraction`.
    """

    test_fraction: float
    seed: int
    validation_fraction: float = 0.0

    @property
    def names(self) -> tuple[Split, ...]:
        """The names of the splits, the training split first."""
        return ("train", "test", "validation") if self.validation_fraction else ("train", "test")

    def of(self, key: bytes) -> Split:
        """Return the split of the documents with this `Document.split_key`."""
        value = hashlib.blake2b(key, digest_size=8, salt=self.seed.to_bytes(16, "little")).digest()
        place = int.from_bytes(value, "little")
        if place < int(self.test_fraction * (1 << 64)):
            return "test"
        return "validation" if place < int((self.test_fraction + self.validation_fraction) * (1 << 64)) else "train"


@dataclass(frozen=True)
class CorpusShare:
    """The files of one shard.

    listing: a summary of all files of the corpus, which must be equal for all shards. commit: that of fetched files.
    """

    files: Sequence[CorpusFile]
    listing: dict[str, Any]
    commit: str | None = None

    @property
    def size(self) -> int:
        """The bytes of the files as stored."""
        return sum(file.size for file in self.files)

    def documents(self) -> Iterator[Document]:
        """Yield every document, in a fixed order; `position` counts over all files. Raises: CorpusError."""
        before = 0
        for file in self.files:
            for document in file.read():
                yield document._replace(position=before + document.position)
            before += file.size


def open_share(config: Corpus, downloads: Path, shard: int = 0, num_shards: int = 1) -> CorpusShare:
    """Return the corpus's files `shard`, `shard + num_shards`, ... from 0 on; `downloads` has the fetched files.

    Raises: CorpusError for missing files, a file of an unknown kind, or fewer files than shards; FetchedFilesError.
    """
    limit, commit = config.max_document_bytes or MAX_DOCUMENT_BYTES, None
    match config:
        case LibraryCorpus():
            files = library_files(TextFormat("text", limit))
        case CorpusFiles():
            files = find_files(config.files, downloads, TextFormat(config.field, limit, config.split_by))
        case HubCorpus():
            wanted = HubFiles("dataset", config.dataset, config.revision, config.split)
            files, commit = hub_files(wanted, downloads, TextFormat(config.field, limit))
    if num_shards > len(files):
        raise CorpusError(
            f"num_shards: {num_shards} shards are more than the corpus has files, {len(files)}; "
            f"use at most {len(files)}, or cut the corpus into more files"
        )
    names_and_sizes = json.dumps([[file.name, file.size] for file in files])
    listing = {"num_files": len(files), "sha256": hashlib.sha256(names_and_sizes.encode("ascii")).hexdigest()}
    return CorpusShare(files[shard::num_shards], listing, commit)


def hub_files(wanted: HubFiles, downloads: Path, text_format: TextFormat) -> tuple[list[CorpusFile], str | None]:
    """Return the files of a data set of the hub and its commit, which is None for files that the user supplied.

    The names of the files are relative to the folder of the data set, so equal on every machine.
    Raises: CorpusError if there are none or one is of an unknown kind; FetchedFilesError if the fetch is incomplete or
    files have changed since.
    """
    folder, found = wanted.folder(downloads), find_fetched(wanted, downloads)
    if found is not None:
        paths = sorted(folder / name for name in found.sizes)
    else:  # a user copied the files: use those with the split in their name, or all if there are none
        there = [path for path in sorted(folder.rglob("*")) if path.is_file() and is_text(path.name)]
        paths = [path for path in there if wanted.split in words_of(path.relative_to(folder).as_posix())] or there
    if not paths:
        raise CorpusError(f"{wanted.name}: it has not been fetched to {folder}; {FETCH}")
    files = [stored_file(path.relative_to(folder).as_posix(), path, text_format) for path in paths]
    return files, None if found is None else found.commit


def find_files(patterns: Sequence[str], downloads: Path, text_format: TextFormat) -> list[CorpusFile]:
    """Return the files in the order of `patterns`, sorted by name within a pattern, each once.

    A relative name is searched in `downloads` and, if nothing matches, in the working directory.
    Raises: CorpusError for a pattern without files, or a file of an unknown kind.
    """
    for pattern in patterns:
        if not local_files(pattern, downloads):
            raise CorpusError(
                f"files: nothing matches '{pattern}' in {downloads.absolute()} or {Path.cwd()}; correct the name, or "
                "fetch the file"
            )
    return [stored_file(name, path, text_format) for name, path in corpus_files(patterns, downloads).items()]


def require_planned_files(config: CorpusFiles, share: CorpusShare, digests: Mapping[str, str], downloads: Path) -> None:
    """Raise CorpusError unless `digests` maps exactly the names of the share's files to their sha256."""
    paths = corpus_files(config.files, downloads)
    for name, digest in digests.items():
        if name not in paths:
            raise CorpusError(f"files: {name} is gone; restore it")
        if sha256_of(paths[name]) != digest:
            raise CorpusError(f"{paths[name]}: has changed since this job was planned; plan it again")
    names = {file.name for file in share.files}
    for name in sorted(names ^ digests.keys()):  # an added or removed file moves others to other shards
        change = "was not among" if name in names else "is no longer among"
        raise CorpusError(f"files: {name} {change} this job's files, as they were planned; plan it again")


def require_planned_corpus(config: CorpusFiles, digest: str, downloads: Path) -> None:
    """Raise CorpusError unless `digest` is the digest of all files of the corpus."""
    paths = corpus_files(config.files, downloads)
    if corpus_digest({name: sha256_of(path) for name, path in paths.items()}) != digest:
        raise CorpusError(f"files: {', '.join(config.files)} have changed since this job was planned; plan it again")


# The documentation and sources of the running Python's standard library are a corpus that every machine has. They are
# read in place. Tests, caches, installed packages and descriptions of this installation are left out.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TOPICS = "pydoc_data/topics.py"  # a module of strings; each string is read as a document of its own instead


def library_files(text_format: TextFormat) -> list[CorpusFile]:
    """Return the files of Python's standard library, then the texts of `help()` by topic, in a fixed order.

    Raises: CorpusError for a Python without sources.
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
        CorpusFile(name, (root / name).stat().st_size, partial(_read, _read_source, root / name, text_format))
        for name in sorted(names)
        if name != TOPICS
    ]
    with suppress(ImportError):  # some distributions of Python omit this module
        from pydoc_data.topics import topics

        for topic, text in sorted(topics.items()):  # each text as `help()` shows it
            name, size = f"pydoc/{topic}", len(text.encode())
            files.append(CorpusFile(name, size, partial(_read_topic, text, name, text_format, size)))
    return files


def _read_source(path: Path, text_format: TextFormat) -> Iterator[Document]:
    data = path.read_bytes()
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0] if path.suffix == ".py" else "utf-8"
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return  # some Pythons have files that deliberately are not in their declared encoding
    yield checked(text, str(path), text_format, len(data))


def _read_topic(*document: Any) -> Iterator[Document]:
    yield checked(*document)


def _is_wanted(path: Path) -> bool:
    is_text = path.suffix in (".py", ".txt") and not path.name.startswith("_sysconfigdata")
    return is_text and path.is_file() and not path.is_symlink()


def stored_file(name: str, path: Path, text_format: TextFormat) -> CorpusFile:
    """Return the corpus file at `path`; its `read` raises CorpusError for content that is unreadable or invalid.

    Raises: CorpusError for an unknown ending of the name.
    """
    return CorpusFile(name, path.stat().st_size, partial(_read, reader_of(path), path, text_format))


Reader = Callable[[Path, TextFormat], Iterator[Document]]


def reader_of(path: Path) -> Reader:
    """Return the reader of a file of this name. Raises: CorpusError for an unknown ending."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet
    reader = READERS.get(Path(path.stem).suffix.lower() if suffix in COMPRESSIONS else suffix)
    if reader is None:
        known = ", ".join([*READERS, ".parquet"])
        raise CorpusError(f"{path}: its format is not known; name it {known} (the first ones also with .gz or .zst)")
    return reader


def _read(reader: Reader, path: Path, text_format: TextFormat) -> Iterator[Document]:
    try:
        yield from reader(path, text_format)
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise CorpusError(f"{path}: cannot be read ({reason}); check or fetch it again") from error


def checked(text: object, where: str, text_format: TextFormat, position: int, *group: object) -> Document:
    """Return `text` as a document. Raises: CorpusError if it is no string, not valid Unicode, or too long.

    The group, which is the value of the field `split_by`, must not be null and must be valid Unicode too.
    """
    if not isinstance(text, str):
        raise CorpusError(f"{where}: '{text_format.field}' is no text but {type(text).__name__}; repair or remove it")
    if None in group:
        raise CorpusError(f"{where}: '{text_format.split_by}' is null; repair or remove it")
    names = [*map(str, group)]
    try:
        utf8, _ = text.encode("utf-8"), "".join(names).encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair
        raise CorpusError(f"{where}: character {error.start} is half a character; repair or remove it") from error
    if len(utf8) > text_format.max_document_bytes:
        raise too_long(where, text_format)
    return Document(text, utf8, position, *names)


def too_long(where: str, text_format: TextFormat) -> CorpusError:
    return CorpusError(
        f"{where}: the document is longer than max_document_bytes, {text_format.max_document_bytes}; "
        f"raise corpus.max_document_bytes (a job needs several times as much memory), or cut the document"
    )


def _read_lines(path: Path, text_format: TextFormat) -> Iterator[Document]:
    limit = text_format.max_document_bytes
    with _opened(path) as (file, raw):
        for number, line in enumerate(iter(partial(file.readline, limit + 1), b""), start=1):
            where = f"{path}: line {number}"
            if len(line) > limit:
                raise too_long(where, text_format)
            if line.isspace():
                continue
            text, *group = _fields_of(line, where, text_format.fields)
            yield checked(text, where, text_format, raw.tell(), *group)


def _fields_of(line: bytes, where: str, fields: dict[str, str]) -> list[object]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise CorpusError(f"{where}: invalid UTF-8 at byte {error.start}; repair or remove the line") from error
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{where}: not JSON ({error}); repair or remove the line") from error
    check_fields(fields, record if isinstance(record, dict) else {}, where)
    return [record[field] for field in fields]


def check_fields(fields: dict[str, str], there: Collection[str], where: str) -> None:
    """Raise CorpusError for the first of `fields` that is not in `there`."""
    for field, key in fields.items():
        if field not in there:
            found = ", ".join(sorted(there)) or "none"
            raise CorpusError(f"{where}: no field '{field}' (found: {found:.200}); set corpus.{key}")


def _read_text(path: Path, text_format: TextFormat) -> Iterator[Document]:
    if text_format.split_by is not None:
        raise CorpusError(f"{path}: a text file has no field '{text_format.split_by}'; remove corpus.split_by")
    with _opened(path) as (file, raw):
        data = file.read(text_format.max_document_bytes + 1)
        if len(data) > text_format.max_document_bytes:
            raise too_long(str(path), text_format)
        data = data.removeprefix(codecs.BOM_UTF8)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise CorpusError(f"{path}: line {line}: invalid UTF-8; convert the file to UTF-8") from error
        yield Document(text, data, raw.tell())


def _read_parquet(path: Path, text_format: TextFormat) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    fields, number = text_format.fields, 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            check_fields(fields, table.schema_arrow.names, str(path))
            num_rows, size = max(1, table.metadata.num_rows), path.stat().st_size
            for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=list(fields)):
                for values in zip(*(batch.column(field) for field in fields), strict=True):
                    number += 1
                    text, *group = (value.as_py() for value in values)
                    place = size * number // num_rows
                    yield checked(text, f"{path}: row {number}", text_format, place, *group)
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: row {number}: invalid UTF-8; repair or remove the row") from error
    except pyarrow.ArrowException as error:
        raise CorpusError(
            f"{path}: the parquet file is damaged ({str(error).splitlines()[0]}); fetch it again"
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedIOBase, BinaryIO]]:
    """Yield the decompressed file and the stored file, whose `tell` returns the position in the stored bytes."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    with path.open("rb") as raw:
        if compression is None:
            yield raw, raw
            return
        import pyarrow  # supports zstd, unlike the standard library of this Python

        with (
            pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), compression) as stream,
            io.BufferedReader(stream, 1 << 20) as file,
        ):
            yield file, raw


READERS: dict[str, Reader] = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_lines,
    ".txt": _read_text,
    ".md": _read_text,
}
