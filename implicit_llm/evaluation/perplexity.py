"""Perplexity of one model on rows of one length, in one mode."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial as bind
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from implicit_llm.evaluation import answers as reading
from implicit_llm.evaluation.answers import Evaluation, EvaluationJob, answers, token_losses
from implicit_llm.evaluation.loss_tally import LossTally, PositionTally
from implicit_llm.evaluation.solver_tally import SolverTally
from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm_data.shard_format import IGNORED_LABEL
from implicit_llm_jobs.progress import Progress

log = logging.getLogger(__name__)

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
