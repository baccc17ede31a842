"""Small JSON files of a run directory that the driver reads as far as they can be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs.manifest import Manifest

METRICS, MLFLOW = "metrics.json", "mlflow.json"


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none that can be read."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def read_metrics(run_dir: Path, recorded: Manifest) -> list[Mapping[str, Any]]:
    """The records of an evaluation's metrics.json; none when the file has been lost since."""
    path = next((file.path for file in recorded.files if file.path.rpartition("/")[2] == METRICS), None)
    if path is None:
        return []
    try:
        records = json.loads((run_dir / path).read_bytes())["records"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [record for record in records if isinstance(record, Mapping)]
