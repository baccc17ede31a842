"""Numbers, times and shares as people read them."""

import pytest

from implicit_llm_workflow.estimates.cost import Cost
from implicit_llm_workflow.text import number_text, share_text, time_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (12345, "12,345"),
        (1e-7, "1e-07"),
        (0.123456, "0.1235"),
        (5061.3, "5,061"),
        (2.5e12, "2.5e+12"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number_text(value) == text


def test_times_shares_and_costs_have_a_unit_that_fits() -> None:
    times = {None: "-", 0: "0 s", 89: "89 s", 90: "2 min", 5000: "83 min", 6000: "1.7 h", 86400 * 20: "20 d"}
    assert {seconds: time_text(seconds) for seconds in times} == times
    shares = {None: "-", 0.0: "0 %", 0.004: "0.4 %", 0.5: "50 %", 1.0: "100 %"}
    assert {share: share_text(share) for share in shares} == shares
    costs = [("cpu", 12 / 3600), ("cpu", 0.5), ("cpu", 3), ("gpu", 0.5), ("gpu", 12345.6), (None, None)]
    texts = ["12 s CPU", "30 min CPU", "3.0 h CPU", "0.5 GPU-hours", "12,346 GPU-hours", "-"]
    assert [Cost(unit, hours, "x", "y").text for unit, hours in costs] == texts  # type: ignore[arg-type]
