"""Stand-in for the stage `report`."""

from implicit_llm.runs.stage import StageContext, StageResult


def run(context: StageContext) -> StageResult:
    page = context.work / "index.html"
    page.write_text("<p>tiny</p>\n")
    (context.run_dir / "index.html").write_text(page.read_text())
    return StageResult([page], {"num_inputs": len(context.inputs)})
