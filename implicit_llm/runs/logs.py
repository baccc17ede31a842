"""The one logging set-up of a stage: this package to stderr and a file, the warnings of libraries to the file only."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from implicit_llm.runs.atomic import storage_errors

PACKAGE = "implicit_llm"
FILE_ONLY = {"file_only": True}  # `extra` of records that the console shows in its own way


@contextmanager
def configured(log: Path | None) -> Iterator[None]:
    """Log to stderr and append to the file `log`, with UTC times; afterwards everything is as before.

    Raises: StorageError when the file cannot be written.
    """
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    stderr = logging.StreamHandler(sys.stderr)
    stderr.addFilter(_is_for_stderr)
    handlers: list[logging.Handler] = [stderr]
    if log is not None:
        with storage_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(logging.FileHandler(log, mode="a", encoding="utf-8"))
    root, package = logging.getLogger(), logging.getLogger(PACKAGE)
    levels = (root.level, package.level)
    root.setLevel(logging.WARNING)
    package.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    try:
        yield
    finally:
        root.setLevel(levels[0])
        package.setLevel(levels[1])
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def _is_for_stderr(record: logging.LogRecord) -> bool:
    is_own = record.name == PACKAGE or record.name.startswith(f"{PACKAGE}.")
    return (is_own or record.levelno >= logging.ERROR) and not getattr(record, "file_only", False)
