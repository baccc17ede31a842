"""The report of language models: perplexity, CatbAbI and its protocols, duality and convergence, from made-up runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from implicit_llm_report.figures.language_models import perplexity_by_position
from tests.unit.report.sample_language_runs import LanguageRun, family, make_babi_runs, make_language_runs
from tests.unit.report.sample_runs import (
    Record,
    claims_of,
    evaluated,
    figure_of,
    given_of,
    legend_of,
    make_report,
    names_in,
    page_of,
    rows_of,
)
from tests.unit.report.test_report_stage import see_that_the_page_is_whole

MAMBA2 = family("mamba2", "implicit_mamba2", seeds=(0, 1, 2))
ONE_SEED = [replace(run, seeds=(0,)) for run in MAMBA2[:2]]
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
    swept = (
        pairs[0]
        | {"mode": "blockwise@eval_max_iter=1", "token_agreement": 0.5}
        | {"sweep": {"base": "blockwise", "key": "eval_max_iter", "value": 1}}
    )
    trace = about | {"measure": "convergence", "mode": "simultaneous", "against": None, "convergence": CURVE}
    trace |= {"eval_mode": "simultaneous"}
    return [*pairs, swept, trace]


def make_duality_runs(results: Path, change: Any = dict) -> dict[str, Path]:
    roles: dict[str, Path] = {}
    for run in MAMBA2[:2]:
        phase = "free-80" if run.is_implicit else "explicit"
        for seed in run.seeds:
            records = [change(record) for record in duality_records(run, phase, seed)]
            roles |= evaluated(results, f"{run.name}-s{seed}/{phase}/duality", "duality", records)
    return roles


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a report of three Mamba2 runs of three seeds, of their duality, and of CatbAbI in both protocols."""
    folder = tmp_path_factory.mktemp("language")
    roles = make_language_runs(folder / "results", MAMBA2) | make_duality_runs(folder / "results")
    changes = [{}, {"protocol": "carried", "accuracy": 0.3, "accuracy_by_task": {"1": 0.3}}]
    return make_report(folder, roles | make_babi_runs(folder / "results", changes=changes))


def report_of(folder: Path, change: Any = dict, figures: Any = (), tables: Any = ("perplexity",)) -> Path:
    """Of one seed of the implicit run and the explicit one of equal tokens."""
    return make_report(folder, make_language_runs(folder / "results", ONE_SEED, change), figures=figures, tables=tables)


def held_out(made: Path, **wanted: str) -> list[dict[str, str]]:
    rows = rows_of(made, "perplexity")
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def test_report_without_word_problems_has_only_its_own_figures_and_tables(made: Path) -> None:
    see_that_the_page_is_whole(made)
    assert names_in(made, "figures") == {
        "perplexity-by-length", "perplexity-by-position", "loss-by-flops", "training-curves", "solver-health",
        "spectral-radius", "convergence-by-iteration", "accuracy-by-babi-task",
    }  # fmt: skip
    assert names_in(made, "tables") == {"perplexity", "babi", "duality", "published"}
    text = page_of(made)
    assert "last ten tokens, mean over seeds" not in text
    assert "best constant answer</td>" not in text
    for path in (made / "figures").glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_phases_of_one_run_are_lines_of_their_own_without_the_words_that_all_share(made: Path) -> None:
    legend = legend_of(figure_of(made, "perplexity-by-length"))
    assert legend == ["implicit (4+1)", "implicit (24+4)", "explicit", "explicit-long"]


def test_each_perplexity_has_mode_seeds_spread_tokens_and_flops(made: Path) -> None:
    (bounded,) = held_out(made, phase_label="(4+1)", mode="blockwise", length="128")
    (free,) = held_out(made, phase_label="(24+4)", mode="blockwise", length="128")
    assert bounded["num_seeds"] == "3"
    assert float(bounded["perplexity_low"]) < float(bounded["perplexity_mean"]) < float(bounded["perplexity_high"])
    assert float(bounded["train_tokens"]) == 500 * 16 * 128
    # Per token 2.4 times an explicit model's FLOPs, 5.2 times in the free fifth.
    ratio = float(free["train_flops"]) / float(bounded["train_flops"])
    assert ratio == pytest.approx((0.8 * 2.4 + 0.2 * 5.2) / 2.4, rel=1e-4)
    assert float(free["perplexity_within_documents_mean"]) < float(free["perplexity_mean"])


def test_runs_without_flops_have_none_in_table_and_figure(tmp_path: Path) -> None:
    runs = [replace(run, has_flops=False) for run in ONE_SEED]
    roles = make_language_runs(tmp_path / "results", runs, lambda record: record | {"train_flops": None})
    made = make_report(tmp_path, roles, figures=("loss-by-flops",), tables=("perplexity",))
    assert "train_flops" not in rows_of(made, "perplexity")[0]
    assert ">missing</text>" in figure_of(made, "loss-by-flops")


def test_missing_perplexity_is_shown_as_missing_and_never_as_zero(tmp_path: Path) -> None:
    def too_short(record: Record) -> Record:
        return record | ({"loss": None, "perplexity": None, "num_tokens": 0} if record["length"] == 512 else {})

    made = report_of(tmp_path, too_short, figures=("perplexity-by-length",))
    assert {row["perplexity_mean"] for row in held_out(made, length="512")} == {""}
    text = page_of(made)
    assert "missing</span>" in text.split('id="numbers"')[1]
    assert "missing: " in text
    assert "blockwise, 1 seed, 226,000 parameters, 65,024 tokens read" in text
    assert "missing" in (made / "tables" / "perplexity.tex").read_text()
    assert claims_of(made)["implicit-extrapolates-mamba2"]["verdict"] == "missing"


def test_claims_on_language_models_are_judged_by_family(made: Path) -> None:
    claims = claims_of(made)
    below = claims["free-below-explicit-mamba2"]
    assert (below["verdict"], below["num_seeds"], len(below["sources"])) == ("reproduced", 3, 6)
    assert claims["free-below-explicit-at-equal-flops-mamba2"]["verdict"] == "not reproduced"
    assert claims["free-below-explicit-llama"]["verdict"] == "not run"
    assert claims["implicit-better-on-most-babi-tasks"]["measured"]["mean"] == 1.0


def test_protocols_of_catbabi_are_tables_of_their_own_and_the_windowed_one_speaks(made: Path) -> None:
    rows = [row for row in rows_of(made, "babi") if (row["run"], row["split"]) == ("babi-implicit", "test")]
    windowed, carried = ([row for row in rows if row["protocol"] == name] for name in ("windowed", "carried"))
    assert [row["task"] for row in windowed] == ["all questions", *(str(task) for task in range(1, 21))]
    assert {row["num_seeds"] for row in windowed} == {"2"}
    assert float(carried[0]["accuracy_mean"]) == 0.3
    assert float(windowed[0]["accuracy_mean"]) > 0.4
    assert (windowed[1]["lm_accuracy_mean"], windowed[1]["lm_perplexity_mean"]) == ("0.6", "3.5")
    text, figure = page_of(made), figure_of(made, "accuracy-by-babi-task")
    assert "<h4>babi-test, every row from an empty state</h4>" in text
    assert "<h4>babi-test, state carried over all stories</h4>" in text
    assert "0.300" not in figure
    assert "missing" not in figure
    assert [tick for tick in ("all", "1", "20") if f">{tick}</text>" not in figure] == []
    assert "20. agent's motivations" in (made / "tables" / "babi.tex").read_text()
    shown = ("tables/babi.csv", "figures/accuracy-by-babi-task.svg", "claims.json")
    assert [name for name in shown if "babi-valid" in (made / name).read_text()] == []


def test_published_perplexity_stands_beside_a_run_of_its_size_tokens_solver_and_length(tmp_path: Path) -> None:
    def at_the_papers_scale(record: Record) -> Record:
        return record | {"num_parameters": 790_000_000, "train_tokens": 207e9, "length": 16 * record["length"]}

    made = report_of(tmp_path, at_the_papers_scale)
    beside = {(row["phase_label"], row["length"]): row["published"] for row in held_out(made) if row["published"]}
    assert beside == {("", "2048"): "8.98", ("(4+1)", "2048"): "8.6", ("(24+4)", "2048"): "8.35"}
    assert "published 8.35" in page_of(made)


def test_every_pair_of_modes_has_agreement_distance_divergence_seeds_and_cost(made: Path) -> None:
    rows = rows_of(made, "duality")
    found = [(row["run"], row["mode"], row["against"]) for row in rows]
    implicit, explicit = MAMBA2[0].name, MAMBA2[1].name
    assert found == [*((implicit, *pair) for pair in PAIRS), (explicit, "parallel", "sequential")]
    assert {row["num_seeds"] for row in rows} == {"3"}
    assert float(rows[0]["token_agreement_mean"]) == pytest.approx(0.96)
    assert (float(rows[0]["token_agreement_low"]), float(rows[0]["token_agreement_high"])) == (0.95, 0.97)
    assert rows[0]["kl_mean"] == "0.008"
    assert rows[0]["against_f_evaluations_per_token_mean"] == "7.0"
    assert {row["published"] for row in rows} == {""}  # none of this size
    assert "0.960 (0.950--0.970)" in (made / "tables" / "duality.tex").read_text()


def test_published_agreement_stands_beside_simultaneous_against_sequential_at_its_size(tmp_path: Path) -> None:
    roles = make_duality_runs(tmp_path / "results", lambda record: record | {"num_parameters": 1_350_000_000})
    made = make_report(tmp_path, roles, figures=(), tables=("duality",))
    beside = {(row["mode"], row["against"]): row["published"] for row in rows_of(made, "duality")}
    assert beside.pop(("simultaneous", "sequential")) == "0.976"
    assert set(beside.values()) == {""}
    assert "published 97.6\u00a0%" in page_of(made)


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


def test_perplexity_by_position_shows_the_longest_rows_in_the_mode_that_stands_for_each_model(made: Path) -> None:
    figure = figure_of(made, "perplexity-by-position")
    assert legend_of(figure) == [
        "implicit (4+1)",
        "implicit (24+4)",
        "explicit",
        "explicit-long",
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
        return record | ({"loss_by_position": None} if record["mode"] == "blockwise" else {})

    made = report_of(tmp_path, no_curve, figures=("perplexity-by-position",))
    figure = figure_of(made, "perplexity-by-position")
    assert "missing: implicit (4+1)" in figure.replace("\n", " ")
