"""Measure whether the modes of one model agree on the same tokens, and how fast its simultaneous iteration converges.

An implicit model evaluates the same tokens in each of its modes. An explicit model evaluates them in parallel, and
token by token with its cache. These two results differ only by rounding, so they show how large a difference between
an implicit model's modes can be due to rounding.

The convergence is measured along the simultaneous iteration of an implicit model, to the end of its budget:

    z_0 = 0,   z_i = (1 - tau) z_{i-1} + tau f(z_{i-1})

Evaluation i of f gives the residual ||f(z_{i-1}) - z_{i-1}|| / ||f(z_{i-1})||. A model with a budget of i > 1
evaluations closes with the same evaluation and therefore makes the same prediction. Unlike the solver, this iteration
does not stop early and does not prefer an earlier iterate with a lower residual.

Shapes: `B` batch, `L` length, `D` model, `V` vocabulary, `G` recorded evaluations of f.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from implicit_llm.evaluation.answers import (
    Batch,
    EvaluationBatchSize,
    EvaluationJob,
    EvaluationResult,
    SolverTally,
    answers,
    finite,
    pieces,
    position_bins,
)
from implicit_llm.evaluation.frame import ModelEvaluation, Record, data_inputs, rows_of
from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm.solver.residual import make_rule
from implicit_llm_contracts.config.evaluation import (
    PARALLEL,
    SEQUENTIAL,
    DualityConfig,
    ModeConfig,
    pairs_of,
)
from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.solver import SolverConfig, solver_of
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.shards import open_dataset
from implicit_llm_jobs.progress import ProgressLog

log = logging.getLogger(__name__)

BATCH_TOKENS = 65536  # large, because in passes token by token a small batch takes as long as a large one
PAIR, CONVERGENCE = "pair", "convergence"  # values of a record's field `measure`
SO_FAR = "so-far"
KEEP_EVERY_S = 60.0
SIMULTANEOUS = "simultaneous"


def run(context: StageContext) -> StageResult:
    """Run an evaluation job: write metrics.json. Raises: UserError."""
    config = context.settings(DualityConfig)
    test_sets = data_inputs(context)
    evaluation = ModelEvaluation(
        context,
        config,
        tracked=("token_agreement", "logit_distance_mean", "kl"),
        place=lambda record: (f"{record['data']}.L{record['length']}", f"{record['mode']}-{record['against']}"),
    )
    for role, source in test_sets.items():
        for length in sorted(config.lengths) if config.lengths else (None,):
            rows = open_dataset(source.work, length=length)
            size, limit = rows_of(BATCH_TOKENS, rows.length), rows_of(config.max_tokens, rows.length)
            job = evaluation.job(f"{role}-L{rows.length}", rows, config.modes, batch_size=size, max_samples=limit)
            records = pair_records(evaluation, job) + trace_records(evaluation, job, config.trace_tokens)
            evaluation.add_records({"data": role, "length": rows.length} | record for record in records)
    # The headline is the agreement with the sequential mode, because generation uses that mode.
    pairs = [record for record in evaluation.records if record["against"] == SEQUENTIAL]
    agreement = {".".join(evaluation.place(record)): record["token_agreement"] for record in pairs}
    return evaluation.finish({"token_agreement": agreement})


def pair_records(evaluation: ModelEvaluation, job: EvaluationJob) -> list[Record]:
    """Return one record for each pair of modes; its measures are None if the modes cannot be compared."""
    pairs = pairs_of(evaluation.modes, is_implicit=evaluation.solver is not None)
    tally = DualityTally([PairTally() for _ in pairs])
    if job.num_samples == 0:
        log.warning("%s: has no row of %d tokens; its numbers are missing", job.where, job.dataset.length)
    elif evaluation.solver is None and not goes_by_token(job.model):
        kind = evaluation.about["model_type"]
        log.warning("%s: a %s cannot be read token by token here; its numbers are missing", job.where, kind)
    else:
        kept = evaluation.kept(job.where, SO_FAR)
        if kept is not None:
            tally = fill(DualityTally, kept.values, job.where)
            log.info("%s: %d rows taken from before the restart", job.where, tally.num_rows)
        compare_modes(
            job, evaluation.modes, tally, lambda: evaluation.keep(job.where, SO_FAR, EvaluationResult(asdict(tally)))
        )
    settings = {mode.name: mode.record(evaluation.solver) for mode in evaluation.modes}
    costs = {name: tally.solvers.get(name, SolverTally()).values() for pair in pairs for name in pair}
    return [
        {"measure": PAIR, "mode": mode, "against": against, **settings[mode], **pair.values(), **costs[mode]}
        | {"against_f_evaluations_per_token": costs[against]["f_evaluations_per_token"]}
        | {"nonfinite_share": tally.num_nonfinite_rows / tally.num_rows if tally.num_rows else None}
        for (mode, against), pair in zip(pairs, tally.pairs, strict=True)
    ]


def trace_records(evaluation: ModelEvaluation, job: EvaluationJob, max_tokens: int) -> list[Record]:
    """Return a list with the record of the convergence, with the settings of the first simultaneous mode.

    The list is empty for an explicit model, in a sweep, and if there is no simultaneous mode.
    """
    trained = evaluation.solver
    modes = [mode for mode in evaluation.modes if mode.eval_mode == SIMULTANEOUS and mode.sweep is None]
    if trained is None or not modes:
        return []
    solver = modes[0].solver(trained)
    job = replace(
        job,
        num_samples=min(job.num_samples, rows_of(max_tokens, job.dataset.length)),
        batch_size=EvaluationBatchSize(job.batch_size.size),
    )
    curve = trace_convergence(job, solver) if job.num_samples else None
    record = {"measure": CONVERGENCE, "mode": modes[0].name, "against": None, **modes[0].record(trained)}
    return [
        record
        | {"f_evaluations_per_token": float(solver.eval_budget), "residual": None, "convergence": curve}
        | {"unconverged_share": None if curve is None else curve["unconverged_share"][-1]}
        | {"num_tokens": 0 if curve is None else job.num_samples * job.dataset.length}
    ]


def compare_modes(
    job: EvaluationJob, modes: Sequence[ModeConfig], tally: DualityTally, keep: Callable[[], None] = lambda: None
) -> None:
    """Evaluate the sequences in every mode and add the results to `tally`; call `keep` each minute and at the end.

    The sequences that `tally` already has are skipped. If a mode becomes NaN or infinite in any sequence of a batch,
    all sequences of the batch count as not finite, and none of them is compared.
    Raises: EvaluationOutOfMemory, UnknownToken.
    """
    progress, kept_s = ProgressLog(job.where, "sample", job.num_samples), time.monotonic()
    pairs = pairs_of(modes, is_implicit=solver_of(job.model) is not None)

    def read(outputs: Any, batch: Batch) -> Any:
        # Count nothing here, because a batch that exceeds the memory is evaluated again in halves.
        is_finite = all(bool(torch.isfinite(output.states).all()) for output in outputs.values())
        return (outputs, compare(outputs, pairs)) if is_finite else None

    def words() -> str:
        shares = {"|".join(key): pair.values()["token_agreement"] for key, pair in zip(pairs, tally.pairs, strict=True)}
        return ", ".join(f"{key} {share:.4f}" for key, share in shares.items() if share is not None)

    for num_read, batch, answer in answers(job, read, partial(all_modes, job.model, modes), tally.num_rows):
        tally.num_rows = num_read
        if answer is None:
            tally.num_nonfinite_rows += len(batch["input_ids"])
        else:
            tally.add(*answer)
        progress.tell(tally.num_rows, words)
        if time.monotonic() - kept_s > KEEP_EVERY_S:
            keep()
            kept_s = time.monotonic()
    keep()
    if tally.num_nonfinite_rows:
        counts = (tally.num_nonfinite_rows, job.num_samples)
        log.warning("%s: %d of %d rows became NaN or infinite in some mode and are left out", job.where, *counts)


def trace_convergence(job: EvaluationJob, solver: SolverConfig) -> dict[str, list[Any]] | None:
    """Return the convergence curve of the simultaneous iteration, or None if the iteration became NaN or infinite.

    Raises: EvaluationOutOfMemory, UnknownToken.
    """
    traces, progress = [], ProgressLog(job.where, "sample", job.num_samples)
    for num_read, _, traced in answers(job, lambda traced, batch: traced, partial(trace, job.model, solver)):
        if traced is None:
            return None
        traces.append(traced)
        progress.tell(num_read, lambda: f"{solver.eval_budget} evaluations")
    return curve_of(traces, looked_at(solver.eval_budget), solver.tol)


@dataclass(frozen=True)
class ModeOutput:
    """The output of one mode.

    states: hidden states (B, L, D), or logits (B, L, V). head: the module that computes logits from the states.
    stats: the solver's statistics; None for an explicit model.
    """

    states: Tensor
    head: nn.Module
    stats: Any

    def logits(self, positions: slice) -> Tensor:
        """Return the fp32 logits at some positions."""
        return self.head(self.states[:, positions]).float()


def all_modes(model: Any, modes: Sequence[ModeConfig], input_ids: Tensor) -> dict[str, ModeOutput]:
    """Return the output in every mode, by name; the model's solver is restored afterwards."""
    trained = solver_of(model)
    if trained is None:
        by_token = mode_output(model, input_ids, is_by_token=True)
        return {PARALLEL: mode_output(model, input_ids), SEQUENTIAL: by_token}
    found = {}
    try:
        for mode in modes:
            model.solver = mode.solver(trained)
            found[mode.name] = mode_output(model, input_ids)
    finally:
        model.solver = trained
    return found


def mode_output(model: Any, input_ids: Tensor, *, is_by_token: bool = False) -> ModeOutput:
    """Run one pass over all tokens or, if `is_by_token`, one pass per token with the cache of the earlier tokens."""
    is_own = isinstance(model, ImplicitForCausalLM)
    inner, head, key = (model.base, model.lm_head, "last_hidden_state") if is_own else (model, nn.Identity(), "logits")
    if not is_by_token:
        out = inner(input_ids=input_ids)
        return ModeOutput(getattr(out, key), head, getattr(out, "solver_stats", None))
    cache, states = None, []
    for token in input_ids.split(1, dim=1):
        out = inner(input_ids=token, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        states.append(getattr(out, key))
    return ModeOutput(torch.cat(states, dim=1), head, None)


def goes_by_token(model: Any) -> bool:
    """Return whether an explicit model returns its cache as `past_key_values`, which token-by-token passes need."""
    token = torch.zeros((1, 1), dtype=torch.long, device=next(model.parameters()).device)
    with torch.inference_mode():
        return getattr(model(input_ids=token, use_cache=True), "past_key_values", None) is not None


MEASURES = ("token_agreement", "logit_distance_mean", "logit_distance_max", "logit_std", "kl")
Pair = tuple[str, str]  # a mode and its reference


@dataclass
class PairTally:
    """The sums over tokens for one pair of modes.

    sums: the number of tokens, the number of equal predictions, and the sums of the distance (the logits' mean
        absolute difference), of the spread (the standard deviation of the reference's logits) and of the divergence.
    """

    sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    distance_max: float = 0.0

    def add(self, logits_BLV: Tensor, reference_BLV: Tensor) -> None:
        difference_BLV = (logits_BLV - reference_BLV).abs()
        log_shares_BLV, log_reference_BLV = logits_BLV.log_softmax(-1), reference_BLV.log_softmax(-1)
        kl_BL = (log_reference_BLV.exp() * (log_reference_BLV - log_shares_BLV)).sum(-1)
        is_equal_BL = logits_BLV.argmax(-1) == reference_BLV.argmax(-1)
        columns = (torch.ones_like(kl_BL), is_equal_BL, difference_BLV.mean(-1), reference_BLV.std(-1), kl_BL)
        found = [float(column_BL.double().sum()) for column_BL in columns]
        self.merge(PairTally(found, float(difference_BLV.max())))

    def merge(self, other: PairTally) -> None:
        """Add the sums of `other`, and keep the larger of the two maximum distances."""
        self.sums = [mine + theirs for mine, theirs in zip(self.sums, other.sums, strict=True)]
        self.distance_max = max(self.distance_max, other.distance_max)

    def values(self) -> dict[str, Any]:
        """Return the measures of a record.

        token_agreement: the share of tokens after which both modes predict the same next token. kl: the divergence
        KL(reference || mode), in nats per token. logit_std: the spread of the reference, the scale for distances.
        Without tokens, all measures are None.
        """
        num_tokens, *sums = self.sums
        if not num_tokens:
            return dict.fromkeys(MEASURES) | {"num_tokens": 0}
        agreement, distance, spread, divergence = (total / num_tokens for total in sums)
        return {
            "token_agreement": agreement,
            "logit_distance_mean": finite(distance),
            "logit_distance_max": finite(self.distance_max),
            "logit_std": finite(spread),
            "kl": finite(max(0.0, divergence)),
            "num_tokens": int(num_tokens),
        }


@dataclass
class DualityTally:
    """The results over the first `num_rows` sequences.

    pairs: one tally for each pair of modes, in the order of `pairs_of`. solvers: the solver's work in each mode.
    """

    pairs: list[PairTally]
    solvers: dict[str, SolverTally] = field(default_factory=dict)
    num_rows: int = 0
    num_nonfinite_rows: int = 0

    def add(self, outputs: Mapping[str, ModeOutput], compared: Iterable[PairTally]) -> None:
        """Count a batch; `compared` is the result of `compare`."""
        for name, output in outputs.items():
            batch, length = output.states.shape[:2]
            self.solvers.setdefault(name, SolverTally()).add(output.stats, (batch, length))
        for mine, found in zip(self.pairs, compared, strict=True):
            mine.merge(found)


def compare(outputs: Mapping[str, ModeOutput], pairs: Sequence[Pair]) -> list[PairTally]:
    """Compare the pairs of modes on one batch; to limit memory, compute logits for a slice of positions at a time."""
    found = [PairTally() for _ in pairs]
    batch, length = next(iter(outputs.values())).states.shape[:2]
    for part in pieces(length, batch * len(outputs)):
        logits = {name: output.logits(part) for name, output in outputs.items()}
        for (mode, reference), tally in zip(pairs, found, strict=True):
            tally.add(logits[mode], logits[reference])
    return found


QUANTILES = {"median": 0.5, "q90": 0.9}
Trace = tuple[np.ndarray, ...]  # residuals per sequence (G, B), residuals and predictions per token (G, B x L)


def trace(model: Any, solver: SolverConfig, input_ids: Tensor) -> Trace:
    """Return the trace of the simultaneous iteration with the settings of `solver`, not with those of the model.

    Raises: FloatingPointError if the iteration becomes NaN or infinite.
    """
    base, wanted = model.base, set(looked_at(solver.eval_budget))
    embedding_BLD = base.get_input_embeddings()(input_ids)
    x = base.stack_input(embedding_BLD, None, None, None)
    measure = make_rule("sequence", solver.tol, is_training=False)
    z_BLD = torch.zeros_like(embedding_BLD)
    found: list[list[Tensor]] = []
    for evaluation in range(1, solver.eval_budget + 1):
        fz_BLD = base.apply_stack(z_BLD, x)[0]
        if evaluation in wanted:
            progress = measure(z_BLD, fz_BLD)
            parts = pieces(fz_BLD.shape[1], len(fz_BLD))
            predicted_BL = torch.cat([model.lm_head(fz_BLD[:, part]).argmax(-1) for part in parts], dim=1)
            found.append([values.flatten() for values in (progress.residual_B, progress.residual_BL, predicted_BL)])
        z_BLD = torch.lerp(z_BLD, fz_BLD, solver.tau)
    if not bool(torch.isfinite(z_BLD).all()):
        raise FloatingPointError("the simultaneous iteration became NaN or infinite; no convergence is reported")
    return tuple(torch.stack(column).cpu().numpy() for column in zip(*found, strict=True))


def curve_of(traces: Sequence[Trace], evaluations: Sequence[int], tol: float) -> dict[str, list[Any]]:
    """Return three measures, each as a list over the numbers of evaluations of f in `evaluations`.

    They are quantiles of the residual over sequences and tokens, the share of tokens whose residual is at least tol,
    and the share of predictions that equal those of the last evaluation.
    """
    by_sequence, by_token, predictions = (np.concatenate(parts, axis=1) for parts in zip(*traces, strict=True))
    curve: dict[str, list[Any]] = {"f_evaluations": list(evaluations)}
    for over, residual_GN in (("sequence", by_sequence), ("token", by_token)):
        for name, quantile in QUANTILES.items():
            values = np.quantile(residual_GN.astype(np.float64), quantile, axis=1)
            curve[f"residual_{over}_{name}"] = [finite(value) for value in values.tolist()]
    curve["unconverged_share"] = (by_token >= tol).mean(axis=1).tolist()
    curve["agreement_with_last"] = (predictions == predictions[-1:]).mean(axis=1).tolist()
    return curve


def looked_at(budget: int) -> tuple[int, ...]:
    """Return which evaluations of f are recorded: all up to the eighth, then four per doubling, and the last one."""
    return tuple(sorted({*position_bins(budget).tolist(), budget}))
