"""The stage of kind `jacobian` in its frame, with untrained models and a small data set of S3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_llm.data.stages import word_problem as data_stage
from implicit_llm.evaluation.answers import UnknownToken
from implicit_llm.evaluation.inputs import EvaluateInputError
from implicit_llm.evaluation.jacobian import JacobianConfig, choose_coordinates, measure, random_layer
from implicit_llm.evaluation.stages import jacobian as stage
from implicit_llm.runs.stage import run_stage
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_contracts.runs.manifest import Manifest
from tests.unit.evaluation.finished_runs import records, request, train_nothing


@pytest.fixture(scope="module")
def test_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "s3-test"
    config = {
        "kind": "word_problem", "group": "S3", "monoid": "none", "hard_fraction": 0.5,
        "length": 12, "num_samples": 3, "split": "test", "seed": 0, "shard_samples": 4,
    }  # fmt: skip
    run_stage(request(folder, "data", "s3-test", config, {}), data_stage.run)
    return folder


def evaluate(folder: Path, kind: str, test_set: Path, **settings: Any) -> Path:
    run_dir = folder / "evaluate" / kind
    config = {"kind": "jacobian", "positions": [2, 3], "num_sequences": 1, "max_state": 20, **settings}
    inputs = {"model": train_nothing(folder, kind, "s3", 6, {}), "s3-test": test_set}
    run_stage(request(run_dir, "evaluate", f"s3-{kind}-s7/free/jacobian", config, inputs), stage.run)
    return run_dir


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, test_set: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("jacobian")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "RANDOM_SEEDS", (0,))
        patch.setattr(stage, "RANDOM_TOKENS", 3)
        return {kind: evaluate(folder, kind, test_set) for kind in ("implicit", "explicit")}


def test_the_transition_of_an_explicit_model_is_diagonal_and_that_of_an_implicit_one_is_not(
    both: dict[str, Path],
) -> None:
    for kind, run_dir in both.items():
        shares = [r["off_diagonal_share"] for r in records(run_dir) if r["off_diagonal_share"] is not None]
        assert len(shares) == 3
        assert all((share == 0) == (kind == "explicit") for share in shares)


def test_formula_and_autograd_agree_wherever_the_fixed_point_was_reached(both: dict[str, Path]) -> None:
    found = [r for r in records(both["implicit"]) if r["num_iter"] is not None]
    assert {r["setting"] for r in found} == {"trained", "random layer"}
    assert all(r["relative_difference"] < 1e-6 for r in found)
    assert all(0 < r["f_radius"] < 1.2 and 0 < r["transition_radius"] < 2 for r in found)


def test_the_log_tells_of_each_token_before_the_next_is_begun(
    tmp_path: Path, test_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(stage, "RANDOM_SEEDS", (0,))
    monkeypatch.setattr(stage, "measure", lambda *given: told.append("begun") or measure(*given))
    monkeypatch.setattr(stage.Progress, "tell", lambda self, done, words: told.append(f"{done}, {words()}"))
    evaluate(tmp_path, "explicit", test_set)
    expected = ["1, setting: trained", "2, setting: trained", "3, setting: random layer"]
    assert told == [word for line in expected for word in ("begun", line)]


def test_a_record_says_which_part_of_which_state_it_looked_at(both: dict[str, Path]) -> None:
    trained = [r for r in records(both["implicit"]) if r["setting"] == "trained"]
    assert [(r["sequence"], r["position"]) for r in trained] == [(0, 2), (0, 3)]
    about = {"data": "s3-test", "length": 12, "seed": 7, "layer": 0, "state_size": 256, "num_coordinates": 20}
    about |= {"mode": "sequential", "phase": "free", "run": "s3-implicit"}
    assert all({key: r[key] for key in about} == about for r in trained)
    assert [len(r["entries"] or ()) for r in trained] == [20, 0]
    random = [r for r in records(both["explicit"]) if r["setting"] == "random layer"]
    assert [(r["seed"], r["data"], r["mode"]) for r in random] == [(seed, None, "parallel") for seed in (0,)]


def test_the_summary_has_the_means(both: dict[str, Path]) -> None:
    means = Manifest.read(both["implicit"] / "manifest.json").summary["jacobian"]
    assert means["off_diagonal_share.trained"] > 0
    assert means["relative_difference.random_layer"] < 1e-6


def test_a_fixed_point_that_is_not_reached_leaves_its_numbers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("implicit_llm.evaluation.jacobian.MAX_ITER", 2)
    layer, ids_L = random_layer(0, is_implicit=True)
    found = measure(layer, ids_L[:2], JacobianConfig("jacobian"))
    assert found["off_diagonal_share"] is None
    assert found["state_size"] == 64


def test_random_layers_leave_the_random_state_as_it_was() -> None:
    before = torch.get_rng_state()
    random_layer(0, is_implicit=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_coordinates_are_drawn_once_and_for_all() -> None:
    assert choose_coordinates(5, 8).tolist() == [0, 1, 2, 3, 4]
    drawn = choose_coordinates(1000, 8)
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    assert torch.equal(drawn, choose_coordinates(1000, 8))


def test_rows_of_another_vocabulary_are_refused(
    tmp_path: Path, test_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = stage.load_model

    def knows_less(*arguments: Any) -> Any:
        model = load(*arguments)
        model.config.vocab_size = 2
        return model

    monkeypatch.setattr(stage, "load_model", knows_less)
    with pytest.raises(UnknownToken, match="and the model knows 2"):
        evaluate(tmp_path, "explicit", test_set)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"positions": [3, 13]}, EvaluateInputError, "positions: 13 is beyond the 12 tokens"),
        ({"positions": [1]}, ConfigError, "from the second on"),
        ({"layer": 1}, EvaluateInputError, "an earlier `layer`"),
        ({"max_state": 0}, ConfigError, "max_state: 0 is not a positive integer"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, test_set: Path, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        evaluate(tmp_path, "explicit", test_set, **settings)
