"""Stand-in for the stage `report`: every figure and table that any experiment has."""

from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_report.registry import registry


def run(context: StageContext) -> StageResult:
    declared = context.work / "declared"
    names = ["index.html", "numbers.html", "claims.json", "numbers.tex"]
    names += [f"tables/{table}.{form}" for table in registry().tables for form in ("csv", "tex")]
    names += [f"figures/{figure}.{form}" for figure in registry().figures for form in ("svg", "rst")]
    for name in names:
        (declared / name).parent.mkdir(parents=True, exist_ok=True)
        (declared / name).write_text(f"{name}\n")
    for figure, entry in registry().figures.items():
        (declared / f"figures/{figure}.rst").write_text(entry.caption)
    summary = {"num_inputs": len(context.inputs), "missing": context.config.get("missing")}
    return StageResult([declared / name for name in names], summary)
