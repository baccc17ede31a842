"""Where fetched files lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFAULT = "results/downloads"


def downloads_folder(runtime: Mapping[str, Any]) -> Path:
    """The folder of fetched files: the option `downloads`, else $IMPLICIT_LLM_DATA, else `results/downloads`."""
    return Path(runtime.get("downloads") or os.environ.get("IMPLICIT_LLM_DATA") or DEFAULT)


def local_folder(path: Path, downloads: Path) -> Path | None:
    """A folder below that of fetched files, or else below the working directory; None where there is none."""
    return next((folder for folder in (downloads / path, path) if folder.is_dir()), None)
