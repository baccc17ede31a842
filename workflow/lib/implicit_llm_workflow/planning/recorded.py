"""What runs left behind in their directories, as the driver finds and reads it: above all their manifests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
METRICS = "metrics.json"
PROVENANCE, MLFLOW = "provenance.json", "mlflow.json"
WORK, DECLARED = "work", "declared"
FINGERPRINT_DIGITS = 16


@dataclass(frozen=True)
class Recorded:
    """The manifest of a finished run."""

    fingerprint: str
    config: Mapping[str, Any]
    code: str
    upstream: Mapping[str, str]
    summary: Mapping[str, Any]
    files: tuple[str, ...] = ()  # below the run directory


class Damaged(Exception):
    """A manifest is there but cannot be read; the run is done again (and finds its own copy, if that is whole)."""


def work_dir(run_dir: Path, fingerprint: str) -> Path:
    """Where a run keeps everything of the result with this fingerprint."""
    return run_dir / WORK / fingerprint[:FINGERPRINT_DIGITS]


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none that can be read."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def read_recorded(run_dir: Path) -> Recorded | None:
    """The record of a run directory, None when there is none. Raises: Damaged."""
    path = run_dir / MANIFEST
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read") from error
    try:
        identity = values["identity"]
        return Recorded(
            fingerprint=values["fingerprint"],
            config=identity["config"],
            code=identity["code"],
            upstream=identity["upstream"],
            summary=values["summary"],
            files=tuple(file["path"] for file in values.get("files", [])),
        )
    except (KeyError, TypeError) as error:
        raise Damaged(f"{path} is not a manifest") from error


def read_metrics(run_dir: Path, recorded: Recorded) -> list[Mapping[str, Any]]:
    """The records of an evaluation's metrics.json; none when the file has been lost since."""
    path = next((path for path in recorded.files if path.rpartition("/")[2] == METRICS), None)
    if path is None:
        return []
    try:
        records = json.loads((run_dir / path).read_bytes())["records"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [record for record in records if isinstance(record, Mapping)]
