"""Small JSON files of a run directory that the driver reads as far as they can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METRICS, MLFLOW = "metrics.json", "mlflow.json"


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none that can be read."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
