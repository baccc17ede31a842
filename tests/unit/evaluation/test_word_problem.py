from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from implicit_llm.evaluation.answers import BatchSize, Evaluation, EvaluationJob, EvaluationOutOfMemory
from implicit_llm.evaluation.kinds.word_problem import default_batch_size, evaluate_word_problem, match
from tests.unit.evaluation.small_models import Rows, small_model
from tests.unit.evaluation.stand_ins import Problems, StandIn, stand_in


def evaluate(model: StandIn, problems: Problems | None = None, batch_size: BatchSize | None = None) -> Evaluation:
    problems = problems or Problems()
    batch_size = batch_size or BatchSize(4)
    return evaluate_word_problem(EvaluationJob(model, problems, len(problems), batch_size, "data mode"))


def test_accuracies_count_positions_last_ten_tokens_and_whole_sequences() -> None:
    values = evaluate(stand_in(right_until=9)).values
    assert values["accuracy_per_position"] == [1.0] * 9 + [0.0] * 3
    assert values["accuracy_last10"] == pytest.approx(0.7)
    assert values["accuracy_token"] == pytest.approx(0.75)
    assert values["accuracy_sequence"] == 0.0
    assert values["num_samples"] == 10


def test_sequences_shorter_than_ten_tokens_count_all_of_them() -> None:
    assert evaluate(stand_in(right_until=3), Problems(length=4)).values["accuracy_last10"] == 0.75


def test_solver_statistics_are_gathered_over_batches_with_the_closing_evaluation() -> None:
    values = evaluate(stand_in()).values
    assert values["f_evaluations_per_token"] == 8.0
    assert values["iterations_per_token"] == 7.0
    assert values["residual"] == pytest.approx(0.2)
    assert values["unconverged_share"] == pytest.approx(3 * 3 / 120)  # one sequence in each of three batches


def test_explicit_model_costs_one_evaluation_and_has_no_residual() -> None:
    values = evaluate(stand_in(is_implicit=False)).values
    assert values["f_evaluations_per_token"] == 1.0
    assert values["iterations_per_token"] is None
    assert values["residual"] is None
    assert values["unconverged_share"] is None


@pytest.mark.parametrize("length", [32, 1024, 16384, 2**22])
def test_a_batch_holds_a_bounded_number_of_tokens_and_at_least_one_sequence(length: int) -> None:
    size = default_batch_size(length, "cpu")
    assert size == 1 or size * length <= 2**16
    assert 1 <= size <= default_batch_size(length, "cuda") <= 4096


def test_blockwise_the_layers_never_see_more_than_a_block_however_long_the_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, length = small_model("implicit"), 16384
    model.solver = replace(model.solver, eval_mode="blockwise", eval_block_len=512, eval_max_iter=4)
    apply_stack, seen = type(model.base).apply_stack, []

    def watched(self: torch.nn.Module, z_BLD: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        seen.append(z_BLD.shape[:2])
        return apply_stack(self, z_BLD, *arguments, **options)

    monkeypatch.setattr(type(model.base), "apply_stack", watched)
    job = EvaluationJob(model, Rows(1, length), 1, BatchSize(default_batch_size(length, "cpu")), "data blockwise")
    values = evaluate_word_problem(job).values
    assert set(seen) == {(1, 512)}
    assert len(values["accuracy_per_position"]) == length


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_batch_is_halved_until_it_fits_and_every_sample_counts_once(error: type[RuntimeError]) -> None:
    problems, size = Problems(), BatchSize(8)
    values = evaluate(stand_in(fits=3, out_of_memory=error), problems, size).values
    assert size.size == 2
    assert problems.fetched == [8, 4, 2, 2, 2, 2, 2]
    assert (values["num_samples"], values["accuracy_token"]) == (10, 1.0)


def test_batch_size_that_belongs_to_the_result_is_not_changed() -> None:
    with pytest.raises(EvaluationOutOfMemory, match="batch_size"):
        evaluate(stand_in(fits=3), batch_size=BatchSize(8, is_fixed=True))


def test_single_sequence_that_does_not_fit_is_a_user_error() -> None:
    with pytest.raises(EvaluationOutOfMemory, match="single sequence") as caught:
        evaluate(stand_in(fits=0))
    assert caught.value.exit_code == 2


def test_other_runtime_errors_are_not_taken_for_lack_of_memory() -> None:
    class Broken(StandIn):
        def forward(self, input_ids: torch.Tensor) -> None:
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        evaluate(Broken(stand_in().behaviour))


def test_match_compares_the_samples_both_have_and_only_finite_ones() -> None:
    right, half = evaluate(stand_in()), evaluate(stand_in(right_until=6))
    fewer = evaluate(stand_in(), Problems(num_samples=4))
    assert match(half, right) == 0.5
    assert match(right, fewer) == 1.0
    assert match(right, right) is None
    assert match(right, evaluate(stand_in(nan_at=0))) is None
