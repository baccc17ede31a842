from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_report.claims import Claim, Condition, Judgement, load_claims
from implicit_llm_report.claims import judge as judge_found
from implicit_llm_report.config import ReportError
from implicit_llm_report.findings import word_numbers
from implicit_llm_report.measures import Measure
from tests.unit.report.sample_runs import Record, given_of

POINT: Record = (
    {"run": "a", "seed": 0, "is_implicit": True, "num_layers": 1, "group": "A5", "monoid": "none", "length": 16}
    | {"hard_fraction": 0.2, "train_length": 16, "train_hard_fraction": 0.2, "data": "L16", "mode": "blockwise"}
    | {"num_samples": 10_000, "chance_last10": 0.1, "accuracy_last10": 1.0, "f_evaluations_per_token": 9.0}
)


def claim(condition: Condition, **measure: object) -> Claim:
    chosen = Measure(**({"metric": "accuracy_last10"} | measure))  # type: ignore[arg-type]
    return Claim("id", "statement", "paper", "Fig. 3", None, None, ("demo",), condition, chosen)


def judge(claim: Claim, records: Iterable[Record], scale: str, mode: str | None = None) -> Judgement:
    assert claim.measure is not None
    rows = given_of({"word_problem": list(records)}, headline_mode=mode).words
    return judge_found(claim, list(word_numbers(claim.measure, rows)), scale)


def points(**values: float | None) -> tuple[Record, ...]:
    """One record a run, with this last-ten accuracy."""
    return tuple(POINT | {"run": run, "accuracy_last10": value} for run, value in values.items())


FAMILIES = ("lstm", "implicit_mamba2")
AT_LEAST, AT_MOST = Condition(at_least=0.9), Condition(at_most=0.5)


def test_claim_that_something_can_be_done_speaks_of_the_best_run() -> None:
    assert judge(claim(AT_LEAST), points(good=0.99, bad=0.1), "demo").verdict == "holds"


def test_claim_that_something_can_be_done_must_hold_on_every_test_set_of_the_run() -> None:
    harder = POINT | {"data": "L16-harder", "hard_fraction": 0.3, "accuracy_last10": 0.2}
    judgement = judge(claim(AT_LEAST), (POINT, harder), "demo")
    assert judgement.verdict == "fails"
    assert judgement.spread.mean == 0.2


def test_a_claim_about_a_family_is_not_asked_of_others() -> None:
    lstm, mamba2 = (record | {"model_type": kind} for record, kind in zip(points(a=0.9, b=0.1), FAMILIES, strict=True))
    assert judge(claim(AT_MOST, family="Mamba2"), (lstm, mamba2), "demo").verdict == "holds"
    assert judge(claim(AT_MOST, family="Llama"), (lstm, mamba2), "demo").verdict == "not run at this scale"


def test_claim_that_something_cannot_be_done_must_hold_for_every_run() -> None:
    assert judge(claim(AT_MOST), points(low=0.1, high=0.6), "demo").verdict == "fails"


def test_claim_is_borderline_where_its_seeds_disagree_and_shows_their_range() -> None:
    seeds = tuple(POINT | {"seed": seed, "accuracy_last10": value} for seed, value in enumerate((1.0, 0.9, 0.83)))
    judgement = judge(claim(AT_LEAST), seeds, "demo")
    assert judgement.verdict == "borderline"
    assert (judgement.spread.low, judgement.spread.high, len(judgement.spread.values)) == (0.83, 1.0, 3)


def test_share_of_one_seed_is_judged_by_its_interval_over_the_test_sequences() -> None:
    few = POINT | {"accuracy_last10": 0.93, "num_samples": 128}
    judgement = judge(claim(AT_LEAST), (few,), "demo")
    assert judgement.verdict == "borderline"
    assert judgement.to_dict()["interval"] == pytest.approx([0.872, 0.963], abs=1e-3)
    many = few | {"num_samples": 4096}
    assert judge(claim(AT_LEAST), (many,), "demo").verdict == "holds"


def test_claim_says_how_many_runs_compete_and_one_that_speaks_for_all_needs_all_of_them() -> None:
    runs = points(good=0.99, bad=0.1)
    best, every = judge(claim(AT_LEAST), runs, "demo"), judge(claim(AT_LEAST, speaks="all"), runs, "demo")
    assert (best.verdict, best.num_competing) == ("holds", 2)
    assert (every.verdict, every.num_competing) == ("fails", 2)


def test_claim_about_all_runs_does_not_hold_where_one_of_them_has_no_number() -> None:
    assert judge(claim(AT_MOST), points(low=0.1, lost=None), "demo").verdict == "missing"
    assert judge(claim(AT_MOST), points(high=0.6, lost=None), "demo").verdict == "fails"


def test_missing_number_gives_no_verdict_and_is_null_in_the_file() -> None:
    judgement = judge(claim(AT_MOST), points(a=None), "demo")
    assert judgement.verdict == "missing"
    assert judgement.to_dict()["measured"] == {"mean": None, "low": None, "high": None}


def test_seed_without_a_number_does_not_support_a_claim() -> None:
    seeds = (POINT, POINT | {"seed": 1, "accuracy_last10": None})
    assert judge(claim(AT_LEAST), seeds, "demo").verdict == "missing"


@pytest.mark.parametrize(("scale", "group"), [("h200", "A5"), ("demo", "S5")])
def test_claim_without_runs_or_at_another_scale_was_not_run(scale: str, group: str) -> None:
    assert judge(claim(AT_LEAST, group=group), (POINT,), scale).verdict == "not run at this scale"


@pytest.mark.parametrize(
    ("kind", "metric", "expected"),
    [("difference", "accuracy_last10", -0.3), ("ratio", "f_evaluations_per_token", 4.0)],
)
def test_two_modes_of_one_run_are_compared_seed_by_seed(kind: str, metric: str, expected: float) -> None:
    published = POINT | {"mode": "published", "accuracy_last10": 0.7, "f_evaluations_per_token": 36.0}
    other_run = POINT | {"run": "b", "mode": "published", "accuracy_last10": 0.0}
    compared = claim(AT_MOST, kind=kind, metric=metric, modes=("published", "blockwise"))
    judgement = judge(compared, (POINT, published, other_run), "demo")
    assert judgement.spread.mean == pytest.approx(expected)


def test_length_factor_and_harder_tests_are_told_apart() -> None:
    longer = POINT | {"data": "L64", "length": 64, "accuracy_last10": 0.5}
    harder = POINT | {"data": "h0.5", "hard_fraction": 0.5, "accuracy_last10": 0.4}
    results = (POINT, longer, harder)
    assert judge(claim(AT_LEAST, length_factor=4), results, "demo").spread.mean == 0.5
    assert judge(claim(AT_LEAST, is_harder=True), results, "demo").spread.mean == 0.4
    assert judge(claim(AT_LEAST, length_factor=1, is_harder=False), results, "demo").spread.mean == 1.0


def test_headline_mode_is_the_one_of_the_config_where_the_run_has_it() -> None:
    sequential = POINT | {"mode": "sequential", "accuracy_last10": 0.3}
    both = (POINT, sequential)
    assert judge(claim(AT_LEAST, mode="headline"), both, "demo").spread.mean == 1.0
    assert judge(claim(AT_LEAST, mode="headline"), both, "demo", "sequential").spread.mean == 0.3
    assert judge(claim(AT_LEAST, mode="headline"), both, "demo", "published").spread.mean == 1.0


def test_accuracy_above_chance_subtracts_the_best_constant_answer() -> None:
    assert judge(claim(AT_LEAST, metric="above_chance"), (POINT,), "demo").spread.mean == pytest.approx(0.9)


def test_the_projects_claims_can_be_read_and_name_a_mark_for_what_is_published() -> None:
    claims = load_claims()
    assert {claim.origin for claim in claims} == {"paper", "project"}
    assert all(claim.mark for claim in claims if claim.published)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("claims: [{id: a, metrics: b}]", "unknown key 'metrics'"),
        ("nothing: 1", "no list `claims`"),
        ("claims: [", "not valid YAML"),
    ],
)
def test_damaged_claims_are_a_one_line_error_with_file_and_key(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text(text)
    with pytest.raises((ReportError, ConfigError)) as caught:
        load_claims(path)
    message = str(caught.value)
    assert str(path) in message
    assert named in message
    assert "\n" not in message


def test_unknown_metric_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="accuracy_last10"):
        Measure(metric="acuracy")
