"""Compute the perplexity of one language model on test sets at several lengths, in every mode.

The test text is cut into sequences so that the model predicts every token except the first once.

    stream      t0 t1 t2 t3 t4 t5 t6 t7 t8 t9          sequences of 4
    inputs      t0 t1 t2 t3 | t4 t5 t6 t7 | t8
    targets     t1 t2 t3 t4 | t5 t6 t7 t8 | t9

In each sequence, the model starts from an empty state and predicts the next token after every token, including the
last one. Every token of the stream except the first is therefore a target exactly once at every length. Without a limit
(`max_tokens`), perplexities at several lengths are over the same tokens, and only the context before them differs. The
last sequence may be shorter.

The stream contains the documents one after another, each followed by end-of-text. As in training, nothing is reset
between them. End-of-text is a target like any other token. The first token of a document is a target too, although its
sequence has only other documents before it; `is_document_start` marks these targets.
"""

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from implicit_llm.evaluation.answers import (
    Batch,
    EvaluationJob,
    EvaluationResult,
    LossTally,
    PositionTally,
    Tally,
    tallied,
    token_losses,
)
from implicit_llm.evaluation.frame import ModelEvaluation, data_inputs, rows_of
from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm_contracts.config.evaluation import COSTS, PerplexityConfig
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.shards import IGNORED_LABEL, open_dataset

log = logging.getLogger(__name__)

BATCH_TOKENS = 32768  # a model that returns all logits needs 6.6 GB for them (fp32, vocabulary of 50,000)


def run(context: StageContext) -> StageResult:
    """Run an evaluation job: write metrics.json. Raises: UserError."""
    config = context.settings(PerplexityConfig)
    test_sets = data_inputs(context)
    evaluation = ModelEvaluation(
        context,
        config,
        tracked=("loss", "perplexity", "perplexity_within_documents", *COSTS),
        place=lambda record: (f"{record['data']}.L{record['length']}", record["mode"]),
    )
    for role, source in test_sets.items():
        for length in sorted(config.lengths or (open_dataset(source.work).length,)):
            rows, size, limit = TextRows(source.work, length), rows_of(BATCH_TOKENS, length), config.max_tokens
            if rows.num_full_rows == 0:
                log.warning(
                    "%s: has no row of %d tokens and a next one; perplexity at this length is missing: make the test "
                    "split larger, or take the length out of `lengths`",
                    role,
                    length,
                )
            max_rows = rows_of(limit, length) if rows.num_full_rows else 0
            results = evaluation.in_each_mode(
                f"{role}-L{length}", rows, evaluate_perplexity, batch_size=size, max_samples=max_rows
            )
            evaluation.add({"data": role, "length": length}, results)
    return evaluation.finish(evaluation.headline("perplexity", min))


# These values are None for a stream that does not define which token ends a document.
OF_DOCUMENTS = ("loss_within_documents", "perplexity_within_documents", "num_document_starts")


class PerplexityTally(Tally):
    """A tally of losses: over all targets, over the targets that do not start a document, and by position."""

    measures = ("loss", "perplexity", "loss_within_documents", "perplexity_within_documents", "loss_by_position")

    def __init__(self, length: int, *, knows_documents: bool) -> None:
        self.knows_documents = knows_documents
        self.all, self.within_documents = LossTally(), LossTally()
        self.by_position = PositionTally(length)

    def add(self, losses_BL: np.ndarray | None, batch: Batch) -> int:
        labels_BL = batch["labels"]
        if losses_BL is None:
            losses_BL = np.full(labels_BL.shape, math.nan)
        counted_BL = labels_BL != IGNORED_LABEL
        is_start_BL = counted_BL & batch["is_document_start"]
        num_tokens = int(counted_BL.sum())
        self.all.add(float(losses_BL.sum()), num_tokens)
        self.within_documents.add(float(losses_BL[~is_start_BL].sum()), num_tokens - int(is_start_BL.sum()))
        self.by_position.add(losses_BL, counted_BL)
        return int((~np.isfinite(losses_BL).all(axis=1)).sum())

    def values(self) -> dict[str, Any]:
        values = {
            "loss": self.all.loss,
            "perplexity": self.all.perplexity,
            "loss_within_documents": self.within_documents.loss,
            "perplexity_within_documents": self.within_documents.perplexity,
            "loss_by_position": self.by_position.values() if self.all.num_tokens else None,
            "num_tokens": self.all.num_tokens,
            "num_document_starts": self.all.num_tokens - self.within_documents.num_tokens,
        }
        return values if self.knows_documents else values | dict.fromkeys(OF_DOCUMENTS)

    def shown(self) -> str:
        return f"loss {self.all.loss or math.nan:.4f}"


def evaluate_perplexity(job: EvaluationJob) -> EvaluationResult:
    """Compute loss and perplexity over the targets of the sequences (columns input_ids, labels, is_document_start).

    Raises: EvaluationOutOfMemory, UnknownToken.
    """
    knows_documents = getattr(job.dataset, "end_of_text", None) is not None
    tally = PerplexityTally(job.dataset.length, knows_documents=knows_documents)
    # If the model's parts are known, the logits of a whole batch are never stored: for BATCH_TOKENS and a vocabulary
    # of 50,000 they need 6.6 GB in fp32. Other models return the logits of the whole batch.
    if isinstance(job.model, ImplicitForCausalLM):
        return EvaluationResult(tallied(job, tally, partial(_read, head=job.model.lm_head), job.model.base))
    return EvaluationResult(tallied(job, tally, _read))


def _read(out: Any, batch: Batch, head: nn.Module | None = None) -> np.ndarray:
    """Return the loss of every target, computed in fp32 and returned as fp64, shape (B, L)."""
    states_BLD = out.logits if head is None else out.last_hidden_state
    return token_losses(states_BLD, batch["labels"], head).double().cpu().numpy()


class TextRows:
    """The sequences of `length` tokens of the stream in `directory`; the last one may be shorter.

    end_of_text: the token that ends a document, or None if the stream does not define it.
    """

    def __init__(self, directory: Path, length: int) -> None:
        self._tokens = open_dataset(directory, length=1)  # any token by its number, across the borders of files
        self.length = length
        self.vocab_size = self._tokens.vocab_size
        self.end_of_text: int | None = self._tokens.source.get("end_of_text")
        self.num_targets = max(0, len(self._tokens) - 1)
        self.num_full_rows = self.num_targets // length

    def __len__(self) -> int:
        return -(-self.num_targets // self.length)

    def fetch(self, indices: np.ndarray) -> Batch:
        """Return input_ids, labels (the next tokens) and is_document_start, each (B, length).

        `indices` are consecutive and in 0..len-1, which is not checked. If the last sequence is shorter and `indices`
        contain other sequences too, the result omits the last one.
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
