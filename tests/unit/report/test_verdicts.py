"""The verdict table: what a reader sees of a claim."""

from typing import Any

import pytest

from implicit_llm_report.claims import claims
from implicit_llm_report.claims.claims import Claim, Control
from implicit_llm_report.claims.measure import Measure, wilson
from implicit_llm_report.claims.verdicts import (
    FROM_NOTE,
    Row,
    counted,
    counted_new,
    markdown,
    merged,
    outcomes,
    rows_of,
    short_markdown,
)
from tests.unit.report.sample_runs import Record, given_of
from tests.unit.report.test_claims import WORD, of_claim, runs, seeds


def entry_of(records: list[Record], scale: str = "demo", bound: str = ">= 0.9", **claim: Any) -> dict[str, Any]:
    about: dict[str, Any] = {"origin": "paper", "where": "Fig. 3", "published": "solved", "mark": "secondary"}
    about |= {"short": "It solves A5", "is_headline": True, "scales": ("demo",)}
    about |= {"measure": Measure("accuracy_last10", of={"run": "a"})}
    about |= {"id": "id", "statement": "A layer solves A5."}
    stated = Claim(holds_if=bound, **about | claim)
    return claims.judge(stated, given_of({stated.measure.kind: records}).frame, scale).to_dict()


def row_of(records: list[Record], **claim: Any) -> Row:
    return rows_of([entry_of(records, **claim)])[0]


def of_seeds(*values: float | None, **about: Any) -> list[Record]:
    return seeds(WORD | about, *values, metric="accuracy_last10")


FULL = {"train_tokens": 4e6, "num_parameters": 1000.0}
CONTROLS = (Control("without it", {"run": "b"}), Control("another", {"run": "c"}))
BY_MODE = (Control("by the other mode", mode="other"),)
HEADLINE = Measure("accuracy_last10", of={"group": "A5", "is_headline": True})
ANYTHING = Measure("accuracy_last10", of={"group": "A5"})
# By the sentence: the records, what is stated of the claim, and what the row then has.
ROWS: dict[str, tuple[list[Record], dict[str, Any], dict[str, Any]]] = {
    "the mean, and the worst seed before the best": (
        of_seeds(1.0, 0.95, num_samples=64), {}, {"here": "97.5 % (95.0 to 100.0)"},
    ),
    "of an upper bound the highest seed is the worst": (
        of_seeds(0.02, 0.03), {"bound": "<= 0.5"}, {"here": "2.5 % (3.0 to 2.0)"},
    ),
    "64 of 64 means at least 94 percent": (
        of_seeds(1.0, 1.0, num_samples=64), {},
        {"interval": "94.3 to 100.0", "few": ("64 sequences (95 %: 94.3 to 100.0)",)},
    ),
    "a claim that no run tests is not run and has no number": (
        of_seeds(1.0, run="other"), {}, {"here": "not run", "verdict": "not run", "evidence": ()},
    ),
    "a claim that lacks a seed is not finished and says how many": (
        of_seeds(1.0, None), {},
        {"here": "100.0 %", "verdict": "not finished", "essential": ("1 of 2 seeds missing",)},
    ),
    "a verdict names what its training was short of": (
        of_seeds(1.0, 1.0, train_tokens=1e6, num_parameters=500), {"full": FULL},
        {"essential": ("500 of 1k parameters, 25 % of planned tokens",)},
    ),
    "a verdict is silent on training that was as long": (
        of_seeds(1.0, 1.0, train_tokens=4e6), {"full": {"train_tokens": 4e6}}, {"essential": ()},
    ),
    "models are never one number": (runs(good=1.0, bad=0.1, fair=0.7), {"measure": ANYTHING}, {"here": "100.0 %"}),
    "a control that does as well is beside the claim, and one that was not run": (
        of_seeds(1.0, 1.0) + of_seeds(1.0, run="b"), {"controls": CONTROLS},
        {"essential": ("control: without it 100.0 % (holds too)", "control not run: another")},
    ),
    "a control that does worse is beside the claim": (
        of_seeds(1.0, 1.0) + of_seeds(0.1, run="b"), {"controls": CONTROLS},
        {"essential": ("control: without it 10.0 %", "control not run: another")},
    ),
    "the deciding run in another mode is a control": (
        of_seeds(1.0, 0.95) + of_seeds(0.9, run="b")
        + of_seeds(0.2, 0.3, mode="other") + of_seeds(0.99, run="b", mode="other"),
        {"controls": BY_MODE, "measure": HEADLINE},
        {"essential": ("best of 2 recipes", "control: by the other mode 20.0 to 30.0 %")},
    ),
    "a control by mode replaces all that selects the mode": (
        of_seeds(1.0, eval_mode="blockwise") + of_seeds(0.2, mode="other", eval_mode="sequential"),
        {"controls": BY_MODE, "measure": Measure("accuracy_last10", of={"group": "A5", "eval_mode": "blockwise"})},
        {"essential": ("control: by the other mode 20.0 %",)},
    ),
    "a planned number of another mode is missed": (
        of_seeds(1.0) + of_seeds(None, mode="other"), {"controls": BY_MODE, "measure": HEADLINE},
        {"essential": ("control not run: by the other mode",)},
    ),
    "a mode that the experiment does not plan is not missed": (
        of_seeds(1.0), {"controls": BY_MODE, "measure": HEADLINE}, {"essential": ()},
    ),
    "a sentence from the reading note is marked": (of_seeds(1.0), {}, {"paper": f"solved (Fig. 3) {FROM_NOTE}"}),
    "a sentence from the paper is not marked": (of_seeds(1.0), {"mark": "paper"}, {"paper": "solved (Fig. 3)"}),
}  # fmt: skip


@pytest.mark.parametrize("about", [{}, {"of": {"run": "b"}, "mode": "other"}])
def test_a_control_is_another_model_or_another_mode(about: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="control 'x': give either `of` or `mode`"):
        Control("x", **about)


@pytest.mark.parametrize(("records", "claim", "expected"), ROWS.values(), ids=ROWS)
def test_a_row_has(records: list[Record], claim: dict[str, Any], expected: dict[str, Any]) -> None:
    row = row_of(records, **claim)
    assert {name: getattr(row, name) for name in expected} == expected


def test_the_best_model_is_shown_with_the_range_of_the_others() -> None:
    row = row_of(runs(good=1.0, bad=0.1, fair=0.7), measure=ANYTHING)
    assert "the others 10.0 to 70.0 %" in row.evidence
    assert row.essential == ("best of 3 recipes",)


def test_a_claim_that_is_not_finished_is_counted_so() -> None:
    assert counted([row_of(of_seeds(1.0, None))]) == "1 of 1 claims of the paper were tested: 1 not finished."


def test_wilsons_interval_of_64_of_64_begins_at_94_percent() -> None:
    assert wilson(1.0, 64)[0] == pytest.approx(0.943, abs=1e-3)


def test_outcomes_have_each_claim_of_the_paper_by_where_it_is_made_and_no_other() -> None:
    late, early, own, not_run = (
        entry_of(of_seeds(0.5, 0.95), id="late", where="Theorem 1", short="It solves S5"),
        entry_of(of_seeds(1.0, 0.95), id="early"),
        entry_of(of_seeds(1.0, 0.95), id="own", origin="project"),
        entry_of(
            of_seeds(1.0, 0.95), scale="paper", id="not-run", where="abstract", short="", statement="All is parallel."
        ),
    )
    assert outcomes(rows_of([late, early, own, not_run]))[2:] == [
        "| Fig. 3 | It solves A5 | 97.5 % (95.0 to 100.0), **reproduced** |",
        "| Theorem 1 | It solves S5 | 72.5 % (50.0 to 95.0), **depends on the seed** |",
        "| abstract | All is parallel | not run |",
    ]


@pytest.mark.parametrize(
    ("origin", "values", "verdict"),
    [
        ("paper", (1.0, 0.95), "reproduced"),
        ("paper", (1.0, 0.85), "depends on the seed"),
        ("paper", (0.1, 0.2), "not reproduced"),
        ("project", (1.0, 0.95), "new"),
        ("project", (1.0, 0.85), "new, depends on the seed"),
        ("project", (0.1, 0.2), "new, does not hold"),
    ],
)
def test_a_claim_is_reproduced_when_every_seed_keeps_the_bound(
    origin: str, values: tuple[float, ...], verdict: str
) -> None:
    assert row_of(of_seeds(*values), origin=origin).verdict == verdict


NEW = [(1.0, "paper"), (1.0, "project"), (0.1, "project"), (0.2, "project")]


def test_verdicts_on_new_claims_are_counted_too() -> None:
    rows = rows_of([entry_of(of_seeds(value)) | {"origin": origin} for value, origin in NEW])
    assert counted_new(rows) == "1 confirmed, 2 not confirmed"


def test_of_two_experiments_the_one_that_ran_a_claim_has_it() -> None:
    tested, not_run = entry_of(of_seeds(1.0)), entry_of(of_seeds(1.0), scale="paper")
    assert merged({"small": [not_run], "large": [tested]}) == [tested]
    assert merged({"small": [tested], "large": [not_run]}) == [tested]


@pytest.mark.parametrize(("origin", "words"), [("paper", "reproduced"), ("project", "holds")])
def test_of_two_experiments_that_ran_a_claim_one_decides_as_of_two_models_and_the_other_is_named(
    origin: str, words: str
) -> None:
    good, bad = (
        entry_of(of_seeds(*values, train_tokens=1e6, num_parameters=500), origin=origin, full=FULL)
        for values in ((0.95, 0.9), (0.1, 0.2))
    )
    for entries in ({"small": good, "large": bad}, {"large": bad, "small": good}):
        (best,) = rows_of(merged({name: [entry] for name, entry in entries.items()}))  # one model that can is enough
        assert (best.state, best.here) == ("reproduced", "small: 92.5 % (90.0 to 95.0)")
        of_all = {name: [entry | {"is_best_of_them": False}] for name, entry in entries.items()}
        (row,) = rows_of(merged(of_all))
        assert (row.state, row.here) == ("not reproduced", "large: 15.0 % (10.0 to 20.0)")
        limits = {"paper": ", 500 of 1k parameters, 25 % of planned tokens"}.get(origin, "")
        assert row.elsewhere == (f"small: 92.5 % (90.0 to 95.0), {words} (2 seeds{limits})",)
        assert markdown([row])[-1].endswith(f"; {row.elsewhere[0]} |")
        assert row.elsewhere[0] not in short_markdown([row])[-1]


def test_the_tables_have_a_line_for_each_claim_and_the_short_one_its_headlines_and_failures() -> None:
    good, bad, plain = of_seeds(1.0, 0.95), of_seeds(0.1), of_seeds(0.99)
    entries = [entry_of(good), entry_of(bad, is_headline=False) | {"id": "bad"}]
    rows = rows_of([*entries, entry_of(plain, is_headline=False) | {"id": "plain"}])
    assert len(markdown(rows)) == 2 + 3
    assert short_markdown(rows)[2:] == [
        "| It solves A5 | solved (Fig. 3) † | 97.5 % (95.0 to 100.0) | **reproduced** |",
        "| It solves A5 | solved (Fig. 3) † | 10.0 % | **not reproduced**; needs ≥ 90.0 % |",
    ]
    rows = rows_of(entries)
    assert counted(rows) == "2 of 2 claims of the paper were tested: 1 reproduced, 1 not reproduced."


def test_every_claim_of_the_file_has_words_for_the_table() -> None:
    stated = claims.load_claims()
    assert {claim.id for claim in stated if claim.is_headline} >= {"state-passing-to-65536", "parallel-reading"}
    assert all(claim.short for claim in stated if claim.is_headline)
    assert sum(claim.mark == "secondary" for claim in stated) == 24


@pytest.mark.parametrize(("other", "words"), [(1_024, ()), (128, ("on 1,024 and 128 sequences",))])
def test_the_verdict_on_two_modes_says_that_they_have_different_numbers_of_sequences(
    other: int, words: tuple[str, ...]
) -> None:
    word = WORD | {"length": 64, "data": "L64", "eval_mode": "blockwise", "num_samples": 1_024}
    sequential = word | {"mode": "sequential", "eval_mode": "sequential", "num_samples": other}
    (row,) = rows_of([of_claim("blockwise-is-exact", [word, sequential], "word_problem").to_dict()])
    assert (row.state, row.essential) == ("reproduced", words)
