"""Where fetched files lie."""

from __future__ import annotations

import os
from pathlib import Path

# Beside the results, which are not part of a checkout either.
DEFAULT_DOWNLOADS = Path("results") / "downloads"


def downloads_folder(given: Path | str | None = None) -> Path:
    """The folder of fetched files: the option, else $IMPLICIT_LLM_DATA, else results/downloads."""
    return Path(given or os.environ.get("IMPLICIT_LLM_DATA") or DEFAULT_DOWNLOADS)


def local_folder(path: Path, downloads: Path | None = None) -> Path | None:
    """A folder below that of fetched files, or else below the working directory; None where there is none."""
    return next((folder for folder in (downloads_folder(downloads) / path, path) if folder.is_dir()), None)
