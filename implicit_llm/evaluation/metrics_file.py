"""The result of an evaluation: metrics.json, the journal's points and the manifest's headline."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs.atomic import write_atomic

METRICS_FILE = "metrics.json"
Record = dict[str, Any]


def write_metrics(work: Path, records: Sequence[Record]) -> Path:
    """Write metrics.json below `work`, equal bytes for equal records."""
    path = work / METRICS_FILE
    write_atomic(path, json.dumps({"records": records}, sort_keys=True, indent=1, allow_nan=False) + "\n")
    return path


def tracked(records: Iterable[Record], keys: Iterable[str], label: Callable[[Record], str]) -> dict[str, float]:
    """Metrics for the journal, one key a (metric, data set, mode); what is missing is left out."""
    keys = tuple(keys)
    return {
        tracked_name(key, label(record), record["mode"]): record[key]
        for record in records
        for key in keys
        if record[key] is not None
    }


def tracked_name(*parts: str) -> str:
    """A name with the few signs that MLflow takes: the mode "blockwise@eval_tol=0.2" is "blockwise.eval_tol-0.2"."""
    return re.sub(r"[^\w.-]", "-", ".".join(parts).replace("@", "."))


def by_data_and_mode(
    records: Iterable[Record], key: str, label: Callable[[Record], str]
) -> dict[str, dict[str, float | None]]:
    """A headline number by data set and mode."""
    found: dict[str, dict[str, float | None]] = {}
    for record in records:
        found.setdefault(label(record), {})[record["mode"]] = record[key]
    return found


def best_of(by_data: Mapping[str, Mapping[str, float | None]], choose: Callable[..., Any]) -> dict[str, float | None]:
    """The best of the modes by data set; `choose` is max or min."""
    return {
        data: choose((value for value in modes.values() if value is not None), default=None)
        for data, modes in by_data.items()
    }
