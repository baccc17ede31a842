"""Stand-in for the stage `train`: passes on what it was given."""

import json
import os
import time
from pathlib import Path

from implicit_llm.models.llama3.model import Llama3Layer  # noqa: F401
from implicit_llm.models.stack import solve
from implicit_llm.solver.fixed_point import FixedPointSolver  # noqa: F401
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult


def run(context: StageContext) -> StageResult:
    wait_while_held()
    context.log.info("gradient checkpointing: %s", context.runtime.get("gradient_checkpointing", False))
    path = context.work / "model.json"
    before = context.inputs["start"].manifest.fingerprint if "start" in context.inputs else ""
    path.write_text(json.dumps({"config": context.config, "before": before, "solved": solve(0.5)}, sort_keys=True))
    return StageResult([path], {"loss": 0.5})


def wait_while_held() -> None:
    """Stay here while the file named in TINY_HOLD exists, for a test that kills the driver meanwhile."""
    hold = os.environ.get("TINY_HOLD", "")
    while os.path.isfile(hold):
        Path(hold).with_suffix(".reached").touch()
        time.sleep(0.05)
