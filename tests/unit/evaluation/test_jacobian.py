"""Theorem 1 in numbers, and the stage of kind `jacobian` with untrained models and a small data set of S3.

The state-to-state Jacobian is diagonal for an explicit layer and not for an implicit one.
"""

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel

import implicit_llm
from implicit_llm.analysis.jacobian import (
    fixed_point,
    relative_difference,
    state_jacobian,
    state_jacobian_by_autograd,
    step_after,
)
from implicit_llm.evaluation.frame import EvaluateInputError
from implicit_llm.evaluation.kinds import jacobian as stage
from implicit_llm.evaluation.kinds.jacobian import measure, random_layer, steps
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.stage_context import Input
from implicit_llm_data.shards import open_dataset
from implicit_llm_jobs.stage import run_stage
from tests.refusals import refused
from tests.unit.evaluation import finished_runs
from tests.unit.evaluation.finished_runs import records, request, summary, train_nothing, word_problems


@pytest.fixture(scope="module")
def s3_test(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_problems(tmp_path_factory.mktemp("data") / "s3-test", num_samples=3)


def evaluate(folder: Path, kind: str, s3_test: Path, **settings: Any) -> Path:
    config = {"kind": "jacobian", "positions": [2, 3], "num_sequences": 1, **settings}
    inputs = {"model": train_nothing(folder / kind, kind, "s3", 6, {}), "s3-test": s3_test}
    return finished_runs.evaluate(stage, folder / kind, f"s3-{kind}-s7/free/jacobian", config, inputs)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, s3_test: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("jacobian")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "RANDOM_SEEDS", (0,))
        patch.setattr(stage, "RANDOM_TOKENS", 3)
        return {kind: evaluate(folder, kind, s3_test) for kind in ("implicit", "explicit")}


def test_the_transition_of_an_explicit_model_is_diagonal_and_that_of_an_implicit_one_is_not(
    both: dict[str, Path],
) -> None:
    for kind, run_dir in both.items():
        shares = [r["off_diagonal_share"] for r in records(run_dir) if r["off_diagonal_share"] is not None]
        assert len(shares) == 3
        assert all((share == 0) == (kind == "explicit") for share in shares)


def test_formula_and_autograd_agree_at_the_last_position_of_each_row(both: dict[str, Path]) -> None:
    found = records(both["implicit"])
    assert [(r["setting"], r["position"]) for r in found if r["relative_difference"] is not None] == [
        ("trained", 3),
        ("random layer", 3),
    ]
    assert all(r["relative_difference"] < 1e-6 for r in found if r["relative_difference"] is not None)
    assert all(0 < r["f_radius"] < 1.2 and 0 < r["transition_radius"] < 2 for r in found)


def test_the_log_tells_of_each_token_before_the_next_is_begun(
    tmp_path: Path, s3_test: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(stage, "RANDOM_SEEDS", (0,))
    monkeypatch.setattr(stage, "measure", lambda *given: told.append("begun") or measure(*given))
    monkeypatch.setattr(stage.ProgressLog, "tell", lambda self, done, words: told.append(f"{done}, {words()}"))
    evaluate(tmp_path, "explicit", s3_test)
    expected = ["1, setting: trained", "2, setting: trained", "3, setting: random layer"]
    assert told == [word for line in expected for word in ("begun", line)]


def test_a_record_says_of_which_token_and_state_it_is(both: dict[str, Path], s3_test: Path) -> None:
    trained = [r for r in records(both["implicit"]) if r["setting"] == "trained"]
    assert [(r["sequence"], r["position"]) for r in trained] == [(0, 2), (0, 3)]
    about = {"data": "s3-test", "length": 12, "seed": 7, "layer": 0, "state_size": 256}
    about |= {"mode": "sequential", "phase": "free", "run": "s3-implicit"}
    assert all({key: r[key] for key in about} == about for r in trained)
    assert sorted(len(r["entries"] or ()) for r in trained) == [0, 48]
    random = [r for r in records(both["explicit"]) if r["setting"] == "random layer"]
    assert [(r["seed"], r["data"], r["is_hard"], r["mode"]) for r in random] == [(0, None, None, "parallel")]


@pytest.mark.parametrize("runtime", [{"kernels": "torch"}, {"batch_size": 4}])
def test_an_option_of_the_machine_that_would_do_nothing_is_refused(
    tmp_path: Path, s3_test: Path, runtime: dict[str, Any]
) -> None:
    inputs = {"model": train_nothing(tmp_path / "model", "explicit", "s3", 6, {}), "s3-test": s3_test}
    asked = request(tmp_path / "evaluate", "evaluate", "s3-s7/free/jacobian", {"kind": "jacobian"}, inputs)
    option = f"--{next(iter(runtime)).replace('_', '-')}"
    with refused(f"evaluate/s3-s7/free/jacobian: {option} does nothing", EvaluateInputError):
        run_stage(replace(asked, runtime=asked.runtime | runtime), stage.run)


def test_hard_and_identity_tokens_have_means_of_their_own(tmp_path: Path, s3_test: Path) -> None:
    run_dir = evaluate(tmp_path, "explicit", s3_test, positions=[], num_sequences=3)
    trained = [r for r in records(run_dir) if r["setting"] == "trained"]
    assert [r["position"] for r in trained if r["sequence"] == 0] == list(range(2, 13))
    data = Input(s3_test, Manifest.read(s3_test / "manifest.json"))
    ids_BL = open_dataset(data.work).fetch(np.arange(3))["input_ids"]
    assert all(r["is_hard"] == (ids_BL[r["sequence"], r["position"] - 1] != 0) for r in trained)
    assert {r["is_hard"] for r in trained} == {True, False}
    means = summary(run_dir)["jacobian"]
    for is_hard, name in ((True, "trained_hard"), (False, "trained_identity")):
        expected = fmean(r["transition_radius"] for r in trained if r["is_hard"] is is_hard)
        assert means[f"transition_radius.{name}"] == pytest.approx(expected, rel=1e-5)


def test_the_states_along_a_sequence_are_those_of_each_token_alone() -> None:
    model, ids_L = random_layer(3, is_implicit=True)
    ids_BL = torch.stack([ids_L, ids_L.flip(0)])[:, :3]
    for row, position, step in steps(model, ids_BL, (2, 3), 0):
        assert step is not None
        alone = step_after(model, ids_BL[row, :position])
        assert torch.allclose(step.state_S, alone.state_S, rtol=1e-9)
        z_D = torch.ones(64, dtype=torch.float64)
        outputs = [s.apply(z_D[None], s.state_S[None])[0] for s in (step, alone)]
        assert torch.allclose(*outputs, rtol=1e-9)


def test_tokens_after_a_state_that_is_not_finite_have_no_numbers(caplog: pytest.LogCaptureFixture) -> None:
    model, ids_L = random_layer(0, is_implicit=True)
    model.get_input_embeddings().weight.data[ids_L[2]] = torch.nan
    found = [measure(step, 0) for _, _, step in steps(model, ids_L[None], (2, 4, 5), 0)]
    assert [token["state_size"] for token in found] == [64, None, None]
    assert caplog.text.count("token 4, and those after it") == 1


def test_a_fixed_point_that_is_not_reached_leaves_its_numbers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("implicit_llm.evaluation.kinds.jacobian.MAX_ITER", 2)
    layer, ids_L = random_layer(0, is_implicit=True)
    found = measure(step_after(layer, ids_L[:2]), 1)
    assert (found["off_diagonal_share"], found["state_size"]) == (None, 64)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"positions": [3, 13]}, "positions: 13 is beyond the 12 tokens"), ({"layer": 1}, "an earlier `layer`")],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, s3_test: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(EvaluateInputError, match=words):
        evaluate(tmp_path, "explicit", s3_test, **settings)


TOKENS = torch.tensor([1, 2, 3, 4])


def one_layer(kind: str, seed: int = 0, **changes: int) -> Any:
    """A random Mamba2 layer with one state entry per head channel, as in the paper's check, in fp64."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "expand": 1, "head_dim": 16, "state_size": 1, "vocab_size": 11} | changes
    config = implicit_llm.load_config(f"mamba2-state-tracking-{kind}", **sizes)
    model = AutoModel.from_config(config).double().eval()
    if kind == "implicit":
        model.solver = replace(model.solver, tol=1e-12, eval_mode="sequential", eval_max_iter=2000)
    return model


def off_diagonal_share(jacobian_SS: Tensor) -> float:
    return float((jacobian_SS - jacobian_SS.diagonal().diag()).norm() / jacobian_SS.norm())


@pytest.mark.parametrize(
    ("seed", "changes"),
    [
        (0, {}),
        (1, {"state_size": 3}),
        (0, {"expand": 2, "head_dim": 8, "n_groups": 2, "state_size": 2}),
        (0, {"num_hidden_layers": 2}),
    ],
    ids=["one entry a channel", "three entries", "four heads in two groups", "the second of two layers"],
)
def test_the_low_rank_jacobian_and_its_share_off_the_diagonal_are_those_of_the_full_matrix(
    seed: int,
    changes: dict[str, int],
) -> None:
    step = step_after(one_layer("implicit", seed, **changes), TOKENS, changes.get("num_hidden_layers", 1) - 1)
    z_D = fixed_point(step).z_D
    found, full_SS = state_jacobian(step, z_D), state_jacobian_by_autograd(step, z_D=z_D, num_unroll=150)
    assert relative_difference(found.dense(), full_SS) < 1e-8
    assert 1e-5 < off_diagonal_share(full_SS) < 1
    assert found.off_diagonal_share() == pytest.approx(off_diagonal_share(full_SS), rel=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_an_explicit_transition_is_diagonal(layer: int) -> None:
    step = step_after(one_layer("explicit", num_hidden_layers=2), TOKENS, layer)
    found, full_SS = state_jacobian(step), state_jacobian_by_autograd(step, num_unroll=1)
    assert found.off_diagonal_share() == off_diagonal_share(full_SS) == 0.0
    assert torch.equal(found.dense(), full_SS)


def test_rows_are_formed_in_parts_where_the_state_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_after(one_layer("implicit"), TOKENS)
    whole_SS = state_jacobian(step).dense()
    monkeypatch.setattr("implicit_llm.analysis.jacobian.ROW_ENTRIES", 3 * len(step.state_S))
    assert torch.allclose(state_jacobian(step).dense(), whole_SS, atol=1e-12)


@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_the_radius_of_the_transition_is_that_of_the_whole_jacobian(kind: str) -> None:
    found = state_jacobian(step_after(one_layer(kind, 1, state_size=3), TOKENS))
    exact = torch.linalg.eigvals(found.dense()).abs().max().item()
    assert found.spectral_radius(num_products=400) == pytest.approx(exact, rel=0.02)


def test_rows_and_columns_of_the_jacobian_are_those_of_the_whole() -> None:
    found = state_jacobian(step_after(one_layer("implicit"), TOKENS))
    rows, columns = torch.tensor([7, 3]), torch.tensor([1, 3, 15])
    assert torch.allclose(found.dense(rows, columns), found.dense()[rows][:, columns], atol=1e-15)
