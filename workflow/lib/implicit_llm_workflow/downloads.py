"""Where fetched files lie."""

from __future__ import annotations

import os
from pathlib import Path

# Beside the results, which are not part of a checkout either.
DEFAULT_DOWNLOADS = Path("results") / "downloads"


def downloads_folder(given: Path | None) -> Path:
    """As the jobs choose it: the option, else $IMPLICIT_LLM_DATA, else results/downloads."""
    return given or Path(os.environ.get("IMPLICIT_LLM_DATA") or DEFAULT_DOWNLOADS)


def local_folder(path: Path) -> Path | None:
    """A folder below the downloads, or else below the working directory, as the jobs look for it; None for none."""
    return next((folder for folder in (downloads_folder(None) / path, path) if folder.is_dir()), None)
