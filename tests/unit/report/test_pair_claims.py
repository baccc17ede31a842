from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from implicit_llm.report.babi_results import BabiPoint, BabiResults
from implicit_llm.report.claims import Claim, Judgement
from implicit_llm.report.pair_claims import judge_pair
from implicit_llm.report.pair_measure import PairMeasure
from implicit_llm.report.perplexity_results import PerplexityPoint, PerplexityResults

NOTHING = PerplexityResults(())
EXPLICIT = PerplexityPoint.from_record(
    {"run": "m-explicit", "phase": "explicit", "seed": 0, "is_implicit": False, "model_type": "implicit_mamba2"}
    | {"num_parameters": 1000, "data": "text-test", "length": 128, "mode": "parallel", "perplexity": 20.0}
    | {"train_length": 128, "train_tokens": 1e6, "train_flops": 1e12},
    "evaluate:m-explicit-s0/explicit/ppl",
)
IMPLICIT = replace(
    EXPLICIT, role="evaluate:m-implicit-s0/free/ppl", run="m-implicit", phase="free", phase_label="(24+4)",
    is_implicit=True, mode="blockwise", perplexity=18.0, num_parameters=1050, train_flops=4e12,
)  # fmt: skip
BOUNDED = replace(IMPLICIT, phase="bounded", phase_label="(4+1)", perplexity=19.0, train_flops=2e12)


def claim(**compare: Any) -> Claim:
    measure = PairMeasure(**({"metric": "perplexity", "first": "implicit"} | compare))
    return Claim("id", "statement", "paper", "table", None, None, ("demo",), compare=measure)


def judge(points: list[PerplexityPoint], scale: str = "demo", **compare: Any) -> Judgement:
    return judge_pair(claim(**compare), PerplexityResults(tuple(points)), BabiResults(()), scale)


def seeds(point: PerplexityPoint, *values: float | None) -> list[PerplexityPoint]:
    return [replace(point, seed=seed, perplexity=value) for seed, value in enumerate(values)]


def test_claim_holds_when_every_seed_of_one_is_below_every_seed_of_the_other() -> None:
    judgement = judge([*seeds(IMPLICIT, 18.0, 18.6), *seeds(EXPLICIT, 20.0, 19.0)])
    assert judgement.verdict == "holds"
    assert (judgement.spread.low, judgement.spread.high) == (18.0 / 20.0, 18.6 / 19.0)
    assert judgement.evidence is not None
    assert judgement.evidence.num_seeds == 2


def test_claim_with_overlapping_seeds_fails_although_the_means_say_so() -> None:
    judgement = judge([*seeds(IMPLICIT, 17.0, 19.5), *seeds(EXPLICIT, 20.0, 19.0)])
    assert judgement.spread.mean is not None
    assert judgement.spread.mean < 1
    assert judgement.verdict == "fails"


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
    early = replace(IMPLICIT, phase="free-70", perplexity=25.0)
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
    assert judge([replace(IMPLICIT, **changes), EXPLICIT]).verdict == verdict


def test_at_equal_flops_the_run_that_was_trained_for_longer_stands_against_it() -> None:
    long = replace(EXPLICIT, run="m-explicit-long", perplexity=17.0, train_tokens=4e6, train_flops=3.8e12)
    judgement = judge([IMPLICIT, EXPLICIT, long], equal="flops")
    assert judgement.verdict == "fails"
    assert judgement.spread.mean == pytest.approx(18 / 17)


def test_worst_size_decides_and_another_family_does_not_count() -> None:
    large = [replace(IMPLICIT, run="l-implicit", num_parameters=5000, perplexity=21.0)]
    large += [replace(EXPLICIT, run="l-explicit", num_parameters=5000)]
    assert judge([IMPLICIT, EXPLICIT, *large]).verdict == "fails"
    llama = [replace(point, model_type="implicit_llama3") for point in large]
    assert judge([IMPLICIT, EXPLICIT, *llama], family="Mamba2").verdict == "holds"


def test_missing_number_gives_no_verdict() -> None:
    judgement = judge([*seeds(IMPLICIT, 18.0, None), *seeds(EXPLICIT, 20.0, 20.0)])
    assert judgement.verdict == "missing"
    assert judge([replace(IMPLICIT, perplexity=None), EXPLICIT]).to_dict()["measured"]["mean"] is None


def test_length_factor_takes_the_longer_rows_of_both() -> None:
    longer = [replace(IMPLICIT, length=512, perplexity=30.0), replace(EXPLICIT, length=512, perplexity=20.0)]
    assert judge([IMPLICIT, EXPLICIT, *longer]).verdict == "holds"
    assert judge([IMPLICIT, EXPLICIT, *longer], length_factor=4).verdict == "fails"
    assert judge([IMPLICIT, EXPLICIT], length_factor=4).verdict == "not run at this scale"
    assert judge([IMPLICIT, EXPLICIT], scale="h200").verdict == "not run at this scale"


def babi(is_implicit: bool, *accuracies: float, **changes: Any) -> BabiPoint:
    record = {"run": f"babi-{is_implicit}", "phase": "p", "seed": 0, "is_implicit": is_implicit, "data": "babi-test"}
    record |= {"model_type": "implicit_mamba2", "num_layers": 1, "num_parameters": 100, "train_tokens": 5.0}
    record |= {"mode": "blockwise" if is_implicit else "parallel", "accuracy": 0.5}
    by_task = {str(task): value for task, value in enumerate(accuracies, start=1)}
    return BabiPoint.from_record(record | {"accuracy_by_task": by_task} | changes, f"evaluate:babi-{is_implicit}")


def judge_babi(*points: BabiPoint) -> Judgement:
    return judge_pair(claim(metric="babi_tasks", num_layers=1), NOTHING, BabiResults(points), "demo")


def test_most_tasks_are_more_than_half_of_them_and_ties_do_not_count() -> None:
    explicit = babi(False, 0.5, 0.5, 0.5, 1.0)
    assert judge_babi(babi(True, 0.6, 0.6, 0.6, 1.0), explicit).verdict == "holds"
    assert judge_babi(babi(True, 0.6, 0.6, 0.4, 1.0), explicit).verdict == "fails"
    assert judge_babi(babi(True, 0.6, 0.6, 0.6, 1.0, num_layers=2), explicit).verdict == "not run at this scale"


def test_most_tasks_must_be_won_by_every_pair_of_seeds() -> None:
    explicit = [babi(False, 0.5, 0.5, 0.5), babi(False, 0.7, 0.7, 0.5, seed=1)]
    judgement = judge_babi(babi(True, 0.6, 0.6, 0.6), *explicit)
    assert judgement.verdict == "fails"
    assert (judgement.spread.low, judgement.spread.high) == (pytest.approx(1 / 3), 1.0)


def test_claim_takes_either_a_measure_or_a_comparison() -> None:
    with pytest.raises(ValueError, match="either measure and holds_if, or compare"):
        Claim("id", "s", "paper", "w", None, None, ("demo",))
