"""The jobs of the small experiment, and how they are finished without running."""

from __future__ import annotations

from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_workflow.planning.plan import Plan

FREE = {
    f"{stage}/implicit-s{seed}/{name}"
    for seed in (0, 1)
    for stage, name in (("train", "free"), ("evaluate", "free/word-problem"))
}
UNROLLED = {"train/implicit-s0/unrolled", "train/implicit-s1/unrolled"}
EXPLICIT = {"train/explicit-s0/explicit", "evaluate/explicit-s0/explicit/word-problem"}
EVALUATIONS = {
    f"evaluate/{run}/word-problem" for run in ("implicit-s0/free", "implicit-s1/free", "explicit-s0/explicit")
}
TEST_SETS = {"data/s3-test-L8-h0.5", "data/s3-test-L16-h0.5"}
ALL = {"data/s3-train", *TEST_SETS, *UNROLLED, *FREE, *EXPLICIT, "report"}


def finish(plan: Plan) -> None:
    """Write the manifest of every job as if it had run."""
    for key, node in plan.nodes.items():
        plan.run_dir(node).mkdir(parents=True, exist_ok=True)
        (plan.run_dir(node) / "manifest.json").write_bytes(Manifest.of(plan.identities[key], (), {}).to_bytes())


def keys(plan: Plan, state: str) -> set[str]:
    return {key for key, status in plan.statuses.items() if status.state == state}
