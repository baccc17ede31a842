"""The documentation and sources of the running Python's standard library, as a corpus that is on every machine.

They are read where they lie. Tests, caches, installed packages and what describes this very installation are left out.
"""

from __future__ import annotations

import io
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from implicit_llm_data.text.corpus_file import CorpusError, Document, TextFormat, checked, damage_named

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TOPICS = "pydoc_data/topics.py"  # its texts are documents of their own; their spelling as Python strings is not wanted


class SourceFile:
    """A module or text file of the library."""

    def __init__(self, name: str, path: Path, text_format: TextFormat) -> None:
        self.name = name
        self.path = path
        self.size = path.stat().st_size
        self._format = text_format

    def read(self) -> Iterator[Document]:
        with damage_named(self.path):
            data = self.path.read_bytes()
        try:
            encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0] if self.path.suffix == ".py" else "utf-8"
            text = data.decode(encoding)
        except (SyntaxError, UnicodeDecodeError):
            return  # a few files are there to be in another encoding
        yield checked(text, str(self.path), self._format, self.size)


class Topic:
    """A chapter of the language reference, as `help()` shows it."""

    def __init__(self, topic: str, text: str, text_format: TextFormat) -> None:
        self.name = f"pydoc/{topic}"
        self.size = len(text.encode("utf-8"))
        self._text = text
        self._format = text_format

    def read(self) -> Iterator[Document]:
        yield checked(self._text, self.name, self._format, self.size)


def library_files(text_format: TextFormat) -> list[SourceFile | Topic]:
    """All files and topics in a fixed order. Raises: CorpusError for a Python that has no sources."""
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, folder_names, file_names in os.walk(root):
        folder_names[:] = [name for name in folder_names if name not in LEFT_OUT and not name.startswith("config-")]
        paths = [Path(folder, name) for name in file_names]
        names += [path.relative_to(root).as_posix() for path in paths if _is_wanted(path)]
    if not names:
        raise CorpusError(f"{root}: this Python has no sources; install them, or use a corpus with `source: files`")
    files: list[SourceFile | Topic] = [SourceFile(name, root / name, text_format) for name in sorted(names)]
    return [file for file in files if file.name != TOPICS] + [
        Topic(topic, text, text_format) for topic, text in sorted(_topics().items())
    ]


def _is_wanted(path: Path) -> bool:
    is_text = path.suffix in (".py", ".txt") and not path.name.startswith("_sysconfigdata")
    return is_text and path.is_file() and not path.is_symlink()


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return {}
    return topics
