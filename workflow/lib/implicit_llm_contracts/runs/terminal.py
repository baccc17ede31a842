"""Whether a person watches: then long work shows a bar, and lines in the log otherwise."""

from __future__ import annotations

import os
import sys


def wants_bar(progress: str = "auto") -> bool:
    """Whether the runtime's `progress` means a bar here: on a terminal, and not among Snakemake's own lines."""
    if progress != "auto":
        return progress == "bar"
    return sys.stderr.isatty() and not any(key.startswith("SNAKEMAKE") for key in os.environ)
