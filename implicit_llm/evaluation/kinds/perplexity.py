"""Perplexity: one language model on test sets at several lengths, in every mode.

The test text is cut into rows in which every token is predicted once.

    stream      t0 t1 t2 t3 t4 t5 t6 t7 t8 t9          rows of 4
    inputs      t0 t1 t2 t3 | t4 t5 t6 t7 | t8
    targets     t1 t2 t3 t4 | t5 t6 t7 t8 | t9

A row reads its tokens from an empty state and predicts after each of them the next one, the first token of the row that
follows included. So every token of the stream but the first is a target exactly once at every length, and perplexities
at several lengths are over the same tokens: only what is known of the text before them differs. The last row is as
short as it comes out.

Documents stand in the stream one after another, each with end-of-text behind it. Nothing is reset between them, as in
training. End-of-text is a target like any other token. So is the first token of a document, whose row has only other
documents before it; `is_document_start` marks these targets.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial as bind
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from implicit_llm.evaluation import answers as reading
from implicit_llm.evaluation.answers import Evaluation, EvaluationJob, answers, token_losses
from implicit_llm.evaluation.inputs import about_model, data_inputs, load_model, model_input, reads_of_inputs
from implicit_llm.evaluation.metrics_file import Record, best_of, by_data_and_mode, tracked, write_metrics
from implicit_llm.evaluation.modes import ModeRunner, PartialResults
from implicit_llm.evaluation.tallies import LossTally, PositionTally, SolverTally
from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm_contracts.config.evaluation import PerplexityConfig, modes_of
from implicit_llm_contracts.config.solver import solver_of
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.stage_context import Input, StageContext, StageResult
from implicit_llm_data.shard_format import IGNORED_LABEL
from implicit_llm_data.shards import open_dataset
from implicit_llm_jobs.progress import Progress

__all__ = ["reads_of_inputs", "run"]

log = logging.getLogger(__name__)

BATCH_TOKENS = 32768  # the default batch; another library's model makes 6.6 GB of fp32 logits of it for 50,000 words
TRACKED = ("loss", "perplexity", "perplexity_within_documents", "f_evaluations_per_token", "unconverged_share")


def run(context: StageContext) -> StageResult:
    """Body of `implicit-llm evaluate`: writes metrics.json. Raises: UserError."""
    config = fill(PerplexityConfig, context.config, f"evaluate/{context.name}")
    modes = modes_of(config.modes, config.sweep, f"evaluate/{context.name}")
    trained, test_sets = model_input(context), data_inputs(context)
    model = load_model(trained, context.runtime)
    partial, options = PartialResults(context.work / "partial"), {"precision": config.precision}
    runner = ModeRunner(model, modes, partial, context.runtime, options)
    about = about_model(model, trained)
    records: list[Record] = []
    for role, source in test_sets.items():
        for length in sorted(config.lengths):
            results = _results(runner, role, source, length, config)
            described = {"kind": config.kind, "data": role, "length": length, **about}
            records += [described | {"mode": name} | result.values for name, result in results.items()]
            context.journal.metrics(len(records), tracked(records, TRACKED, _label))
    metrics = write_metrics(context.work, records)
    partial.discard()
    perplexity = by_data_and_mode(records, "perplexity", _label)
    return StageResult([metrics], {"perplexity": perplexity, "best_perplexity": best_of(perplexity, min)})


def _results(
    runner: ModeRunner, role: str, source: Input, length: int, config: PerplexityConfig
) -> Mapping[str, Evaluation]:
    """The result at one length in each mode; without numbers when no row of the test set is so long."""
    rows = TextRows(source.work, length)
    if rows.num_full_rows == 0:
        log.warning(
            "%s: has no row of %d tokens and a next one; perplexity at this length is missing: make the test split "
            "larger, or take the length out of `lengths`",
            role,
            length,
        )
        solver = solver_of(runner.model)
        return {mode.name: Evaluation(mode.record(solver) | no_perplexity().values) for mode in runner.modes}
    max_rows = None if config.max_tokens is None else max(1, config.max_tokens // length)
    return runner.results(
        f"{role}-L{length}",
        rows,
        evaluate_perplexity,
        default_batch_size=max(1, BATCH_TOKENS // length),
        max_samples=max_rows,
    )


def _label(record: Record) -> str:
    return f"{record['data']}.L{record['length']}"


LOSSES = ("loss", "perplexity", "loss_within_documents", "perplexity_within_documents", "loss_by_position")
# What is not known of a stream that does not say which token ends a document.
OF_DOCUMENTS = ("loss_within_documents", "perplexity_within_documents", "num_document_starts")


class PerplexityTally:
    """Losses of all targets, of those that do not start a document, and by position."""

    def __init__(self, length: int, *, knows_documents: bool) -> None:
        self.knows_documents = knows_documents
        self.all, self.within_documents = LossTally(), LossTally()
        self.by_position = PositionTally(length)
        self.num_document_starts = self.num_nonfinite_rows = 0

    def add(self, losses_BL: np.ndarray, labels_BL: np.ndarray, is_document_start_BL: np.ndarray) -> None:
        counted_BL = labels_BL != IGNORED_LABEL
        starts_BL = counted_BL & is_document_start_BL
        self.num_nonfinite_rows += int((~np.isfinite(losses_BL).all(axis=1)).sum())
        self.num_document_starts += int(starts_BL.sum())
        self.all.add(float(losses_BL.sum()), int(counted_BL.sum()))
        within = float(losses_BL[~starts_BL].sum())
        self.within_documents.add(within, int(counted_BL.sum()) - int(starts_BL.sum()))
        self.by_position.add(losses_BL, counted_BL)

    def values(self) -> dict[str, Any]:
        """The record's losses, without one where a token has none."""
        known = {
            "loss": self.all.loss,
            "perplexity": self.all.perplexity,
            "loss_within_documents": self.within_documents.loss,
            "perplexity_within_documents": self.within_documents.perplexity,
            "loss_by_position": self.by_position.values(),
        }
        counts = {"num_tokens": self.all.num_tokens, "num_document_starts": self.num_document_starts}
        values = (known if self.num_nonfinite_rows == 0 else dict.fromkeys(LOSSES)) | counts
        return values if self.knows_documents else values | dict.fromkeys(OF_DOCUMENTS)


def evaluate_perplexity(job: EvaluationJob) -> Evaluation:
    """Loss and perplexity over the targets of the rows (columns input_ids, labels, is_document_start).

    Raises: EvaluationOutOfMemory.
    """
    knows_documents = getattr(job.dataset, "end_of_text", None) is not None
    tally, solver = PerplexityTally(job.dataset.length, knows_documents=knows_documents), SolverTally()
    progress = Progress(job.where, job.num_samples)
    job, read = _in_pieces(job)
    for start, batch, answer in answers(job, read):
        labels_BL = np.asarray(batch["labels"])
        losses_BL, stats = answer if answer is not None else (np.full(labels_BL.shape, math.nan), None)
        tally.add(losses_BL, labels_BL, np.asarray(batch["is_document_start"]))
        if answer is not None:
            solver.add(stats, labels_BL.shape)
        progress.tell(start + len(labels_BL), lambda: _words(tally, solver))
    if tally.num_nonfinite_rows:
        counts = (tally.num_nonfinite_rows, job.num_samples)
        log.warning("%s: %d of %d sequences have a non-finite loss: no perplexity is reported", job.where, *counts)
    share = tally.num_nonfinite_rows / job.num_samples if job.num_samples else None
    return Evaluation(tally.values() | {"nonfinite_share": share} | solver.values(job.is_implicit))


def no_perplexity() -> Evaluation:
    """What is recorded of a length that no row of the test set reaches."""
    values: dict[str, Any] = dict.fromkeys(LOSSES) | {"num_tokens": 0, "num_document_starts": 0}
    return Evaluation(values | {"nonfinite_share": None} | SolverTally().values(is_implicit=False))


def _in_pieces(job: EvaluationJob) -> tuple[EvaluationJob, Any]:
    """A job and its reader that never hold the logits of a whole batch, where the model's parts are known here.

    Logits of 16,384 tokens of a vocabulary of 50,000 take 3.3 GB in fp32. Other models make them by themselves.
    """
    if isinstance(job.model, ImplicitForCausalLM):
        return replace(job, model=job.model.base), bind(_read, head=job.model.lm_head)
    return job, bind(_read, head=None)


def _read(out: Any, batch: dict[str, np.ndarray], head: nn.Module | None) -> tuple[np.ndarray, Any]:
    """The loss of every target in fp64, shape (B, L), and the solver's statistics."""
    labels_BL = np.asarray(batch["labels"])
    if head is None:
        losses_BL = token_losses(out.logits, labels_BL)
    else:
        losses_BL = _losses_of_states(out.last_hidden_state, labels_BL, head)
    return losses_BL.double().cpu().numpy(), getattr(out, "solver_stats", None)


def _losses_of_states(hidden_BLD: Tensor, labels_BL: np.ndarray, head: nn.Module) -> Tensor:
    step = max(1, reading.LOSS_TOKENS // len(labels_BL))
    parts = [slice(start, start + step) for start in range(0, labels_BL.shape[1], step)]
    return torch.cat([token_losses(head(hidden_BLD[:, part]), labels_BL[:, part]) for part in parts], dim=1)


def _words(tally: PerplexityTally, solver: SolverTally) -> str:
    loss = tally.all.loss
    shown = "loss not finite" if loss is None else f"loss {loss:.4f}"
    return f"{shown}, {solver.f_evaluations_per_token or 0:.1f} f-evaluations per token"


class TextRows:
    """The rows of `length` tokens of the stream in `directory`; the short one at the end, if there is one, is the last.

    end_of_text: its token, None when the stream does not say.
    """

    def __init__(self, directory: Path, length: int) -> None:
        self._tokens = open_dataset(directory, length=1)  # any token by its number, over the borders of files
        self.length = length
        self.vocab_size = self._tokens.vocab_size
        self.end_of_text: int | None = self._tokens.source.get("end_of_text")

    @property
    def num_targets(self) -> int:
        return max(0, len(self._tokens) - 1)

    @property
    def num_full_rows(self) -> int:
        return self.num_targets // self.length

    def __len__(self) -> int:
        return -(-self.num_targets // self.length)

    def fetch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """input_ids, labels (the next tokens) and is_document_start, each (B, length).

        `indices` are consecutive. A short row is given by itself: of rows that end with it only those before it are
        given, and it comes when it is asked for first.
        Raises: IndexError outside 0..len-1.
        """
        first, last = int(indices[0]), int(indices[-1])
        if first < self.num_full_rows:
            last = min(last, self.num_full_rows - 1)
        start, end = first * self.length, min((last + 1) * self.length, self.num_targets)
        tokens = self._tokens.fetch(np.arange(start, end + 1))["input_ids"][:, 0]
        input_ids = tokens[:-1].reshape(last - first + 1, -1)
        is_start = np.zeros_like(input_ids, dtype=bool) if self.end_of_text is None else input_ids == self.end_of_text
        return {
            "input_ids": input_ids,
            "labels": tokens[1:].reshape(input_ids.shape),
            "is_document_start": is_start,
        }
