"""What a job tells the executor that started it, in the file that the environment names: progress, and why it failed.

    {"progress": 1200, "failure_class": "quota", "message": "cannot write ..."}

Without the variable nothing is written. The file is never needed for correctness.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_contracts.runs.errors import failure_class_of
from implicit_llm_contracts.runs.launched import LaunchFolder

VARIABLE = "SUBMITIT_JOB_STATUS"


def start_attempt() -> None:
    """Forget why an earlier attempt failed; its progress stays."""
    _change(lambda values: {key: value for key, value in values.items() if key == "progress"})


def report_progress(progress: Any) -> None:
    """Say how far the job is, in any JSON that changes when it is further."""
    _change(lambda values: {**values, "progress": progress})


def report_failure(error: BaseException) -> None:
    """Say why the job fails, once. One process of several tells its launcher, which knows how the others ended."""
    folder = LaunchFolder.of_this_process()
    if folder is not None:
        folder.record_end(error)
        return
    failure_class = failure_class_of(error)
    if failure_class is not None:
        told = {"failure_class": failure_class, "message": " ".join(str(error).split())[:500]}
        _change(lambda values: {**told, **values})


def _change(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    if not os.environ.get(VARIABLE):
        return
    path = Path(os.environ[VARIABLE])
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        values = {}
    values = values if isinstance(values, dict) else {}
    changed = change(values)
    if changed != values:
        with suppress(OSError):  # a job that works does not end because nobody hears of it
            write_atomic(path, json.dumps(changed, sort_keys=True) + "\n")
