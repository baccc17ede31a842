"""How long a curriculum stays in its bounded phase."""

from __future__ import annotations

from collections.abc import Sequence

from implicit_llm.report.perplexity_results import Comparison, Line
from implicit_llm.report.training_runs import TrainingRun


def share_bounded(line: Line, training: Sequence[TrainingRun]) -> float | None:
    """The share of a branch's steps before its last phase began; None where the phase starts from none."""
    for run in training:
        for phase in run.phases:
            is_its = (run.run, phase.name) == (line.variant.run, line.variant.phase)
            if is_its and run.before(phase) is not None and phase.end_step:
                return phase.start_step / phase.end_step
    return None


def branches_of(comparison: Comparison, run: str, training: Sequence[TrainingRun]) -> dict[float, Line]:
    """The lines of a run's free phases by their share, the smallest first."""
    mine = [line for line in comparison.headlines if line.variant.run == run and line.variant.is_implicit]
    shares = {share: line for line in mine if (share := share_bounded(line, training)) is not None}
    return {share: shares[share] for share in sorted(shares)}
