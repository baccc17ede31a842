"""Stand-in for the stage `report`."""

from implicit_llm.runs.stage import StageContext, StageResult


def run(context: StageContext) -> StageResult:
    declared = context.work / "declared"
    figures = ("accuracy-by-length", "accuracy-by-position", "accuracy-by-mode", "training-curves", "solver-health")
    names = ["index.html", "claims.json", "tables/accuracy.csv", "tables/accuracy.tex"]
    names += [f"figures/{figure}.svg" for figure in figures]
    for name in names:
        (declared / name).parent.mkdir(parents=True, exist_ok=True)
        (declared / name).write_text(f"{name}\n")
    return StageResult([declared / name for name in names], {"num_inputs": len(context.inputs)})
