"""Stand-in for the stage `data` of every kind: writes its configuration and the roles of its inputs."""

import json

from implicit_llm_contracts.runs.stage_context import StageContext, StageResult


def run(context: StageContext) -> StageResult:
    path = context.work / "data.json"
    path.write_text(json.dumps({**context.config, "inputs": sorted(context.inputs)}, sort_keys=True))
    return StageResult([path], {"num_inputs": len(context.inputs)})
