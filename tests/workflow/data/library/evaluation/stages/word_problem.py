"""Stand-in for the stage `evaluate`: the same accuracy for everything."""

from implicit_llm.runs.stage import StageContext, StageResult


def run(context: StageContext) -> StageResult:
    path = context.work / "metrics.json"
    path.write_text("{}\n")
    modes = {mode["name"]: 0.75 for mode in context.config["modes"]}
    return StageResult([path], {"accuracy_last10": {role: modes for role in context.inputs if role != "model"}})
