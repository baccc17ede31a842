"""Stand-in for the stage `report`: every figure and table that any experiment has."""

from implicit_llm_contracts.runs.stage_context import StageContext, StageResult

FIGURES = (
    "accuracy-by-length",
    "accuracy-by-position",
    "accuracy-by-mode",
    "accuracy-by-hard-fraction",
    "perplexity-by-length",
    "perplexity-by-position",
    "perplexity-by-parameters",
    "curriculum",
    "downstream-by-iterations",
    "loss-by-tokens",
    "loss-by-flops",
    "accuracy-by-babi-task",
    "minimum-layers",
    "test-time-iterations",
    "test-time-tolerance",
    "convergence-by-iteration",
    "jacobian",
    "training-curves",
    "solver-health",
    "spectral-radius",
)
TABLES = (
    "accuracy",
    "perplexity",
    "babi",
    "minimum-layers",
    "test-time",
    "duality",
    "jacobian",
    "downstream",
    "peers",
    "published",
)


def run(context: StageContext) -> StageResult:
    declared = context.work / "declared"
    names = ["index.html", "claims.json", "numbers.tex", "lineage.svg"]
    names += [f"tables/{table}.{form}" for table in TABLES for form in ("csv", "tex")]
    names += [f"figures/{figure}.svg" for figure in FIGURES]
    for name in names:
        (declared / name).parent.mkdir(parents=True, exist_ok=True)
        (declared / name).write_text(f"{name}\n")
    summary = {"num_inputs": len(context.inputs), "holes": context.config.get("holes")}
    return StageResult([declared / name for name in names], summary)
