from __future__ import annotations

from implicit_llm_contracts.hints import natural
from implicit_llm_report.test_time import swept_panels
from tests.unit.report.sample_runs import given_of


def test_numbers_in_names_are_counted() -> None:
    names = [
        "s5-explicit-layers16",
        "a5m-test-L1024-h0.1",
        "s5-explicit-layers4",
        "a5m-test-L256-h0.5",
        "s5",
        "a5m-test-L256-h0.1",
    ]
    assert sorted(names, key=natural) == [
        "a5m-test-L256-h0.1",
        "a5m-test-L256-h0.5",
        "a5m-test-L1024-h0.1",
        "s5",
        "s5-explicit-layers4",
        "s5-explicit-layers16",
    ]


def test_panels_of_shorter_sequences_come_first() -> None:
    about = {"run": "a5m", "phase": "free", "seed": 0, "is_implicit": True, "group": "A5", "monoid": "aperiodic"}
    about |= {"train_length": 256, "train_hard_fraction": 0.1, "hard_fraction": 0.1, "accuracy_last10": 1.0}
    records = [
        about
        | {"role": "evaluate:a5m-s0/free/compute", "data": f"a5m-test-L{length}-h0.1", "length": length}
        | {
            "mode": "blockwise@eval_tol=0.1",
            "eval_tol": 0.1,
            "sweep": {"key": "eval_tol", "value": 0.1, "base": "blockwise"},
        }
        for length in (1024, 256)
    ]
    panels = swept_panels(given_of({"word_problem": records}))
    assert [panel.title.rpartition(" ")[2] for panel in panels] == ["256", "1024"]
