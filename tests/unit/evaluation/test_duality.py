from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from implicit_llm.evaluation.answers import BatchSize, EvaluationJob
from implicit_llm.evaluation.kinds.duality import compare_modes, trace_convergence
from implicit_llm.evaluation.kinds.duality_measures import (
    ModeOutput,
    PairTally,
    TraceTally,
    all_modes,
    compare,
    looked_at,
    mode_output,
    pairs_of,
    trace,
)
from implicit_llm_contracts.config.evaluation import ModeConfig, SweepConfig, swept_modes
from tests.unit.evaluation.small_models import Rows, small_model

MODES = (
    ModeConfig("simultaneous", "simultaneous", eval_max_iter=30, eval_tol=1e-4),
    ModeConfig("sequential", "sequential", eval_max_iter=30, eval_tol=1e-4),
    ModeConfig("blocks", "blockwise", eval_max_iter=30, eval_tol=1e-4, eval_block_len=4),
)


def contracting_model() -> Any:
    """An implicit model with weak feedback, so that the iteration converges in a few steps."""
    model = small_model("implicit")
    with torch.no_grad():
        model.backbone.layers[0].mixer.in_proj.g.mul_(0.2)
    return model


def job_of(model: Any, rows: Any, batch_size: int = 3, num_rows: int | None = None) -> EvaluationJob:
    return EvaluationJob(model, rows, len(rows) if num_rows is None else num_rows, BatchSize(batch_size), "data")


def test_measures_of_a_pair_equal_those_found_by_hand() -> None:
    reference = torch.tensor([[[2.0, 0.0], [0.0, 0.0], [1.0, 3.0]]])
    logits = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [4.0, 3.0]]])
    tally = PairTally()
    tally.add(logits, reference)
    values = tally.values()
    assert values["num_tokens"] == 3
    assert values["token_agreement"] == pytest.approx(1 / 3)
    assert values["logit_distance_mean"] == pytest.approx((0 + 1 + 1.5) / 3, rel=1e-5)
    assert values["logit_distance_max"] == 3.0

    def log_share(a: float, b: float) -> float:
        return -math.log(1 + math.exp(b - a))

    second = 0.5 * (math.log(0.5) - log_share(0, 2)) + 0.5 * (math.log(0.5) - log_share(2, 0))
    p, q = math.exp(log_share(1, 3)), math.exp(log_share(3, 1))
    third = p * (log_share(1, 3) - log_share(4, 3)) + q * (log_share(3, 1) - log_share(3, 4))
    assert values["kl"] == pytest.approx((second + third) / 3, rel=1e-5)


def test_tallies_of_batches_and_of_pieces_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
    outputs = {name: ModeOutput(states + shift * states.roll(1), None, None) for name, shift in (("a", 0.5), ("b", 0))}
    whole = compare(outputs, [("a", "b")])["a", "b"]
    monkeypatch.setattr("implicit_llm.evaluation.answers.LOSS_TOKENS", 10)
    merged = PairTally()
    for rows in (slice(0, 1), slice(1, 4)):
        part = {name: replace(output, states=output.states[rows]) for name, output in outputs.items()}
        merged.merge(compare(part, [("a", "b")])["a", "b"])
    assert merged.values() == pytest.approx(whole.values(), rel=1e-4)
    assert 0 < whole.values()["token_agreement"] < 1


def test_reference_of_a_pair_is_the_mode_nearer_to_generation() -> None:
    assert pairs_of(MODES, is_implicit=True) == [
        ("blocks", "sequential"),
        ("simultaneous", "sequential"),
        ("simultaneous", "blocks"),
    ]


def test_modes_of_a_sweep_are_compared_at_equal_settings() -> None:
    swept = swept_modes(MODES[:2], SweepConfig(eval_tol=(0.1, 0.01), eval_max_iter=(4,)))
    assert pairs_of(swept, is_implicit=True) == [
        (f"simultaneous@{setting}", f"sequential@{setting}")
        for setting in ("eval_max_iter=4", "eval_tol=0.1", "eval_tol=0.01")
    ]


@pytest.mark.parametrize("kind", ["explicit", "gpt_neox"])
def test_explicit_model_gives_the_same_in_parallel_and_token_by_token(kind: str) -> None:
    rows = Rows()
    tally = compare_modes(job_of(small_model(kind), rows), MODES)
    values = tally.pairs["parallel", "sequential"].values()
    assert values["num_tokens"] == 7 * 12
    assert values["token_agreement"] == 1.0
    assert values["logit_distance_max"] < 1e-4 * values["logit_std"]
    assert values["kl"] < 1e-6


def test_converged_modes_agree_and_a_small_budget_does_not() -> None:
    model, rows = contracting_model(), Rows(num_rows=2)
    before = model.solver
    converged = compare_modes(job_of(model, rows), MODES)
    for pair in pairs_of(MODES, is_implicit=True):
        values = converged.pairs[pair].values()
        assert values["token_agreement"] == 1.0
        assert values["logit_distance_max"] < 0.01 * values["logit_std"]
    short = (ModeConfig("short", "simultaneous", eval_max_iter=1), MODES[1])
    cut_short = compare_modes(job_of(model, rows), short).pairs["short", "sequential"].values()
    assert cut_short["logit_distance_mean"] > 100 * values["logit_distance_mean"]
    assert cut_short["kl"] > values["kl"]
    assert model.solver == before
    assert converged.solvers["sequential"].f_evaluations_per_token > 2


def test_batch_that_does_not_fit_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = small_model("explicit"), Rows()
    whole = compare_modes(job_of(model, rows), MODES).pairs["parallel", "sequential"].sums[0]
    tokens: list[int] = []

    def refuses_large_batches(model: Any, modes: Any, input_ids: torch.Tensor) -> Any:
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("too large")
        tokens.append(input_ids.numel())
        return all_modes(model, modes, input_ids)

    monkeypatch.setattr("implicit_llm.evaluation.kinds.duality.all_modes", refuses_large_batches)
    assert compare_modes(job_of(model, rows, batch_size=7), MODES).pairs["parallel", "sequential"].sums[0] == whole
    assert sum(tokens) == whole


def test_non_finite_rows_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model("explicit")
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = float("nan")
    tally = compare_modes(job_of(model, Rows(), batch_size=1), MODES)
    with_token = int((Rows().columns["input_ids"] == 3).any(axis=1).sum())
    assert 0 < tally.num_nonfinite_rows == with_token < 7
    assert "became NaN or infinite" in caplog.text


def test_trace_gives_what_the_model_answers_with_each_budget() -> None:
    model = contracting_model()
    solver = replace(model.solver, eval_mode="simultaneous", eval_max_iter=12, tol=1e-6)
    input_ids = torch.as_tensor(Rows().columns["input_ids"])
    with torch.inference_mode():
        traced = trace(model, solver, input_ids)
    for place, budget in enumerate(looked_at(12)):
        if budget == 1:  # the solver always iterates once before the closing evaluation
            continue
        model.solver = replace(solver, eval_max_iter=budget)
        with torch.inference_mode():
            out = model(input_ids=input_ids)
        assert np.array_equal(traced.predictions_GBL[place], out.logits.argmax(-1).numpy()), budget
        if budget <= 8:  # every evaluation is looked at; the closing one is not measured
            np.testing.assert_allclose(traced.residual_GB[place - 1], out.solver_stats.residual, rtol=1e-3)
    assert traced.residual_GB[0] == pytest.approx(1.0, abs=1e-5)
    assert (traced.residual_GB[-1] < 0.01).all()


def test_curve_of_the_convergence_has_quantiles_and_agreement_by_hand() -> None:
    evaluations = (1, 2, 3)
    tally = TraceTally(evaluations, tol=0.5)
    model = contracting_model()
    solver = replace(model.solver, eval_max_iter=3)
    with torch.inference_mode():
        traced = trace(model, solver, torch.as_tensor(Rows().columns["input_ids"]))
    tally.add(replace_rows(traced, slice(0, 2)))
    tally.add(replace_rows(traced, slice(2, 7)))
    curve = tally.values()
    assert curve["f_evaluations"] == [1, 2, 3]
    assert curve["residual_sequence_median"] == pytest.approx(np.median(traced.residual_GB, axis=1), rel=1e-4)
    by_token = traced.residual_GBL.reshape(3, -1)
    assert curve["residual_token_q90"] == pytest.approx(np.quantile(by_token, 0.9, axis=1), rel=1e-4)
    assert curve["unconverged_share"] == pytest.approx((by_token >= 0.5).mean(axis=1))
    same = (traced.predictions_GBL == traced.predictions_GBL[-1]).reshape(3, -1).mean(axis=1)
    assert curve["agreement_with_last"] == pytest.approx(same)
    assert curve["agreement_with_last"][-1] == 1.0
    assert tally.num_tokens == 84


def replace_rows(traced: Any, rows: slice) -> Any:
    parts = {name: getattr(traced, name)[:, rows] for name in ("residual_GB", "residual_GBL", "predictions_GBL")}
    return replace(traced, **parts)


def test_diverging_iteration_has_no_curve(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model("implicit")
    with torch.no_grad():
        model.backbone.norm_f.weight.fill_(float("nan"))
    solver = replace(model.solver, eval_max_iter=4)
    assert trace_convergence(job_of(model, Rows()), solver) is None
    assert "became NaN or infinite" in caplog.text


def test_one_pass_of_a_known_model_keeps_states_instead_of_logits() -> None:
    output = mode_output(small_model("explicit"), torch.zeros((1, 5), dtype=torch.long))
    assert output.states.shape == (1, 5, 16)
    assert output.logits(slice(1, 3)).shape == (1, 2, 12)
