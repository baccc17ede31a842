"""Stand-in for the stage `evaluate` of kind `perplexity`: the same for everything."""

import json

from implicit_llm_contracts.runs.stage_context import StageContext, StageResult


def run(context: StageContext) -> StageResult:
    lengths = context.config["lengths"]
    records = [
        {"mode": mode["name"], "length": n, "perplexity": 8.0} for mode in context.config["modes"] for n in lengths
    ]
    path = context.work / "metrics.json"
    path.write_text(json.dumps({"records": records}))
    return StageResult([path], {})
