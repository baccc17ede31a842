"""Stand-in for the stage `checkpoint`: what it was asked for."""

import json

from implicit_llm_contracts.runs.stage_context import StageContext, StageResult


def run(context: StageContext) -> StageResult:
    path = context.work / "model.json"
    path.write_text(json.dumps(context.config, sort_keys=True))
    return StageResult([path], {"source": context.config})
