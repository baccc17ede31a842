"""Runs a tiny stage for test_fault_points.py.

An order is {"run_dir": ..., "identity": ..., "data": ..., "env": {...}}. The argument is an order that is done in the
server itself, with "store", a file in which it finds an initialised MLflow store.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import mlflow  # noqa: F401
from mlflow.store.tracking import sqlalchemy_store

from implicit_llm_contracts.runs.atomic import new_directory, write_atomic
from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_jobs import provenance
from implicit_llm_jobs.stage import StageRequest, run_stage
from tests.fault.forks import exit_code_of, serve
from tests.store_copies import copying

STEPS = 4


def body(context: StageContext) -> StageResult:
    """Counts to 4 with a checkpoint at each step, then makes its artifacts in every way there is."""
    checkpoint = context.work / "checkpoint"
    start = int(checkpoint.read_text()) if checkpoint.exists() else 0
    context.journal.rewind(start)
    for step in range(start + 1, STEPS + 1):
        context.journal.metrics(step, {"loss": 1 / step, "tokens_per_s": time.perf_counter()})
        write_atomic(checkpoint, str(step))
        context.journal.flush_to_disk()
    for _ in range(2):  # the second one replaces the first
        with new_directory(context.work / "model") as directory:
            (directory / "weights").write_text("weights")
            (directory / "config.json").write_text("{}")
    write_atomic(context.work / "declared" / "index.html", "page")
    return StageResult(["checkpoint", "model", "declared"], {"steps": STEPS, "loss": 1 / STEPS})


def run(order: dict[str, Any]) -> None:
    if "WITHOUT_MLFLOW" in os.environ:
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    identity, _ = Identity.read(order["identity"])
    run_stage(StageRequest(Path(order["run_dir"]), identity, {"data": Path(order["data"])}), body)


os.environ.pop("MLFLOW_TRACKING_URI", None)
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # its threads would not live on in the forks
first = json.loads(sys.argv[1])
sqlalchemy_store.SqlAlchemyStore.__init__ = copying(Path(first["store"]))  # type: ignore[method-assign]
provenance.PACKAGES = ("mlflow",)  # looking for all takes longer than the whole stage
exit_code_of(run, first)  # in this process: what SQLAlchemy makes at its first use, the forks inherit
serve(run)
