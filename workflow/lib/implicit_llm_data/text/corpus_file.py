"""One file of a corpus, read document by document: JSON lines, parquet or plain text, also compressed.

A document of a `.txt` file is the whole file. However long a file is, only one document of it (of parquet: one batch of
rows) is in memory.
"""

import io
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from implicit_llm_contracts.runs import UserError

PARQUET_ROWS = 64  # read at once: enough to hide the cost of a call, few enough to hold


class CorpusError(UserError):
    """A text file is missing, damaged or not as configured; the message names file and place."""


class Document(NamedTuple):
    """text; its bytes; how many bytes of the file, as stored, are read after it; and the group it belongs to."""

    text: str
    utf8: bytes
    position: int
    group: str | None = None

    @property
    def split_key(self) -> bytes:
        """What decides whether the document is held out."""
        return self.utf8 if self.group is None else self.group.encode()


@dataclass(frozen=True)
class TextFormat:
    """The field of the text, how many bytes a document may have as stored, and the field of its group, if any."""

    field: str
    max_document_bytes: int
    split_by: str | None = None

    @property
    def fields(self) -> dict[str, str]:
        """The fields to read, the text first, with the key of the configuration that names each."""
        return {self.field: "field"} | ({self.split_by: "split_by"} if self.split_by else {})


@dataclass(frozen=True)
class CorpusFile:
    """name: the same on every machine; size: bytes as stored; read: gives the documents in order, empty ones too."""

    name: str
    size: int
    read: Callable[[], Iterator[Document]]


def stored_file(name: str, path: Path, text_format: TextFormat) -> CorpusFile:
    """A file on disk. Raises: CorpusError for an unknown ending, and, when it is read, for what is wrong in it."""
    return CorpusFile(name, path.stat().st_size, partial(_read, reader_of(path), path, text_format))


Reader = Callable[[Path, TextFormat], Iterator[Document]]


def reader_of(path: Path) -> Reader:
    """What reads a file of this name. Raises: CorpusError for an unknown ending."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    elif suffixes[-1:] == [".parquet"]:
        return _read_parquet
    reader = READERS.get(suffixes[-1] if suffixes else "")
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


def checked(text: object, where: str, text_format: TextFormat, position: int, group: str | None = None) -> Document:
    """`text` as a document. Raises: CorpusError if it is none."""
    if not isinstance(text, str):
        raise CorpusError(f"{where}: '{text_format.field}' is no text but {type(text).__name__}; repair or remove it")
    try:
        utf8 = text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise CorpusError(f"{where}: character {error.start} is half a character; repair or remove it") from error
    if len(utf8) > text_format.max_document_bytes:
        raise too_long(where, text_format)
    return Document(text, utf8, position, group)


def too_long(where: str, text_format: TextFormat) -> CorpusError:
    return CorpusError(
        f"{where}: the document is longer than max_document_bytes, {text_format.max_document_bytes}; "
        f"raise corpus.max_document_bytes (a job needs several times as much memory), or cut the document"
    )


def _read_lines(path: Path, text_format: TextFormat) -> Iterator[Document]:
    limit = text_format.max_document_bytes
    with _opened(path) as (file, raw):
        number = 0
        while line := file.readline(limit + 1):
            number += 1
            where = f"{path}: line {number}"
            if len(line) > limit:
                raise too_long(where, text_format)
            if line.isspace():
                continue
            text, *group = _fields_of(line, where, text_format.fields)
            yield checked(text, where, text_format, raw.tell(), *map(str, group))


def _fields_of(line: bytes, where: str, fields: dict[str, str]) -> list[object]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise CorpusError(f"{where}: invalid UTF-8 at byte {error.start}; repair or remove the line") from error
    except ValueError as error:
        raise CorpusError(f"{where}: not JSON ({error}); repair or remove the line") from error
    names = sorted(record) if isinstance(record, dict) else [type(record).__name__]
    check_fields(fields, record if isinstance(record, dict) else (), names, where)
    return [record[field] for field in fields]


def check_fields(fields: dict[str, str], there: Collection[str], names: Sequence[str], where: str) -> None:
    """Raises: CorpusError for a field that is not `there`; `names`: what to say that there is."""
    for field, key in fields.items():
        if field not in there:
            found = ", ".join(names)
            raise CorpusError(f"{where}: no field '{field}' (found: {found:.200}); set corpus.{key}")


def _read_text(path: Path, text_format: TextFormat) -> Iterator[Document]:
    if text_format.split_by is not None:
        raise CorpusError(f"{path}: a text file has no field '{text_format.split_by}'; remove corpus.split_by")
    with _opened(path) as (file, raw):
        data = file.read(text_format.max_document_bytes + 1)
        if len(data) > text_format.max_document_bytes:
            raise too_long(str(path), text_format)
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
            check_fields(fields, table.schema_arrow.names, table.schema_arrow.names, str(path))
            num_rows, size = max(1, table.metadata.num_rows), path.stat().st_size
            for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=list(fields)):
                for values in zip(*(batch.column(field) for field in fields), strict=True):
                    number += 1
                    text, *group = (value.as_py() for value in values)
                    place = size * number // num_rows
                    yield checked(text, f"{path}: row {number}", text_format, place, *map(str, group))
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: row {number}: invalid UTF-8; repair or remove the row") from error
    except pyarrow.ArrowException as error:
        raise CorpusError(
            f"{path}: the parquet file is damaged ({str(error).splitlines()[0]}); fetch it again"
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedIOBase, BinaryIO]]:
    """The decompressed file, and the one below it, whose `tell` says how far the stored file is read."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    with path.open("rb") as raw:
        if compression is None:
            yield raw, raw
            return
        import pyarrow  # has zstd at hand, which the standard library of this Python has not

        with (
            pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), compression) as stream,
            io.BufferedReader(stream, 1 << 20) as file,
        ):
            yield file, raw


COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
READERS: dict[str, Reader] = {
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
    ".json": _read_lines,
    ".txt": _read_text,
    ".md": _read_text,
}
