"""Stand-in for the stage `data`: writes its configuration."""

import json

from implicit_llm_contracts.runs.stage_context import StageContext, StageResult


def run(context: StageContext) -> StageResult:
    path = context.work / "data.json"
    path.write_text(json.dumps(context.config, sort_keys=True))
    return StageResult([path], {"num_samples": context.config["num_samples"]})
