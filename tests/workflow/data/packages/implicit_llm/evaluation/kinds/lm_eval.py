"""Stand-in for the stage `evaluate` of kind `lm_eval`: no numbers."""

from implicit_llm_contracts.runs.stage_context import StageContext, StageResult


def run(context: StageContext) -> StageResult:
    path = context.work / "metrics.json"
    path.write_text('{"records": []}\n')
    return StageResult([path], {})
