"""Which of several language models of equal size and tokens speaks: the one of the lowest training loss at the end.

There is no validation text. The loss on the training text is another number than the one judged, so a choice by it is
fair; where it is not known for all of them, the choice falls on the number judged, and `words` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from implicit_llm.report.loss_curves import end_loss
from implicit_llm.report.perplexity_results import Line
from implicit_llm.report.training_runs import TrainingRun


@dataclass(frozen=True)
class LineChoice:
    """A line that speaks for its rivals; `words` says how it was chosen, empty where it is the only one."""

    line: Line
    words: str = ""


def choose_line(rivals: Sequence[Line], length: float, training: Sequence[TrainingRun]) -> LineChoice:
    """The line that speaks for `rivals`, at least one; `length` is that of the test rows, in tokens."""
    if len(rivals) == 1:
        return LineChoice(rivals[0])
    losses = [end_loss_of(line.variant.run, line.first.phase, training) for line in rivals]
    known = [loss for loss in losses if loss is not None]
    if len(known) == len(rivals):
        chosen = rivals[known.index(min(known))]
        return LineChoice(chosen, f" [chosen of {len(rivals)} by training loss at the end]")
    best = min(rivals, key=lambda line: _own_score(line, length))
    words = f" [of {len(rivals)} the one of lowest perplexity on this very text: no training losses choose among them]"
    return LineChoice(best, words)


def length_tested(line: Line, length_factor: float) -> float:
    """The length of the test rows that a claim is about, in tokens."""
    return (line.first.train_length or 0) * length_factor


def end_loss_of(run: str, phase: str | None, training: Sequence[TrainingRun]) -> float | None:
    """Training loss at the end of a phase, mean over the seeds; None when one of them has none."""
    mine = (trained for trained in training if trained.run == run)
    losses = [end_loss(one) for trained in mine for one in trained.phases if one.name == phase]
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known and len(known) == len(losses) else None


def _own_score(line: Line, length: float) -> float:
    cell = line.at(length)
    mean = None if cell is None else cell.spread("perplexity").mean
    return float("inf") if mean is None else mean
