from __future__ import annotations

import pytest

from implicit_llm_report.axes import power_of_ten
from implicit_llm_report.model_groups import Model, group_models, short_count


def model(run: str, num_parameters: int | None = 100, **changes: object) -> Model:
    fields = {"is_implicit": "implicit" in run, "model_type": "implicit_mamba2"} | changes
    return Model(run, num_parameters=num_parameters, **fields)  # type: ignore[arg-type]


def test_published_ladder_is_kept_apart_and_implicit_models_join_explicit_ones_of_their_size() -> None:
    sizes = {"130m": (129_000_000, 131_600_000), "370m": (370_000_000, 372_800_000), "760m": (780_000_000, 790_100_000)}
    models = [
        model(f"{name}-{kind}", count)
        for name, counts in sizes.items()
        for kind, count in zip(("explicit", "implicit"), counts, strict=True)
    ]
    assert [group.runs for group in group_models(models)] == [
        (f"{name}-implicit", f"{name}-explicit") for name in sizes
    ]


def test_families_and_data_sets_are_not_mixed() -> None:
    models = [model("a"), model("b", model_type="implicit_llama3"), model("c", data="other")]
    assert [group.runs for group in group_models(models)] == [("b",), ("a",), ("c",)]


def test_lines_are_named_by_what_tells_them_apart() -> None:
    names = ("text-mamba2-implicit", "text-mamba2-explicit", "text-mamba2-explicit-long")
    (group,) = group_models([model(name) for name in names])
    phases = {"bounded": "(4+1)", "free-80": "(24+4)"}
    assert group.name(names[0], "bounded", "(4+1)", phases, is_implicit=True) == "implicit (4+1)"
    assert group.name(names[0], "free-80", "(24+4)", phases, is_implicit=True) == "implicit (24+4)"
    branches = phases | {"free-70": "(24+4)"}
    assert group.name(names[0], "free-80", "(24+4)", branches, is_implicit=True) == "implicit (24+4) free-80"
    for name in names[1:]:
        assert group.name(name, "explicit", None, {}, is_implicit=False) == name


@pytest.mark.parametrize(
    ("count", "words"),
    [(131_600_000, "131.6M"), (1_361_200_000, "1.361B"), (207e9, "207B"), (41_856, "41.86k"), (12, "12")],
)
def test_counts_are_short(count: float, words: str) -> None:
    assert short_count(count) == words


@pytest.mark.parametrize(("value", "words"), [(1e15, "10¹⁵"), (2e15, "2·10¹⁵"), (1000.0, "10³"), (3e-4, "3·10⁻⁴")])
def test_powers_of_ten_are_raised(value: float, words: str) -> None:
    assert power_of_ten(value) == words
