"""Duality, convergence, perplexity by position and the two protocols of CatbAbI in the report, from made-up runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from implicit_llm_report.figures.by_position import perplexity_by_position
from implicit_llm_report.inputs.frame import frame_of, groups
from implicit_llm_report.inputs.published import load_published
from tests.unit.report.sample_language_runs import LanguageRun, family, make_babi_runs, make_language_runs
from tests.unit.report.sample_runs import Record, finish, given_of, make_report, rows_of

MAMBA2 = family("mamba2", "implicit_mamba2", seeds=(0, 1))[:2]
PAIRS = (("blockwise", "sequential"), ("simultaneous", "sequential"), ("simultaneous", "blockwise"))
CURVE = {
    "f_evaluations": [1, 2, 4, 8],
    "residual_sequence_median": [1.0, 0.3, 0.05, 0.002], "residual_sequence_q90": [1.0, 0.4, 0.1, 0.01],
    "residual_token_median": [1.0, 0.3, 0.04, 0.0], "residual_token_q90": [1.0, 0.5, 0.2, 0.03],
    "unconverged_share": [1.0, 1.0, 0.4, 0.0], "agreement_with_last": [0.2, 0.6, 0.9, 1.0],
}  # fmt: skip


def duality_records(run: LanguageRun, phase: str, seed: int) -> list[Record]:
    """Pairs of modes and a convergence of an implicit run; the yardstick of an explicit one."""
    about: Record = {
        "kind": "duality", "run": run.name, "seed": seed, "phase": phase, "is_implicit": run.is_implicit,
        "model_type": run.model_type, "num_parameters": run.num_parameters, "data": "text-test", "length": 128,
        "num_tokens": 4096, "eval_tol": 0.05 if run.is_implicit else None, "sweep": None,
    }  # fmt: skip
    measured = {"logit_distance_mean": 0.1, "logit_distance_max": 2.5, "logit_std": 3.0, "kl": 0.008}
    cost = {"f_evaluations_per_token": 8.0, "against_f_evaluations_per_token": 7.0, "unconverged_share": 0.2}
    if not run.is_implicit:
        pair = {"measure": "pair", "mode": "parallel", "against": "sequential", "eval_mode": None}
        exact = dict.fromkeys(measured, 1e-9) | {"token_agreement": 1.0, "logit_std": 3.0}
        return [about | pair | exact | {"f_evaluations_per_token": 1.0, "against_f_evaluations_per_token": 1.0}]
    measured |= cost | {"measure": "pair", "token_agreement": 0.97 - 0.01 * seed}
    pairs = [about | measured | {"mode": mode, "against": against, "eval_mode": mode} for mode, against in PAIRS]
    swept = pairs[0] | {"mode": "blockwise@eval_max_iter=1", "token_agreement": 0.5}
    swept |= {"sweep": {"base": "blockwise", "key": "eval_max_iter", "value": 1}}
    trace = about | {"measure": "convergence", "mode": "simultaneous", "against": None, "convergence": CURVE}
    return [*pairs, swept, trace]


def make_duality_runs(results: Path, change: Any = lambda record: record) -> dict[str, Path]:
    roles = {}
    for run in MAMBA2:
        phase = "free-80" if run.is_implicit else "explicit"
        for seed in run.seeds:
            name = f"{run.name}-s{seed}/{phase}/duality"
            folder = results / "evaluate" / name
            records = [change(record) for record in duality_records(run, phase, seed)]
            finish(folder, "evaluate", name, {"kind": "duality"}, {}, {"metrics.json": {"records": records}})
            roles[f"evaluate:{name}"] = folder
    return roles


def figure_of(made: Path, name: str) -> str:
    found = re.search(rf'id="figure-{name}".*?</figure>', (made / "index.html").read_text(), re.DOTALL)
    assert found is not None
    return found[0]


def legend_of(figure: str) -> Sequence[str]:
    return re.findall(r"</svg>\s*(.*?)</li>", figure.split('<div class="panels')[0], re.DOTALL)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("duality")
    roles = make_language_runs(folder / "results", MAMBA2) | make_duality_runs(folder / "results")
    changes = [{}, {"protocol": "carried", "accuracy": 0.3, "accuracy_by_task": {"1": 0.3}}]
    roles |= make_babi_runs(folder / "results", tasks=(1, 8), changes=changes)
    return make_report(folder, roles)


def test_every_pair_of_modes_has_agreement_distance_divergence_seeds_and_cost(made: Path) -> None:
    rows = rows_of(made, "duality")
    found = [(row["run"], row["mode"], row["against"]) for row in rows]
    implicit, explicit = MAMBA2[0].name, MAMBA2[1].name
    assert found == [*((implicit, *pair) for pair in PAIRS), (explicit, "parallel", "sequential")]
    assert {row["num_seeds"] for row in rows} == {"2"}
    assert float(rows[0]["token_agreement_mean"]) == pytest.approx(0.965)
    assert (float(rows[0]["token_agreement_low"]), float(rows[0]["token_agreement_high"])) == (0.96, 0.97)
    assert rows[0]["kl_mean"] == "0.008"
    assert rows[0]["against_f_evaluations_per_token_mean"] == "7.0"
    assert {row["published"] for row in rows} == {""}  # none of this size
    assert "0.965 (0.960--0.970)" in (made / "tables" / "duality.tex").read_text()


def test_published_agreement_stands_beside_simultaneous_against_sequential_at_its_size(tmp_path: Path) -> None:
    def at_the_papers_scale(record: Record) -> Record:
        return record | {"num_parameters": 1_350_000_000}

    roles = make_duality_runs(tmp_path / "results", at_the_papers_scale)
    made = make_report(tmp_path, roles, figures=(), tables=("duality",))
    beside = {(row["mode"], row["against"]): row["published"] for row in rows_of(made, "duality")}
    assert beside.pop(("simultaneous", "sequential")) == "0.976"
    assert set(beside.values()) == {""}
    assert "published 0.976" in (made / "index.html").read_text()


def test_published_agreement_is_marked_as_from_a_secondary_source() -> None:
    (number,) = load_published().duality
    assert (number.value, number.num_tokens, number.mark) == (0.976, 3_000_000, "secondary")
    explicit = {
        "role": "r",
        "eval_mode": None,
        "against": "sequential",
        "model_type": "implicit_mamba2",
        "num_parameters": 1.36e9,
    }
    (pair,) = groups(frame_of({"duality": [explicit]}, {}), ("kind",))
    assert not number.is_beside(pair)


def test_convergence_has_residuals_with_the_tolerance_and_agreement_by_evaluations(made: Path) -> None:
    figure = figure_of(made, "convergence-by-iteration")
    assert legend_of(figure) == [MAMBA2[0].name]
    assert "tolerance 0.05" in figure
    assert figure.count("f-evaluations per token") == 2
    assert "relative residual of a token" in figure


def test_diverged_convergence_and_missing_agreement_are_missing_and_not_zero(tmp_path: Path) -> None:
    def diverged(record: Record) -> Record:
        lost = {"token_agreement": None, "kl": None, "logit_distance_mean": None, "num_tokens": 0}
        return record | ({"convergence": None} if record["measure"] == "convergence" else lost)

    roles = make_duality_runs(tmp_path / "results", diverged)
    made = make_report(tmp_path, roles, figures=("convergence-by-iteration",), tables=("duality",))
    assert {row["token_agreement_mean"] for row in rows_of(made, "duality")} == {""}
    assert "missing" in figure_of(made, "convergence-by-iteration")
    assert "missing & missing" in (made / "tables" / "duality.tex").read_text()


def test_perplexity_by_position_shows_the_longest_rows_and_all_modes_of_the_last_implicit_phase(made: Path) -> None:
    figure = figure_of(made, "perplexity-by-position")
    assert legend_of(figure) == [
        "implicit (4+1), blockwise",
        "implicit (24+4), blockwise",
        "implicit (24+4), sequential",
        "implicit (24+4), published",
        "explicit",
    ]
    assert figure.count("tokens before the predicted one") == 1
    assert ">512</text>" in figure


def test_bins_of_few_tokens_are_left_out() -> None:
    curve = {"start": [1, 2, 3], "end": [1, 2, 4], "loss": [4.0, 3.0, 2.0], "num_tokens": [100, 256, 300]}
    record = {"role": "r", "run": "x", "seed": 0, "data": "d", "length": 4, "mode": "parallel", "perplexity": 2.0}
    figure = perplexity_by_position(given_of({"perplexity": [record | {"loss_by_position": curve}]}))
    assert figure is not None
    axis = Figure().subplots()
    figure.panels[0].draw(axis)
    assert [line.get_xdata().tolist() for line in axis.lines] == [pytest.approx([2.0, 12**0.5])]


def test_record_without_a_curve_is_named_as_missing(tmp_path: Path) -> None:
    def no_curve(record: Record) -> Record:
        return record | ({"loss_by_position": None} if record["mode"] == "sequential" else {})

    runs = [replace(run, seeds=(0,)) for run in MAMBA2]
    name, roles = "perplexity-by-position", make_language_runs(tmp_path / "results", runs, no_curve)
    figure = figure_of(make_report(tmp_path, roles, figures=(name,)), name)
    assert "missing: implicit (24+4), sequential" in figure.replace("\n", " ")


def test_protocols_of_catbabi_are_tables_of_their_own_and_the_windowed_one_speaks(made: Path) -> None:
    rows = [row for row in rows_of(made, "babi") if (row["run"], row["split"]) == ("babi-implicit", "test")]
    windowed, carried = ([row for row in rows if row["protocol"] == name] for name in ("windowed", "carried"))
    assert [row["task"] for row in windowed] == ["all questions", "1", "8"]
    assert float(carried[0]["accuracy_mean"]) == 0.3
    assert float(windowed[0]["accuracy_mean"]) > 0.4
    assert (windowed[1]["lm_accuracy_mean"], windowed[1]["lm_perplexity_mean"]) == ("0.6", "3.5")
    text = (made / "index.html").read_text()
    assert "<h4>babi-test, every row from an empty state</h4>" in text
    assert "<h4>babi-test, state carried over all stories</h4>" in text
    assert "0.300" not in figure_of(made, "accuracy-by-babi-task")
