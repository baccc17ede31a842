from __future__ import annotations

from implicit_llm.report.natural_order import natural


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
