"""Whether modes agree: the measures by hand, and the stage in its frame on a small stream and untrained models."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from implicit_llm.evaluation.answers import EvaluationBatchSize, EvaluationJob
from implicit_llm.evaluation.kinds import duality as stage
from implicit_llm.evaluation.kinds.duality import (
    DualityTally,
    ModeOutput,
    PairTally,
    compare,
    compare_modes,
    curve_of,
    looked_at,
    mode_output,
    trace,
    trace_convergence,
)
from implicit_llm_contracts.config.evaluation import (
    EvaluateConfigError,
    ModeConfig,
    SweepConfig,
    pairs_of,
    swept_modes,
)
from tests.unit.evaluation import finished_runs
from tests.unit.evaluation.finished_runs import (
    VOCAB,
    Rows,
    contracting_model,
    finish,
    random_documents,
    records,
    small_model,
    stop_at,
    summary,
    train_nothing,
    write_stream,
)

MODES = (
    ModeConfig("simultaneous", "simultaneous", eval_max_iter=30, eval_tol=1e-4),
    ModeConfig("sequential", "sequential", eval_max_iter=30, eval_tol=1e-4),
    ModeConfig("blocks", "blockwise", eval_max_iter=30, eval_tol=1e-4, eval_block_len=4),
)
ROLE = "text-test"
SETTINGS: list[dict[str, Any]] = [
    {"name": "simultaneous", "eval_mode": "simultaneous", "eval_max_iter": 6},
    {"name": "blockwise", "eval_mode": "blockwise", "eval_max_iter": 6, "eval_block_len": 4},
    {"name": "sequential", "eval_mode": "sequential", "eval_max_iter": 6},
]


def compared(
    job: EvaluationJob, modes: tuple[ModeConfig, ...], *, is_implicit: bool = True
) -> tuple[Any, dict[Any, Any]]:
    """What `compare_modes` counts, and the values of each pair."""
    pairs = pairs_of(modes, is_implicit=is_implicit)
    tally = DualityTally([PairTally() for _ in pairs])
    compare_modes(job, modes, tally)
    return tally, {pair: found.values() for pair, found in zip(pairs, tally.pairs, strict=True)}


def job_of(model: Any, rows: Any, batch_size: int = 3) -> EvaluationJob:
    return EvaluationJob(model, rows, len(rows), EvaluationBatchSize(batch_size), "data")


def test_measures_of_a_pair_equal_those_found_by_hand() -> None:
    reference = torch.tensor([[[2.0, 0.0], [0.0, 0.0], [1.0, 3.0]]])
    logits = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [4.0, 3.0]]])
    tally = PairTally()
    tally.add(logits, reference)

    def log_share(a: float, b: float) -> float:
        return -math.log(1 + math.exp(b - a))

    second = 0.5 * (math.log(0.5) - log_share(0, 2)) + 0.5 * (math.log(0.5) - log_share(2, 0))
    p, q = math.exp(log_share(1, 3)), math.exp(log_share(3, 1))
    third = p * (log_share(1, 3) - log_share(4, 3)) + q * (log_share(3, 1) - log_share(3, 4))
    expected = {"num_tokens": 3, "token_agreement": pytest.approx(1 / 3), "logit_distance_max": 3.0}
    expected |= {"logit_distance_mean": pytest.approx((0 + 1 + 1.5) / 3, rel=1e-5)}
    expected |= {"kl": pytest.approx((second + third) / 3, rel=1e-5)}
    values = tally.values()
    assert {key: values[key] for key in expected} == expected


def test_tallies_of_batches_and_of_pieces_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
    outputs = {
        name: ModeOutput(states + shift * states.roll(1), torch.nn.Identity(), None)
        for name, shift in (("a", 0.5), ("b", 0))
    }
    (whole,) = compare(outputs, [("a", "b")])
    monkeypatch.setattr("implicit_llm.evaluation.answers.LOSS_TOKENS", 10)
    merged = PairTally()
    for rows in (slice(0, 1), slice(1, 4)):
        part = {name: replace(output, states=output.states[rows]) for name, output in outputs.items()}
        merged.merge(*compare(part, [("a", "b")]))
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
    _, found = compared(job_of(small_model(kind), Rows()), MODES, is_implicit=False)
    values = found["parallel", "sequential"]
    assert (values["num_tokens"], values["token_agreement"]) == (7 * 12, 1.0)
    assert values["logit_distance_max"] < 1e-4 * values["logit_std"]
    assert values["kl"] < 1e-6


def test_converged_modes_agree_and_a_small_budget_does_not() -> None:
    model, rows = contracting_model(), Rows(num_rows=2)
    before = model.solver
    converged, found = compared(job_of(model, rows), MODES)
    for values in found.values():
        assert values["token_agreement"] == 1.0
        assert values["logit_distance_max"] < 0.01 * values["logit_std"]
    short = (ModeConfig("short", "simultaneous", eval_max_iter=1), MODES[1])
    cut_short = compared(job_of(model, rows), short)[1]["short", "sequential"]
    assert cut_short["logit_distance_mean"] > 100 * values["logit_distance_mean"]
    assert cut_short["kl"] > values["kl"]
    assert model.solver == before
    assert converged.solvers["sequential"].f_evaluations_per_token > 2


def test_non_finite_rows_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model("explicit")
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = float("nan")
    tally, _ = compared(job_of(model, Rows(), batch_size=1), MODES, is_implicit=False)
    with_token = int((Rows().columns["input_ids"] == 3).any(axis=1).sum())
    assert 0 < tally.num_nonfinite_rows == with_token < 7
    assert "became NaN or infinite" in caplog.text


def test_trace_gives_what_the_model_answers_with_each_budget() -> None:
    model = contracting_model()
    solver = replace(model.solver, eval_mode="simultaneous", eval_stop="sequence", eval_max_iter=12, tol=1e-6)
    input_ids = torch.as_tensor(Rows().columns["input_ids"])
    with torch.inference_mode():
        residual_GB, _, predictions_GN = trace(model, solver, input_ids)
    for place, budget in enumerate(looked_at(12)):
        if budget == 1:  # the solver always iterates once before the closing evaluation
            continue
        model.solver = replace(solver, eval_max_iter=budget)
        with torch.inference_mode():
            out = model(input_ids=input_ids)
        assert np.array_equal(predictions_GN[place], out.logits.argmax(-1).flatten().numpy()), budget
        if budget <= 8:  # every evaluation is looked at; the closing one is not measured
            np.testing.assert_allclose(residual_GB[place - 1], out.solver_stats.residual, rtol=1e-3)
    assert residual_GB[0] == pytest.approx(1.0, abs=1e-5)
    assert (residual_GB[-1] < 0.01).all()


def test_curve_of_the_convergence_has_quantiles_and_agreement_by_hand() -> None:
    model, input_ids = contracting_model(), torch.as_tensor(Rows().columns["input_ids"])
    solver = replace(model.solver, eval_max_iter=3)
    with torch.inference_mode():
        residual_GB, residual_GN, predictions_GN = trace(model, solver, input_ids)
        parts = [trace(model, solver, input_ids[rows]) for rows in (slice(0, 2), slice(2, 7))]
    curve = curve_of(parts, (1, 2, 3), tol=0.5)
    assert curve["f_evaluations"] == [1, 2, 3]
    assert curve["residual_sequence_median"] == pytest.approx(np.median(residual_GB, axis=1), rel=1e-4)
    assert curve["residual_token_q90"] == pytest.approx(np.quantile(residual_GN, 0.9, axis=1), rel=1e-4)
    assert curve["unconverged_share"] == pytest.approx((residual_GN >= 0.5).mean(axis=1))
    same = (predictions_GN == predictions_GN[-1]).mean(axis=1)
    assert curve["agreement_with_last"] == pytest.approx(same)
    assert curve["agreement_with_last"][-1] == 1.0
    assert predictions_GN.shape == residual_GN.shape == (3, 84)


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


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a stream of 80 tokens."""
    run_dir, tokens = tmp_path_factory.mktemp("data") / ROLE, random_documents([30, 20, 27])
    return finish(run_dir, "data", ROLE, {"kind": "token_stream"}, lambda work: write_stream(work, tokens))


def evaluate(folder: Path, kind: str, data: Path, **changes: Any) -> Path:
    trained = train_nothing(folder, kind, "text", VOCAB, {"data": {"kind": "token_stream", "length": 16}})
    config = {"kind": "duality", "modes": SETTINGS, "lengths": [16], **changes}
    return finished_runs.evaluate(stage, folder, f"text-{kind}-s7/free/duality", config, {"model": trained, ROLE: data})


def test_every_pair_of_modes_and_the_convergence_are_recorded(tmp_path: Path, text: Path) -> None:
    run_dir = evaluate(tmp_path, "implicit", text, max_tokens=40, trace_tokens=16)
    *pairs, trace = records(run_dir)
    assert [(record["mode"], record["against"]) for record in pairs] == [
        ("blockwise", "sequential"),
        ("simultaneous", "sequential"),
        ("simultaneous", "blockwise"),
    ]
    for record in pairs:
        assert (record["measure"], record["num_tokens"], record["length"]) == ("pair", 32, 16)
        assert 0 < record["token_agreement"] <= 1
        assert record["logit_distance_mean"] < record["logit_distance_max"]
        for key in ("f_evaluations_per_token", "against_f_evaluations_per_token"):
            assert 2 <= record[key] <= 6
    expected = {"kind": "duality", "data": ROLE, "run": "text-implicit", "phase": "free", "seed": 7, "sweep": None}
    expected |= {"measure": "convergence", "mode": "simultaneous", "against": None, "num_tokens": 16}
    assert {key: trace[key] for key in expected} == expected
    assert (pairs[0]["eval_block_len"], trace["convergence"]["f_evaluations"]) == (4, [1, 2, 3, 4, 5, 6])
    agreement = summary(run_dir)["token_agreement"]
    assert sorted(agreement) == [f"{ROLE}.L16.blockwise-sequential", f"{ROLE}.L16.simultaneous-sequential"]
    assert not list(run_dir.rglob("partial"))


def test_explicit_model_is_compared_with_itself_token_by_token(tmp_path: Path, text: Path) -> None:
    (record,) = records(evaluate(tmp_path, "explicit", text))
    expected = {"mode": "parallel", "against": "sequential", "num_tokens": 80, "token_agreement": 1.0}
    expected |= {"eval_mode": None, "unconverged_share": None}
    assert {key: record[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("goes_by_token", "length", "said"),
    [(False, 16, "cannot be read token by token"), (True, 81, "no row of 81 tokens")],
)
def test_a_model_that_keeps_no_cache_and_a_length_that_no_row_reaches_have_no_numbers(
    tmp_path: Path, text: Path, caplog: Any, monkeypatch: Any, goes_by_token: bool, length: int, said: str
) -> None:
    monkeypatch.setattr(stage, "goes_by_token", lambda model: goes_by_token)
    (record,) = records(evaluate(tmp_path, "explicit", text, lengths=[length]))
    assert (record["token_agreement"], record["kl"], record["num_tokens"]) == (None, None, 0)
    assert said in caplog.text


def test_interrupted_comparison_goes_on_with_the_same_numbers(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("implicit_llm.evaluation.kinds.duality.KEEP_EVERY_S", -1.0)
    monkeypatch.setattr(stage, "BATCH_TOKENS", 16)
    whole = records(evaluate(tmp_path / "whole", "explicit", text))
    seen = stop_at(monkeypatch, stage, "all_modes", 4)
    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path / "cut", "explicit", text)
    assert records(evaluate(tmp_path / "cut", "explicit", text)) == whole
    assert len(seen) == 4 + 2  # of five rows three were kept


def test_modes_that_couple_batches_of_different_sizes_are_not_compared(tmp_path: Path, text: Path) -> None:
    modes = [
        {**SETTINGS[0], "name": name, "eval_stop": "batch", "batch_size": size} for name, size in (("a", 2), ("b", 4))
    ]
    modes.append({**SETTINGS[0], "name": "c", "eval_stop": "token"})  # it couples no sequences, so any batch suits it
    with pytest.raises(
        EvaluateConfigError, match=r"batch sizes differ \(\{'a': 2, 'b': 4\}\); give them the same batch_size"
    ):
        evaluate(tmp_path, "implicit", text, modes=modes)
