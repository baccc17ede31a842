"""The stage in its frame, on a small stream of tokens, on stories, and on untrained models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from implicit_llm.evaluation.kinds import duality as stage
from implicit_llm_contracts.config.evaluation import EvaluateConfigError
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_jobs.stage import run_stage
from tests.unit.evaluation.finished_runs import records, request, train_nothing
from tests.unit.evaluation.small_streams import VOCAB, random_documents, write_stream

ROLE = "text-test"
MODES: list[dict[str, Any]] = [
    {"name": "simultaneous", "eval_mode": "simultaneous", "eval_max_iter": 6},
    {"name": "blockwise", "eval_mode": "blockwise", "eval_max_iter": 6, "eval_block_len": 4},
    {"name": "sequential", "eval_mode": "sequential", "eval_max_iter": 6},
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a stream of 80 tokens."""

    def body(context: StageContext) -> StageResult:
        return StageResult(write_stream(context.work, random_documents([30, 20, 27])), {})

    run_dir = tmp_path_factory.mktemp("data") / ROLE
    run_stage(request(run_dir, "data", ROLE, {"kind": "token_stream"}, {}), body)
    return run_dir


def evaluate(folder: Path, kind: str, data: Path, **changes: Any) -> Path:
    trained = train_nothing(folder, kind, "text", VOCAB, {"data": {"kind": "token_stream", "length": 16}})
    run_dir = folder / "evaluate"
    config = {"kind": "duality", "modes": MODES, **changes}
    inputs = {"model": trained, ROLE: data}
    run_stage(request(run_dir, "evaluate", f"text-{kind}-s7/free/duality", config, inputs), stage.run)
    return run_dir


def test_every_pair_of_modes_and_the_convergence_are_recorded(tmp_path: Path, text: Path) -> None:
    run_dir = evaluate(tmp_path, "implicit", text, lengths=[16], max_tokens=40, trace_tokens=16)
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
        assert 2 <= record["f_evaluations_per_token"] <= 6
        assert 2 <= record["against_f_evaluations_per_token"] <= 6
    assert pairs[0]["eval_block_len"] == 4
    assert (trace["measure"], trace["mode"], trace["against"]) == ("convergence", "simultaneous", None)
    assert trace["convergence"]["f_evaluations"] == [1, 2, 3, 4, 5, 6]
    assert trace["num_tokens"] == 16
    expected = {"kind": "duality", "data": ROLE, "run": "text-implicit", "phase": "free", "seed": 7, "sweep": None}
    assert {key: trace[key] for key in expected} == expected
    summary = Manifest.read(run_dir / "manifest.json").summary["token_agreement"]
    assert sorted(summary) == [f"{ROLE}.L16.blockwise-sequential", f"{ROLE}.L16.simultaneous-sequential"]
    assert not list(run_dir.rglob("partial"))


def test_explicit_model_is_compared_with_itself_token_by_token(tmp_path: Path, text: Path) -> None:
    (record,) = records(evaluate(tmp_path, "explicit", text, lengths=[16]))
    assert (record["mode"], record["against"], record["num_tokens"]) == ("parallel", "sequential", 80)
    assert record["token_agreement"] == 1.0
    assert record["eval_mode"] is None
    assert record["unconverged_share"] is None


def test_model_that_keeps_no_cache_has_no_numbers(
    tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "goes_by_token", lambda model: False)
    (record,) = records(evaluate(tmp_path, "explicit", text, lengths=[16]))
    assert (record["token_agreement"], record["kl"], record["num_tokens"]) == (None, None, 0)
    assert "cannot be read token by token" in caplog.text


def test_length_that_no_row_reaches_is_missing(tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture) -> None:
    (record,) = records(evaluate(tmp_path, "explicit", text, lengths=[81]))
    assert record["token_agreement"] is None
    assert "no row of 81 tokens" in caplog.text


def test_interrupted_comparison_goes_on_with_the_same_numbers(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("implicit_llm.evaluation.kinds.duality.KEEP_EVERY_S", -1.0)
    monkeypatch.setattr(stage, "BATCH_TOKENS", 16)
    whole = records(evaluate(tmp_path / "whole", "explicit", text, lengths=[16]))
    seen: list[int] = []
    real = stage.all_modes

    def killed_at_the_fourth(model: Any, modes: Any, input_ids: Any) -> Any:
        seen.append(len(input_ids))
        if len(seen) == 4:
            raise KeyboardInterrupt
        return real(model, modes, input_ids)

    monkeypatch.setattr(stage, "all_modes", killed_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path / "cut", "explicit", text, lengths=[16])
    assert records(evaluate(tmp_path / "cut", "explicit", text, lengths=[16])) == whole
    assert len(seen) == 4 + 2  # of five rows three were kept


def test_modes_that_couple_batches_of_different_sizes_are_not_compared(tmp_path: Path, text: Path) -> None:
    modes = [
        {**MODES[0], "name": name, "eval_stop": "batch", "batch_size": size} for name, size in (("a", 2), ("b", 4))
    ]
    with pytest.raises(EvaluateConfigError, match=r"batch sizes differ .*; give them the same batch_size"):
        evaluate(tmp_path, "implicit", text, lengths=[16], modes=modes)
