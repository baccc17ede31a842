"""Stand-in for the stage `evaluate` of every kind: one accuracy for all; it fails for what TINY_FAIL names."""

import os

from implicit_llm_contracts.runs.stage_context import StageContext, StageResult


def run(context: StageContext) -> StageResult:
    if os.environ.get("TINY_FAIL") == context.name:
        raise RuntimeError("made to fail")
    path = context.work / "metrics.json"
    path.write_text("{}\n")
    modes = {mode["name"]: 0.75 for mode in context.config["modes"] or [{"name": "parallel"}]}
    return StageResult([path], {"accuracy_last10": {role: modes for role in context.inputs if role != "model"}})
