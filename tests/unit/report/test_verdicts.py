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
from tests.unit.report.test_claims import WORD, runs, seeds


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


def test_a_row_has_the_mean_and_the_worst_seed_before_the_best() -> None:
    row = row_of(of_seeds(1.0, 0.95, num_samples=64))
    assert row.here == "97.5 % (95.0 to 100.0)"
    assert row_of(of_seeds(0.02, 0.03), bound="<= 0.5").here == "2.5 % (3.0 to 2.0)"


def test_64_of_64_means_at_least_94_percent() -> None:
    assert wilson(1.0, 64)[0] == pytest.approx(0.943, abs=1e-3)
    row = row_of(of_seeds(1.0, 1.0, num_samples=64))
    assert row.interval == "94.3 to 100.0"
    assert row.few == ("64 sequences (95 %: 94.3 to 100.0)",)


def test_outcomes_have_each_claim_of_the_paper_by_where_it_is_made_and_no_other() -> None:
    late, early, own, not_run = (
        entry_of(of_seeds(0.5, 0.95), id="late", where="Theorem 1", statement="A layer solves S5."),
        entry_of(of_seeds(1.0, 0.95), id="early"),
        entry_of(of_seeds(1.0, 0.95), id="own", origin="project"),
        entry_of(of_seeds(1.0, 0.95), scale="paper", id="not-run", where="abstract", statement="All is parallel."),
    )
    assert outcomes(rows_of([late, early, own, not_run]))[2:] == [
        "| Fig. 3 | A layer solves A5 | 97.5 % (95.0 to 100.0), **reproduced** |",
        "| Theorem 1 | A layer solves S5 | 72.5 % (50.0 to 95.0), **depends on the seed** |",
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


def test_a_claim_that_no_run_tests_is_not_run_and_has_no_number() -> None:
    row = row_of(of_seeds(1.0, run="other"))
    assert (row.here, row.verdict, row.cut) == ("not run", "not run", ())


def test_a_claim_that_lacks_a_seed_is_not_finished_and_says_how_many() -> None:
    row = row_of(of_seeds(1.0, None))
    assert (row.here, row.verdict, row.essential) == ("100.0 %", "not finished", ("1 of 2 seeds missing",))
    assert counted([row]) == "1 of 1 claims of the paper were tested: 1 not finished."


NEW = [(1.0, "paper"), (1.0, "project"), (0.1, "project"), (0.2, "project")]


def test_verdicts_on_new_claims_are_counted_too() -> None:
    rows = rows_of([entry_of(of_seeds(value)) | {"origin": origin} for value, origin in NEW])
    assert counted_new(rows) == "1 confirmed, 2 not confirmed"


def test_a_verdict_names_what_its_training_was_short_of() -> None:
    full = {"train_tokens": 4e6, "num_parameters": 1000.0}
    row = row_of(of_seeds(1.0, 1.0, train_tokens=1e6, num_parameters=500), full=full)
    assert row.essential == ("500 of 1k parameters, 25 % of published tokens",)
    assert row_of(of_seeds(1.0, 1.0, train_tokens=4e6), full={"train_tokens": 4e6}).essential == ()


def test_models_are_never_one_number_and_the_best_is_shown_with_the_range_of_the_others() -> None:
    anything = Measure("accuracy_last10", of={"group": "A5"})
    row = row_of(runs(good=1.0, bad=0.1, fair=0.7), measure=anything)
    assert row.here == "100.0 %"
    assert "the best of 3 models; the others 10.0 to 70.0 %" in row.cut


@pytest.mark.parametrize(
    ("accuracy", "words"),
    [(1.0, "control: without it 100.0 % (also meets the bound)"), (0.1, "control: without it 10.0 %")],
)
def test_a_control_is_beside_the_claim_and_says_whether_it_does_as_well(accuracy: float, words: str) -> None:
    records = of_seeds(1.0, 1.0) + of_seeds(accuracy, run="b")
    row = row_of(records, controls=(Control("without it", {"run": "b"}), Control("another", {"run": "c"})))
    assert row.essential == (words, "control not run: another")


def test_a_sentence_from_the_reading_note_is_marked_in_the_table() -> None:
    assert row_of(of_seeds(1.0)).paper == f"solved (Fig. 3) {FROM_NOTE}"
    assert FROM_NOTE not in row_of(of_seeds(1.0), mark="paper").paper


def test_of_two_experiments_the_one_that_ran_a_claim_has_it() -> None:
    tested, not_run = entry_of(of_seeds(1.0)), entry_of(of_seeds(1.0), scale="paper")
    assert merged([[not_run], [tested]]) == [tested]
    assert merged([[tested], [not_run]]) == [tested]


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
    assert sum(claim.mark == "secondary" for claim in stated) == 21
