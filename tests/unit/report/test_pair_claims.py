from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from implicit_llm_contracts.runs.journal import Point
from implicit_llm_report.babi import BabiResults
from implicit_llm_report.claims import Claim, Condition, Judgement
from implicit_llm_report.claims import judge as judge_found
from implicit_llm_report.findings import find
from implicit_llm_report.frame import frame_of
from implicit_llm_report.measures import PairMeasure
from implicit_llm_report.pairs import babi_pairs
from implicit_llm_report.training_runs import Phase, Solver, TrainingRun
from tests.unit.report.sample_runs import Record, given_of

EXPLICIT: Record = (
    {"run": "m-explicit", "phase": "explicit", "seed": 0, "is_implicit": False, "model_type": "implicit_mamba2"}
    | {"num_parameters": 1000, "data": "text-test", "length": 128, "mode": "parallel", "perplexity": 20.0}
    | {"train_length": 128, "train_tokens": 1e6, "train_flops": 1e12}
)
IMPLICIT = EXPLICIT | {
    "run": "m-implicit", "phase": "free", "solver": Solver("fixed_point", 24, 4), "is_implicit": True,
    "mode": "blockwise", "perplexity": 18.0, "num_parameters": 1050, "train_flops": 4e12,
}  # fmt: skip
BOUNDED = IMPLICIT | {
    "phase": "bounded",
    "solver": Solver("fixed_point", 4, 1),
    "perplexity": 19.0,
    "train_flops": 2e12,
}


def claim(**compare: Any) -> Claim:
    measure = PairMeasure(**({"metric": "perplexity", "first": "implicit"} | compare))
    bound = Condition(below=1) if measure.metric == "perplexity" else Condition(above=0.5)
    return Claim("id", "statement", "paper", "table", None, None, ("demo",), bound, compare=measure)


def judge(
    records: list[Record], scale: str = "demo", training: Sequence[TrainingRun] = (), **compare: Any
) -> Judgement:
    asked = claim(**compare)
    return judge_found(asked, find(asked, given_of({"perplexity": records}, training)), scale)


def seeds(record: Record, *values: float | None) -> list[Record]:
    return [record | {"seed": seed, "perplexity": value} for seed, value in enumerate(values)]


def test_claim_holds_when_every_seed_of_one_is_below_every_seed_of_the_other() -> None:
    judgement = judge([*seeds(IMPLICIT, 18.0, 18.6), *seeds(EXPLICIT, 20.0, 19.0)])
    assert judgement.verdict == "holds"
    assert (judgement.spread.low, judgement.spread.high) == (18.0 / 20.0, 18.6 / 19.0)
    assert judgement.evidence is not None
    assert judgement.evidence.num_seeds == 2


def test_claim_with_overlapping_seeds_is_borderline_although_the_means_say_so() -> None:
    judgement = judge([*seeds(IMPLICIT, 17.0, 19.5), *seeds(EXPLICIT, 20.0, 19.0)])
    assert judgement.spread.mean is not None
    assert judgement.spread.mean < 1
    assert judgement.verdict == "borderline"


def test_phases_of_one_run_are_compared_seed_by_seed() -> None:
    points = [*seeds(IMPLICIT, 18.0, 18.9), *seeds(BOUNDED, 18.5, 19.5)]
    judgement = judge(points, first="free", second="bounded")
    assert judgement.verdict == "holds"  # 18.9 is above 18.5, but of another seed
    assert len(judgement.spread.values) == 2


def test_bounded_and_free_are_told_by_their_iterations() -> None:
    points = [IMPLICIT, BOUNDED, EXPLICIT]
    assert judge(points, first="bounded").spread.mean == pytest.approx(19 / 20)
    assert judge(points, first="free").spread.mean == pytest.approx(18 / 20)
    assert judge([IMPLICIT, EXPLICIT], first="free").verdict == "not run at this scale"


def test_best_of_several_branches_speaks() -> None:
    early = IMPLICIT | {"phase": "free-70", "perplexity": 25.0}
    assert judge([IMPLICIT, early, BOUNDED, EXPLICIT], first="free").spread.mean == pytest.approx(18 / 20)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"num_parameters": 1110}, "holds"),
        ({"num_parameters": 1120}, "not run at this scale"),
        ({"train_tokens": 1.009e6}, "holds"),
        ({"train_tokens": 1.02e6}, "not run at this scale"),
        ({"train_tokens": None}, "not run at this scale"),
    ],
)
def test_only_models_of_equal_parameters_and_tokens_are_compared(changes: dict[str, Any], verdict: str) -> None:
    assert judge([IMPLICIT | changes, EXPLICIT]).verdict == verdict


def test_at_equal_flops_the_run_that_was_trained_for_longer_stands_against_it() -> None:
    long = EXPLICIT | {"run": "m-explicit-long", "perplexity": 17.0, "train_tokens": 4e6, "train_flops": 3.8e12}
    judgement = judge([IMPLICIT, EXPLICIT, long], equal="flops")
    assert judgement.verdict == "fails"
    assert judgement.spread.mean == pytest.approx(18 / 17)


def test_worst_size_decides_and_another_family_does_not_count() -> None:
    large = [IMPLICIT | {"run": "l-implicit", "num_parameters": 5000, "perplexity": 21.0}]
    large += [EXPLICIT | {"run": "l-explicit", "num_parameters": 5000}]
    assert judge([IMPLICIT, EXPLICIT, *large]).verdict == "fails"
    llama = [point | {"model_type": "implicit_llama3"} for point in large]
    assert judge([IMPLICIT, EXPLICIT, *llama], family="Mamba2").verdict == "holds"


def test_missing_number_gives_no_verdict() -> None:
    judgement = judge([*seeds(IMPLICIT, 18.0, None), *seeds(EXPLICIT, 20.0, 20.0)])
    assert judgement.verdict == "missing"
    assert judge([IMPLICIT | {"perplexity": None}, EXPLICIT]).to_dict()["measured"]["mean"] is None


def test_length_factor_takes_the_longer_rows_of_both() -> None:
    longer = [IMPLICIT | {"length": 512, "perplexity": 30.0}, EXPLICIT | {"length": 512, "perplexity": 20.0}]
    assert judge([IMPLICIT, EXPLICIT, *longer]).verdict == "holds"
    assert judge([IMPLICIT, EXPLICIT, *longer], length_factor=4).verdict == "fails"
    assert judge([IMPLICIT, EXPLICIT], length_factor=4).verdict == "not run at this scale"
    assert judge([IMPLICIT, EXPLICIT], scale="h200").verdict == "not run at this scale"


def babi(is_implicit: bool, *accuracies: float, **changes: Any) -> Record:
    record = {"run": f"babi-{is_implicit}", "phase": "p", "seed": 0, "is_implicit": is_implicit, "data": "babi-test"}
    record |= {"data_set": "babi", "split": "test"}
    record |= {"model_type": "implicit_mamba2", "num_layers": 1, "num_parameters": 100, "train_tokens": 5.0}
    record |= {"mode": "blockwise" if is_implicit else "parallel", "accuracy": 0.5}
    by_task = {str(task): value for task, value in enumerate(accuracies, start=1)}
    return {"role": f"evaluate:babi-{is_implicit}"} | record | {"accuracy_by_task": by_task} | changes


def judge_babi(*records: Record) -> Judgement:
    asked = claim(metric="babi_tasks", num_layers=1)
    assert asked.compare is not None
    return judge_found(asked, list(babi_pairs(asked.compare, BabiResults(frame_of({"catbabi": records}, {})))), "demo")


def test_most_tasks_are_more_than_half_of_them_and_ties_do_not_count() -> None:
    explicit = babi(False, 0.5, 0.5, 0.5, 1.0)
    assert judge_babi(babi(True, 0.6, 0.6, 0.6, 1.0), explicit).verdict == "holds"
    assert judge_babi(babi(True, 0.6, 0.6, 0.4, 1.0), explicit).verdict == "fails"
    assert judge_babi(babi(True, 0.6, 0.6, 0.6, 1.0, num_layers=2), explicit).verdict == "not run at this scale"


def test_most_tasks_must_be_won_by_every_pair_of_seeds() -> None:
    explicit = [babi(False, 0.5, 0.5, 0.5), babi(False, 0.7, 0.7, 0.5, seed=1)]
    judgement = judge_babi(babi(True, 0.6, 0.6, 0.6), *explicit)
    assert judgement.verdict == "borderline"
    assert (judgement.spread.low, judgement.spread.high) == (pytest.approx(1 / 3), 1.0)


def validated(run: str, *, is_implicit: bool, valid: float, test: float, **changes: Any) -> list[Record]:
    """A run of a grid: its accuracy on the validation set, and on the only task of the test set."""
    changes |= {"run": run}
    return [
        babi(is_implicit, valid, data="babi-valid", split="valid", accuracy=valid, **changes),
        babi(is_implicit, test, data="babi-test", accuracy=test, **changes),
    ]


def test_implicit_runs_are_not_judged_against_the_worst_explicit_run_of_a_grid() -> None:
    grid = [
        *validated("i-a", is_implicit=True, valid=0.5, test=0.5),
        *validated("i-b", is_implicit=True, valid=0.4, test=0.4),
        *validated("e-a", is_implicit=False, valid=0.9, test=0.9),
        *validated("e-b", is_implicit=False, valid=0.1, test=0.1),
    ]
    judgement = judge_babi(*grid)
    assert judgement.verdict == "fails"
    assert judgement.evidence is not None
    assert judgement.evidence.text.startswith(
        "i-a (blockwise) [chosen of 2 by accuracy on the validation set] against e-a"
    )


def test_grid_is_judged_by_the_runs_that_validation_chose_and_not_by_the_best_on_the_test_set() -> None:
    lucky = validated("i-lucky", is_implicit=True, valid=0.4, test=0.8)
    chosen = validated("i-chosen", is_implicit=True, valid=0.6, test=0.3)
    explicit = validated("e", is_implicit=False, valid=0.2, test=0.5)
    assert judge_babi(*lucky, *chosen, *explicit).verdict == "fails"
    assert judge_babi(*lucky, *explicit).verdict == "holds"  # with nothing to choose from


def test_validation_set_is_no_test_set_of_its_own() -> None:
    implicit = validated("i", is_implicit=True, valid=0.1, test=0.6)
    judgement = judge_babi(*implicit, *validated("e", is_implicit=False, valid=0.9, test=0.5))
    assert judgement.verdict == "holds"
    assert (
        judge_babi(implicit[0], babi(False, 0.0, data="babi-valid", split="valid")).verdict == "not run at this scale"
    )


def test_grid_without_validation_numbers_gets_no_verdict() -> None:
    runs = [babi(True, 0.6, run="i-a"), babi(True, 0.7, run="i-b"), babi(False, 0.5)]
    judgement = judge_babi(*runs)
    assert judgement.verdict == "missing"
    assert judgement.evidence is not None
    assert "no accuracy on the validation set chooses among them" in judgement.evidence.text


def test_run_of_a_grid_without_a_validation_number_is_not_chosen_and_is_told() -> None:
    grid = [babi(True, 0.9, run="i-b"), *validated("i-a", is_implicit=True, valid=0.6, test=0.6)]
    judgement = judge_babi(*grid, babi(False, 0.5))
    assert judgement.verdict == "holds"
    assert judgement.evidence is not None
    assert judgement.evidence.run == "i-a"
    assert "1 of them without a number there" in judgement.evidence.text


def test_runs_of_other_training_tokens_do_not_compete_and_the_worse_pair_decides() -> None:
    small = [
        *validated("i-128", is_implicit=True, valid=0.5, test=0.4),
        *validated("e-128", is_implicit=False, valid=0.5, test=0.5),
    ]
    large = [
        *validated("i-256", is_implicit=True, valid=0.9, test=0.9, train_tokens=10.0),
        *validated("e-256", is_implicit=False, valid=0.5, test=0.5, train_tokens=10.0),
    ]
    assert judge_babi(*large).verdict == "holds"
    assert judge_babi(*small, *large).verdict == "fails"


def test_implicit_language_model_is_not_judged_against_the_worst_explicit_run() -> None:
    bad = EXPLICIT | {"run": "m-explicit-bad", "perplexity": 40.0}
    good = EXPLICIT | {"perplexity": 15.0}
    judgement = judge([IMPLICIT, good, bad])
    assert judgement.verdict == "fails"
    assert judgement.spread.mean == pytest.approx(18 / 15)
    assert judgement.evidence is not None
    assert "[of 2 the one of lowest perplexity on this very text: no training losses choose among them]" in (
        judgement.evidence.text
    )


def trained(record: Record, last_loss: float) -> TrainingRun:
    points = tuple(Point(step=step, values={"loss": loss}, time="") for step, loss in ((50, 1.0), (100, last_loss)))
    phase = Phase("train", record["phase"], 0, 100, None, points)
    return TrainingRun(record["run"], 0, (phase,), "language_model", record["model_type"], record["num_parameters"])


def test_language_models_that_compete_are_chosen_by_the_training_loss_at_the_end() -> None:
    lucky = EXPLICIT | {"run": "m-explicit-lucky", "perplexity": 15.0}
    training = (trained(EXPLICIT, 2.0), trained(lucky, 2.5), trained(IMPLICIT, 2.2))
    judgement = judge([IMPLICIT, EXPLICIT, lucky], training=training)
    assert judgement.spread.mean == pytest.approx(18 / 20)
    assert judgement.evidence is not None
    assert "m-explicit (parallel) [chosen of 2 by training loss at the end]" in judgement.evidence.text
    assert judge([IMPLICIT, EXPLICIT, lucky], training=training[:1]).spread.mean == pytest.approx(18 / 15)


def test_claim_takes_either_a_measure_or_a_comparison() -> None:
    with pytest.raises(ValueError, match="exactly one of measure, quantity and compare"):
        Claim("id", "s", "paper", "w", None, None, ("demo",), Condition(below=1))
