"""Makes data sets for test_fault_points.py.

An order is {"run_dir": ..., "identity": ..., "inputs": {role: run directory}, "downloads": ..., "env": {...}}.
"""

import sys
from pathlib import Path
from typing import Any

sys.modules["mlflow"] = None  # type: ignore[assignment]  # the tracker has tests of its own

from implicit_llm_contracts.runs.identity import Identity  # noqa: E402
from implicit_llm_data.stages import token_shard, token_stream, tokenizer, word_problem  # noqa: E402
from implicit_llm_jobs import provenance  # noqa: E402
from implicit_llm_jobs.stage import StageRequest, run_stage  # noqa: E402
from tests.fault.forks import serve  # noqa: E402

STAGES = {
    "word_problem": word_problem,
    "tokenizer": tokenizer,
    "token_shard": token_shard,
    "token_stream": token_stream,
}


def run(order: dict[str, Any]) -> None:
    identity, _ = Identity.read(order["identity"])
    inputs = {role: Path(path) for role, path in order["inputs"].items()}
    runtime = {"downloads": order["downloads"]}
    run_stage(StageRequest(Path(order["run_dir"]), identity, inputs, runtime), STAGES[identity.config["kind"]].run)


if __name__ == "__main__":
    token_shard.BATCH_BYTES = 500  # several batches in the small corpus
    provenance.PACKAGES = ("numpy",)  # looking for all takes longer than the whole stage
    serve(run)
