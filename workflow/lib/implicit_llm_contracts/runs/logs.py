"""Set up a stage's logging to stderr and a file. A library's warnings appear only in the file, its errors in both."""

import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from implicit_llm_contracts.runs.atomic import storage_errors, temporary_name

PACKAGES = ("implicit_llm", "implicit_llm_contracts", "implicit_llm_data", "implicit_llm_jobs", "implicit_llm_workflow")
_USER_INFO = re.compile(r"(?<=://)[^\s/?#]+@")  # up to the last "@", because a password may contain one
FILE_ONLY = {"file_only": True}  # `extra` of records that the console shows in another way


@contextmanager
def configured(log: Path | None, shown: Path | None = None) -> Iterator[None]:
    """Log to stderr and append to the file `log`, with UTC times; restore the previous logging afterwards.

    `shown`: the path of a link to a hidden file beside `log`; this file gets the lines of all starts. Snakemake deletes
    `log` before each start, so `log` has the lines of one start, and Snakemake shows no older lines after a failure.
    Raises: StorageError if a file cannot be written.
    """
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    stderr = logging.StreamHandler(sys.stderr)
    stderr.addFilter(_is_for_stderr)
    handlers: list[logging.Handler] = [stderr]
    if log is not None:
        with storage_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            files = [log] if shown is None else [log, _kept(log)]
            handlers += [logging.FileHandler(path, encoding="utf-8") for path in files]
            if shown is not None:
                show_log(log, shown)
    root = logging.getLogger()
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    try:
        with at_level(logging.WARNING, None), at_level(logging.INFO, *PACKAGES):
            yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


@contextmanager
def at_level(level: int, *names: str | None) -> Iterator[None]:
    """Set the level of these loggers (None: the root) inside the block, and restore it afterwards."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in levels.items():
            logger.setLevel(before)


def _kept(log: Path) -> Path:
    return log.with_name(f".{log.name}")


def show_log(log: Path, shown: Path) -> None:
    """Make `shown` a link to the log of all starts, or to `log` if only that exists; ignore file system errors."""
    source = _kept(log) if _kept(log).exists() else log
    target = os.path.relpath(source, shown.parent)
    with suppress(OSError):  # the file system has no links, or another process was faster
        if source.exists() and not (shown.is_symlink() and os.readlink(shown) == target):
            temporary = temporary_name(shown)
            os.symlink(target, temporary)
            os.replace(temporary, shown)


def without_password(text: str) -> str:
    """Replace the user and password of each address in the text, such as `http://me:secret@host:5000`, by `***`."""
    return _USER_INFO.sub("***@", text)


def _is_for_stderr(record: logging.LogRecord) -> bool:
    is_own = record.name.partition(".")[0] in PACKAGES
    return (is_own or record.levelno >= logging.ERROR) and not getattr(record, "file_only", False)


def wants_bar(progress: str = "auto") -> bool:
    """Return whether to show a progress bar; "auto" shows it on a terminal, but not in a process of Snakemake."""
    if progress != "auto":
        return progress == "bar"
    return sys.stderr.isatty() and not any(key.startswith("SNAKEMAKE") for key in os.environ)
