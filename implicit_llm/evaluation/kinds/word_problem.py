"""Compute the accuracy of one trained model on all given word-problem test sets, in every mode.

The chance level at a position is the share of the most frequent target there, which a model without state reaches. A
token's group part is uniform over the whole group with probability h (`hard_fraction`) and the identity otherwise.
After t tokens the group part of the product is therefore the identity with probability
(1 - h)^t + (1 - (1 - h)^t) / |G|, which is well above 1 / |G| for a short sequence or a small h.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicit_llm.evaluation.answers import Batch, EvaluationJob, EvaluationResult, Tally, tallied
from implicit_llm.evaluation.frame import (
    EvaluateInputError,
    ModelEvaluation,
    data_inputs,
    rows_of,
)
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.stack import Prefix
from implicit_llm.solver.stats import Block, SolverStats, gather_blocks
from implicit_llm_contracts.config.evaluation import COSTS, SEQUENTIAL, EvaluateConfig, missing_length
from implicit_llm_contracts.config.solver import AS_TRAINED, solver_of
from implicit_llm_contracts.config.tasks import LAST_TOKENS
from implicit_llm_contracts.runs.atomic import write_atomic
from implicit_llm_contracts.runs.stage_context import MODEL_ROLE, Input, StageContext, StageResult
from implicit_llm_data.groups import load_group, load_monoid
from implicit_llm_data.shards import open_dataset

log = logging.getLogger(__name__)

# The tokens of a batch. A model of the published size needs 15 KiB per token, mostly for its injection, whatever its
# block length is. A batch thus needs 1 GiB on a CPU, where the system may kill a process that uses too much memory. On
# a GPU it needs 15 GiB; if this is too much, smaller batches are evaluated.
BATCH_TOKENS, BATCH_TOKENS_ON_DEVICE = 2**16, 2**20
MAX_BATCH_SIZE = 4096
PIECE = 2**11  # `_answers` splits a longer sequence into pieces of this many tokens
SAVE_EVERY_S = 60.0
TASK_FIELDS = ("group", "monoid", "length", "hard_fraction")


def run(context: StageContext) -> StageResult:
    """Run an evaluation job: write metrics.json. Raises: UserError."""
    config = context.settings(EvaluateConfig)
    test_sets = _test_sets(context, config.lengths)
    evaluation = ModelEvaluation(context, config, tracked=("accuracy_last10", *COSTS))
    learned_from = context.given(MODEL_ROLE).manifest.summary.get("data") or {}
    for role, source in test_sets:
        dataset = open_dataset(source.work)
        size = default_batch_size(dataset.length, evaluation.model.device.type)
        results = evaluation.in_each_mode(role, dataset, evaluate_word_problem, batch_size=size)
        # Compare every mode, token by token, with the sequential one of the same swept value.
        references = {mode.swept: mode.name for mode in reversed(evaluation.modes) if mode.eval_mode == SEQUENTIAL}
        for mode in evaluation.modes:
            reference = results.get(references.get(mode.swept, ""))
            results[mode.name].values["token_match_sequential"] = match(results[mode.name], reference)
        described = {"data": role, "train_hard_fraction": learned_from.get("hard_fraction")}
        evaluation.add(described | task_record(source.manifest.config), results)
    return evaluation.finish(evaluation.headline("accuracy_last10", max))


def _test_sets(context: StageContext, lengths: tuple[int, ...] | None) -> list[tuple[str, Input]]:
    """Return the test sets of these lengths, or all for None, with their roles, the shortest sequences first.

    Raises: EvaluateInputError for a length that no test set has.
    """
    by_length = sorted(
        (source.manifest.config["length"], role, source) for role, source in data_inputs(context).items()
    )
    present = sorted({length for length, *_ in by_length})
    if error := missing_length(lengths or (), present):
        raise EvaluateInputError(f"evaluate/{context.name}.lengths: {error}")
    return [(role, source) for length, role, source in by_length if lengths is None or length in lengths]


def default_batch_size(length: int, device_type: str) -> int:
    """Return the number of sequences of `length` tokens in a batch, at least one."""
    tokens = BATCH_TOKENS if device_type == "cpu" else BATCH_TOKENS_ON_DEVICE
    return min(MAX_BATCH_SIZE, rows_of(tokens, length))


def evaluate_word_problem(job: EvaluationJob) -> EvaluationResult:
    """Return accuracies, cost and, to compare modes, all predictions. Raises: EvaluationOutOfMemory, UnknownToken."""
    tally = AccuracyTally(job)
    return EvaluationResult(tallied(job, tally, _read, partial(_answers, job)), tally.predictions_NL)


@dataclass
class Answers:
    """The predictions (B, L) of a batch, whether a sequence's logits are finite (B), and the solver's statistics."""

    predictions_BL: Tensor
    is_finite_B: Tensor
    solver_stats: Any

    @classmethod
    def of(cls, out: Any) -> Answers:
        """Return the predictions for a model's output."""
        kind = torch.uint8 if out.logits.shape[-1] <= 256 else torch.int32
        is_finite_B = torch.isfinite(out.logits).all(dim=-1).all(dim=-1)
        return cls(out.logits.argmax(dim=-1).to(kind), is_finite_B, getattr(out, "solver_stats", None))

    @classmethod
    def joined(cls, pieces: Sequence[Answers]) -> Answers:
        """Join the predictions of a batch that was evaluated in pieces."""
        return cls(
            torch.cat([piece.predictions_BL for piece in pieces], dim=1),
            torch.stack([piece.is_finite_B for piece in pieces]).all(0),
            gather_blocks([Block(piece.predictions_BL.shape[1], piece.solver_stats) for piece in pieces], 1),
        )


def _answers(job: EvaluationJob, input_ids: Tensor) -> Answers:
    """Return the predictions; sequences of more than PIECE tokens are evaluated in pieces if possible.

    This requires an implicit model with a state of fixed size, from which the next piece starts, and a mode whose block
    length divides PIECE. If `job.kept` is set, the pieces are stored there every SAVE_EVERY_S seconds, for a restart.
    """
    model: Any = job.model
    length, solver = input_ids.shape[1], solver_of(model)
    is_whole = length <= PIECE or solver is None or solver.eval_mode == AS_TRAINED or model.base.has_growing_state
    if is_whole or (solver is not None and PIECE % solver.eval_width(length)):
        return Answers.of(model(input_ids=input_ids))
    digest = sha256(input_ids.cpu().numpy().tobytes()).hexdigest()[:16]
    path, cache = None if job.kept is None else job.kept / f"{digest}.pt", ConvergedStateCache()
    pieces: list[Answers] = []
    if path is not None and path.exists():
        with torch.serialization.safe_globals([Answers, SolverStats, Prefix]):
            pieces, cache.prefix, cache.made_by = torch.load(path, job.device, weights_only=True)
        log.info("%s: goes on after %d pieces of %d tokens", job.where, len(pieces), PIECE)
    saved_at = time.monotonic()
    for start in range(PIECE * len(pieces), length, PIECE):
        end = start + PIECE
        pieces.append(Answers.of(model(input_ids=input_ids[:, start:end], past_key_values=cache)))
        if path is not None and (end >= length or time.monotonic() - saved_at > SAVE_EVERY_S):
            _keep(path, pieces, cache, is_read=end >= length)
            saved_at = time.monotonic()
    return Answers.joined(pieces)


def _keep(path: Path, pieces: Sequence[Answers], cache: Any, *, is_read: bool) -> None:
    """Atomically store the pieces and the state from which `_answers` resumes; no state if all tokens `is_read`.

    The file refers to classes by name. This is safe, because the file is in the work folder of one fingerprint, which
    includes the code, so no other code loads it.
    """
    raw = BytesIO()
    # Clone the states, because torch.save would write a view together with the whole tensor behind it.
    torch.save((pieces, None if is_read else cache.prefix.map(torch.clone), cache.made_by), raw)
    write_atomic(path, raw.getvalue())


def match(result: EvaluationResult, other: EvaluationResult | None) -> float | None:
    """Return the share of equal predictions over the samples that both results have.

    Return None if `other` is None or `result`, without common samples, or if a sequence in a result is not finite.
    """
    if other is None or other is result or any(each.values["nonfinite_share"] != 0 for each in (result, other)):
        return None
    mine, theirs = result.predictions_NL, other.predictions_NL
    if mine is None or theirs is None or not (count := min(len(mine), len(theirs))):
        return None
    return float((mine[:count] == theirs[:count]).mean())


def _read(answers: Answers, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return predictions (B, L), and whether each sequence has finite logits (B)."""
    return answers.predictions_BL.cpu().numpy(), answers.is_finite_B.cpu().numpy()


def task_record(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task's part of a record of metrics.json, with the chance level of a model without state."""
    described = {key: task[key] for key in TASK_FIELDS}
    chance = chance_per_position(**described)
    return described | {
        "chance_last10": round(float(chance[-LAST_TOKENS:].mean()), 6),
        "chance_per_position": [round(float(share), 6) for share in chance],
    }


def chance_per_position(group: str, monoid: str, hard_fraction: float | Sequence[float], length: int) -> np.ndarray:
    """Return the share of the most frequent target at each position, shape (length,).

    Each of several hard fractions applies to an equal share of the samples. The monoid part of a token is uniform.
    Raises: UnknownGroup.
    """
    fractions = np.atleast_1d(np.asarray(hard_fraction, dtype=np.float64))
    untouched = (1.0 - fractions[:, None]) ** np.arange(1, length + 1)
    identity = (untouched + (1.0 - untouched) / load_group(group).order).mean(axis=0)
    return identity * _most_frequent_product(load_monoid(monoid).table, length)


def _most_frequent_product(table: np.ndarray, length: int) -> np.ndarray:
    """Return the share of the most frequent product of t uniform elements, for t = 1 .. length."""
    order = len(table)
    share = np.full(order, 1.0 / order)
    largest = np.empty(length)
    for position in range(length):
        largest[position] = share.max()
        following = np.zeros(order)
        np.add.at(following, table, share[:, None] / order)
        share = following
    return largest


class AccuracyTally(Tally):
    """A tally of correct predictions by position and by sequence, with all predictions (samples, L)."""

    measures = ("accuracy_last10", "accuracy_sequence", "accuracy_token", "accuracy_per_position")

    def __init__(self, job: EvaluationJob) -> None:
        length, kind = job.dataset.length, np.min_scalar_type(job.dataset.vocab_size - 1)
        self.predictions_NL = np.zeros((job.num_samples, length), dtype=kind)
        self.right_L = np.zeros(length, dtype=np.int64)
        self.num_samples = self.right_sequences = 0

    def add(self, answer: tuple[np.ndarray, np.ndarray] | None, batch: Batch) -> int:
        labels_BL = batch["labels"]
        start, self.num_samples = self.num_samples, self.num_samples + len(labels_BL)
        if answer is None:
            return len(labels_BL)
        predictions_BL, is_finite_B = answer
        is_right_BL = predictions_BL == labels_BL
        self.right_L += is_right_BL.sum(axis=0)
        self.right_sequences += int(is_right_BL.all(axis=1).sum())
        self.predictions_NL[start : self.num_samples] = predictions_BL
        return int((~is_finite_B).sum())

    def values(self) -> dict[str, Any]:
        """Return the accuracies; for sequences of fewer than ten tokens, accuracy_last10 is over all of them."""
        shares_L = self.right_L / self.num_samples
        return {
            "accuracy_last10": float(shares_L[-LAST_TOKENS:].mean()),
            "accuracy_sequence": self.right_sequences / self.num_samples,
            "accuracy_token": float(shares_L.mean()),
            "accuracy_per_position": [round(float(share), 6) for share in shares_L],
            "num_samples": self.num_samples,
        }

    def shown(self) -> str:
        return f"accuracy on the last ten tokens {self.values()['accuracy_last10']:.3f}"
