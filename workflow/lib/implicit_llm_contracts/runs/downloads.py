"""The folder of downloaded files."""

from __future__ import annotations

import os
from pathlib import Path

# Inside results/, which git ignores too.
DEFAULT_DOWNLOADS = Path("results") / "downloads"


def downloads_folder(given: Path | str | None = None) -> Path:
    """The folder of downloaded files: the option, else $IMPLICIT_LLM_DATA, else results/downloads."""
    return Path(given or os.environ.get("IMPLICIT_LLM_DATA") or DEFAULT_DOWNLOADS)


def local_folder(path: Path, downloads: Path | None = None) -> Path | None:
    """`path` in the downloads folder or, failing that, in the working directory; None if neither is a folder."""
    return next((folder for folder in (downloads_folder(downloads) / path, path) if folder.is_dir()), None)
