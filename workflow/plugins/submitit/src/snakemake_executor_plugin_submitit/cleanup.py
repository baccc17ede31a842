"""Deleting the logs of jobs that ended well, and all that is old."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from snakemake_executor_plugin_submitit import record
from snakemake_executor_plugin_submitit.job_files import JobFiles, read_json

DAY_S = 86400


def clean(folder: Path, is_success_deleted: bool, days: int, dry_run: bool = False) -> list[Path]:
    """Delete what nobody needs any more; 0 `days`: nothing is old. Returns: what was deleted, folders as a whole.

    A job that may still run keeps everything. A job that ended well loses its output and submitit's files, and keeps
    its record and its figures.
    """
    oldest = time.time() - days * DAY_S if days else 0.0
    found: list[Path] = []
    used: set[Path] = set()
    for path in sorted((folder / "jobs").glob("*/")):
        files = JobFiles(path)
        known = record.load(files)
        if known is not None and known.is_open:
            used.add(Path(known.folder))
        elif max(files.last_change(), known.submitted_unix_s if known else path.stat().st_mtime) < oldest:
            found.append(path)
        elif is_success_deleted and known and read_json(files.outcome(known.number)).get("failure_class", "") is None:
            found += [files.submission(number) for number in range(1, known.number + 1)]
            found += [files.output_log, files.kept_logs, files.status]
        elif known is not None:
            used.add(Path(known.folder))
    found += [array for array in (folder / "arrays").glob("*/") if array not in used and _is_settled(array)]
    found = [path for path in found if path.exists()]
    for path in found:
        if not dry_run:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def _is_settled(array: Path) -> bool:
    """Whether the folder is not one that a driver is about to submit from: its records follow within seconds."""
    return time.time() - array.stat().st_mtime > 60
