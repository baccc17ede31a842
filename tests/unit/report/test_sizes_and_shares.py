"""Figures over several models: by parameters, by the share of the bounded phase, by the share of hard tokens."""

from pathlib import Path

import pandas as pd
import pytest

from implicit_llm_report.figures.word_problems import without_fraction_sweep
from implicit_llm_report.inputs.frame import model_titles, serial_steps, short_count
from tests.unit.report.sample_language_runs import LanguageRun, make_language_runs
from tests.unit.report.sample_runs import (
    Record,
    SampleRun,
    claims_of,
    figure_of,
    given_of,
    make_report,
    make_runs,
    names_in,
    page_of,
)

NAMES = ("perplexity-by-parameters", "curriculum")


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two sizes of Mamba2, the larger one with three branches."""
    small = {"seeds": (0,), "steps": 200, "num_parameters": 90_000}
    large = {"seeds": (0,), "steps": 200, "num_parameters": 226_000}
    runs = (
        LanguageRun("small-implicit", "implicit_mamba2", True, gain=0.09, **small),
        LanguageRun("small-explicit", "implicit_mamba2", False, **small),
        LanguageRun("text-implicit", "implicit_mamba2", True, gain=0.09, branches=(0.7, 0.8, 0.9), **large),
        LanguageRun("text-explicit", "implicit_mamba2", False, **large),
    )
    return make_language_runs(tmp_path_factory.mktemp("sizes"), runs)


def test_sizes_and_branches_have_their_figures_and_the_claim_on_branches_is_judged(
    tmp_path: Path, language: dict[str, Path]
) -> None:
    declared = make_report(tmp_path, language, figures=NAMES)
    assert set(NAMES) <= names_in(declared, "figures")
    page = page_of(declared)
    for number in ("70 %", "80 %", "90 %", "100 %", "share of the steps in the bounded phase", "implicit, free phase"):
        assert number in page
    assert claims_of(declared)["eighty-percent-bounded"]["verdict"] in ("reproduced", "not reproduced")


def test_one_size_without_branches_has_neither(tmp_path: Path, language: dict[str, Path]) -> None:
    small = {role: path for role, path in language.items() if "small-" in role}
    assert not set(NAMES) & names_in(make_report(tmp_path, small, figures=NAMES), "figures")


def test_branches_that_leave_at_one_share_are_points_of_their_own(tmp_path: Path) -> None:
    def num_points(*branches: float) -> int:
        run = LanguageRun("text-implicit", "implicit_mamba2", True, steps=200, seeds=(0,), branches=branches)
        folder = tmp_path / str(len(branches))
        roles = make_language_runs(folder / "results", [run])
        svg = make_report(folder, roles, figures=["curriculum"]) / "figures" / "curriculum.svg"
        return svg.read_text().count("<use ")

    assert num_points(0.7, 0.8, 0.802) > num_points(0.7, 0.8)  # 0.802 is also step 160 of 200


def test_a_report_of_one_figure_shows_and_writes_nothing_else(tmp_path: Path, language: dict[str, Path]) -> None:
    declared = make_report(tmp_path, language, figures=["curriculum", "jacobian"], tables=["perplexity"])
    assert names_in(declared, "figures") == {"curriculum"}
    assert names_in(declared, "tables") == {"perplexity"}
    page = page_of(declared)
    assert 'id="figure-curriculum"' in page
    assert 'id="figure-perplexity-by-length"' not in page
    assert 'class="glances"' not in page
    verdicts = {claim["verdict"] for claim in claims_of(declared).values()}
    assert verdicts
    assert "not run" not in verdicts


def test_shares_of_hard_tokens_in_training_have_their_figure(tmp_path: Path) -> None:
    runs = [
        SampleRun(f"a5-{kind}-h{share:g}", "A5", kind == "implicit", share, (0.2,), steps=20, lengths=(16, 64))
        for share in (0.2, 0.5)
        for kind in ("implicit", "explicit")
    ]
    declared = make_report(tmp_path, make_runs(tmp_path / "results", runs), figures=("accuracy-by-hard-fraction",))
    assert "hard tokens in training (%)" in figure_of(declared, "accuracy-by-hard-fraction")


def test_of_many_shares_those_evaluated_in_one_mode_leave_the_figures_by_length() -> None:
    def point(share: float, mode: str, *, is_implicit: bool = True) -> Record:
        kind = "i" if is_implicit else "e"
        record = {
            "run": f"{kind}{share}",
            "seed": 0,
            "is_implicit": is_implicit,
            "group": "A5",
            "monoid": "none",
            "length": 16,
            "hard_fraction": 0.2,
            "train_length": 16,
            "train_hard_fraction": share,
            "mode": mode,
        }
        return record | {"data": "x", "chance_last10": 0.1, "accuracy_last10": 1.0}

    sweep = [point(share, "blockwise") for share in (0.0, 0.1, 0.5, 1.0)]
    sweep += [point(share, "parallel", is_implicit=False) for share in (0.1, 0.5)]

    def shown(records: list[Record]) -> set[str]:
        return set(without_fraction_sweep(given_of({"word_problem": records}).words)["run"])

    assert shown([*sweep, point(0.1, "sequential")]) == {"i0.1", "e0.1"}
    assert shown(sweep[:3]) == {"i0.0", "i0.1", "i0.5"}


@pytest.mark.parametrize(
    ("mode", "eval_mode", "work", "steps"),
    [
        ("sequential", "sequential", 6.0, 6.0),  # every token waits for the one before it
        ("blockwise", "blockwise", 10.0, 10.0 * 4 / 64),
        ("released-criterion", "simultaneous", 40.0, 40.0 / 64),
        ("parallel", None, 1.0, 1 / 64),
    ],
)
def test_serial_depth_counts_the_evaluations_that_wait_for_one_another(
    mode: str, eval_mode: str | None, work: float, steps: float
) -> None:
    record = {
        "run": "a",
        "seed": 0,
        "group": "A5",
        "monoid": "none",
        "data": "x",
        "length": 64,
        "hard_fraction": 0.2,
        "mode": mode,
        "eval_mode": eval_mode,
        "eval_block_len": 16,
        "f_evaluations_per_token": work,
    }
    assert serial_steps(record | {"is_implicit": eval_mode is not None}) == pytest.approx(steps)


def test_published_ladder_is_kept_apart_and_implicit_models_join_explicit_ones_of_their_size() -> None:
    sizes = {"130m": (129_000_000, 131_600_000), "370m": (370_000_000, 372_800_000), "760m": (780_000_000, 790_100_000)}
    models = {f"{name}-{index}": ("Mamba2", size) for name, both in sizes.items() for index, size in enumerate(both)}
    titles = model_titles(models | {"llama": ("Llama", 131_600_000)})
    assert [titles[f"{name}-0"] == titles[f"{name}-1"] for name in sizes] == [True] * 3
    assert len(set(titles.values())) == 4
    assert titles["130m-0"] == "Mamba2, 129M–132M"


@pytest.mark.parametrize(("count", "words"), [(131_600_000, "131.6M"), (207e9, "207B"), (41_856, "41.86k"), (12, "12")])
def test_counts_are_short(count: float, words: str) -> None:
    assert short_count(count) == words


def test_models_trained_at_one_share_and_at_several_stand_side_by_side() -> None:
    models = [("single", 0.2), ("several", (0.0, 0.2)), ("unknown", None)]
    rows = pd.DataFrame(
        [
            {"name": name, "group": "a5", "monoid": None, "train_hard_fraction": share, "mode": mode}
            for name, share in models
            for mode in ("blockwise", "sequential")
        ]
    )
    assert without_fraction_sweep(rows).equals(rows)


def test_an_explicit_model_in_a_sweep_has_no_swept_value() -> None:
    word = {"kind": "word_problem", "role": "a", "run": "e", "seed": 0, "group": "A5", "length": 16, "data": "x"}
    word |= {"is_implicit": False, "mode": "parallel", "accuracy_last10": 0.1}
    swept = {"sweep": {"base": "parallel", "key": None, "value": None}}
    rows = given_of({"word_problem": [word | swept]}).frame
    assert len(rows) > 0
    assert rows[["swept", "at", "extent"]].isna().all(axis=None)
