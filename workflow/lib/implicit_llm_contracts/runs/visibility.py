"""Files that another machine wrote: on a network file system they may come into sight late."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

WAIT = "IMPLICIT_LLM_LATENCY_WAIT_S"
SLURM_WAIT_S = 60.0  # what NFS remembers of a directory at most, by default
POLL_S = 0.5


def wait_for_files(paths: Iterable[Path], wait_s: float | None = None) -> None:
    """Return when all `paths` are there, or `wait_s` seconds have passed: whoever reads them then says what is missing.

    By default a minute in a job of Slurm, where others wrote the files on other machines, and not at all elsewhere; the
    environment variable IMPLICIT_LLM_LATENCY_WAIT_S sets it.
    """
    missing = [path for path in paths if not os.path.exists(path)]  # which takes errors for absence
    if not missing:
        return
    end = time.monotonic() + (default_wait_s() if wait_s is None else wait_s)
    if time.monotonic() < end:
        log.info("waiting for %s to come into sight", missing[0])
    while missing and time.monotonic() < end:
        time.sleep(POLL_S)
        for directory in {path.parent for path in missing}:
            with suppress(OSError):
                os.listdir(directory)  # what was looked for in vain is asked of the server again only after a listing
        missing = [path for path in missing if not os.path.exists(path)]


def default_wait_s() -> float:
    """Seconds to wait for a file of another machine."""
    try:
        return float(os.environ[WAIT])
    except (KeyError, ValueError):
        return SLURM_WAIT_S if "SLURM_JOB_ID" in os.environ else 0.0
