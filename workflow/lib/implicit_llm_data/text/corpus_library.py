"""The documentation and sources of the running Python's standard library, as a corpus that is on every machine.

They are read where they lie. Tests, caches, installed packages and what describes this very installation are left out.
"""

import io
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from implicit_llm_data.text.corpus_file import CorpusError, CorpusFile, Document, TextFormat, checked

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
    return files + [
        CorpusFile(f"pydoc/{topic}", len(text.encode()), partial(_read_topic, topic, text, text_format))
        for topic, text in sorted(_topics().items())
    ]


def _read_source(path: Path, text_format: TextFormat) -> Iterator[Document]:
    data = path.read_bytes()
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0] if path.suffix == ".py" else "utf-8"
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return  # a few files are there to be in another encoding
    yield checked(text, str(path), text_format, len(data))


def _read_topic(topic: str, text: str, text_format: TextFormat) -> Iterator[Document]:
    """A chapter of the language reference, as `help()` shows it."""
    yield checked(text, f"pydoc/{topic}", text_format, len(text.encode()))


def _is_wanted(path: Path) -> bool:
    is_text = path.suffix in (".py", ".txt") and not path.name.startswith("_sysconfigdata")
    return is_text and path.is_file() and not path.is_symlink()


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return {}
    return topics
