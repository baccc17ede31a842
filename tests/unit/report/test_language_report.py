"""The report of language models and CatbAbI, from made-up runs with branches and three seeds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from implicit_llm_report.inputs.published import load_published
from tests.unit.report.sample_language_runs import family, make_babi_runs, make_language_runs
from tests.unit.report.sample_runs import Record, SampleRun, make_report, make_runs, rows_of
from tests.unit.report.test_report_stage import Page

MAMBA2 = family("mamba2", "implicit_mamba2", seeds=(0, 1, 2))
TRAINING_FIGURES = {"training-curves", "solver-health", "spectral-radius"}
PERPLEXITY_FIGURES = {"perplexity-by-length", "perplexity-by-position"}
TABLE: dict[str, Any] = {"figures": (), "tables": ("perplexity",)}
FLOPS = TABLE | {"figures": ("loss-by-flops",)}
LANGUAGE_FIGURES = PERPLEXITY_FIGURES | {"loss-by-flops"} | TRAINING_FIGURES


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a report of three Mamba2 runs of three seeds, and of CatbAbI."""
    folder = tmp_path_factory.mktemp("language")
    roles = make_language_runs(folder / "results", MAMBA2) | make_babi_runs(folder / "results")
    return make_report(folder, roles)


def held_out(made: Path, **wanted: str) -> list[dict[str, str]]:
    rows = rows_of(made, "perplexity")
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def test_report_without_word_problems_has_only_its_own_figures_and_tables(made: Path) -> None:
    figures = {path.stem for path in (made / "figures").glob("*.svg")}
    assert figures == LANGUAGE_FIGURES | {"accuracy-by-babi-task"}
    tables = {path.name for path in (made / "tables").iterdir()}
    assert tables == {f"{name}.{form}" for name in ("perplexity", "babi", "published") for form in ("csv", "tex")}
    text = (made / "index.html").read_text()
    assert "last ten tokens, mean over seeds" not in text
    assert "best constant answer</td>" not in text


def test_word_problems_alone_have_no_sections_of_language_models(tmp_path: Path) -> None:
    runs = (SampleRun("a5-explicit", "A5", False, 0.2, (0.2,), steps=100, lengths=(16,)),)
    made = make_report(tmp_path, make_runs(tmp_path / "results", runs))
    text = (made / "index.html").read_text()
    assert "held-out text" not in text.split('id="claims"')[0]
    assert "at all questions, from other papers" not in text
    assert {path.stem for path in (made / "tables").iterdir()} == {"accuracy", "published"}


def test_page_is_whole_and_links_to_itself_only(made: Path) -> None:
    page = Page((made / "index.html").read_text())
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert page.open == []
    for path in (made / "figures").glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_phases_of_one_run_are_lines_of_their_own_without_the_words_that_all_share(
    made: Path,
) -> None:
    figure = re.search(r'id="figure-perplexity-by-length".*?</figure>', (made / "index.html").read_text(), re.DOTALL)
    assert figure is not None
    legend = re.findall(r"</svg>\s*(.*?)</li>", figure[0].split('<div class="panels')[0], re.DOTALL)
    assert legend == [
        "implicit (4+1)",
        "implicit (24+4)",
        "explicit",
        "explicit-long",
    ]


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
    runs = [replace(run, has_flops=False, seeds=(0,)) for run in MAMBA2[:2]]
    made = make_report(tmp_path, make_language_runs(tmp_path / "results", runs, without_flops), **FLOPS)
    assert "train_flops" not in rows_of(made, "perplexity")[0]
    figure = re.search(r'id="figure-loss-by-flops".*?</figure>', (made / "index.html").read_text(), re.DOTALL)
    assert figure is not None
    assert ">missing</text>" in figure[0]


def without_flops(record: Record) -> Record:
    return record | {"train_flops": None}


def test_missing_perplexity_is_shown_as_missing_and_never_as_zero(tmp_path: Path) -> None:
    def too_short(record: Record) -> Record:
        return record | ({"loss": None, "perplexity": None, "num_tokens": 0} if record["length"] == 512 else {})

    runs = [replace(run, seeds=(0,)) for run in MAMBA2]
    made = make_report(tmp_path, make_language_runs(tmp_path / "results", runs, too_short))
    assert {row["perplexity_mean"] for row in held_out(made, length="512")} == {""}
    text = (made / "index.html").read_text()
    assert "missing</span>" in text.split('id="numbers"')[1].split('id="training"')[0]
    assert "missing: " in text
    assert "missing" in (made / "tables" / "perplexity.tex").read_text()
    claims = {claim["id"]: claim for claim in json.loads((made / "claims.json").read_text())["claims"]}
    assert claims["implicit-extrapolates-mamba2"]["verdict"] == "missing"


def test_claims_on_language_models_are_judged_by_family(made: Path) -> None:
    claims = {claim["id"]: claim for claim in json.loads((made / "claims.json").read_text())["claims"]}
    assert claims["free-below-explicit-mamba2"]["verdict"] == "holds"
    assert claims["free-below-explicit-mamba2"]["num_seeds"] == 3
    assert len(claims["free-below-explicit-mamba2"]["sources"]) == 6
    assert claims["free-below-explicit-at-equal-flops-mamba2"]["verdict"] == "fails"
    assert claims["free-below-explicit-llama"]["verdict"] == "not run at this scale"
    assert claims["implicit-better-on-most-babi-tasks"]["measured"]["mean"] == 1.0


def test_long_journals_make_small_figures(tmp_path: Path) -> None:
    run = replace(MAMBA2[1], steps=20_000, seeds=(0,))
    names = ("loss-by-flops", "training-curves")
    made = make_report(tmp_path, make_language_runs(tmp_path / "results", (run,)), figures=names)
    for name in names:
        assert (made / "figures" / f"{name}.svg").stat().st_size < 60_000


def test_accuracy_of_every_task_and_of_all_questions_is_in_figure_and_tables(made: Path) -> None:
    rows = [row for row in rows_of(made, "babi") if (row["run"], row["split"]) == ("babi-implicit", "test")]
    assert [row["task"] for row in rows] == ["all questions", *(str(task) for task in range(1, 21))]
    assert {row["num_seeds"] for row in rows} == {"2"}
    assert rows[0]["protocol"] == "windowed"
    figure = re.search(r'id="figure-accuracy-by-babi-task".*?</figure>', (made / "index.html").read_text(), re.DOTALL)
    assert figure is not None
    assert [tick for tick in ("all", "1", "20") if f">{tick}</text>" not in figure[0]] == []
    assert "20. agent's motivations" in (made / "tables" / "babi.tex").read_text()


def test_validation_set_of_catbabi_is_shown_nowhere(made: Path) -> None:
    for name in ("tables/babi.csv", "figures/accuracy-by-babi-task.svg", "claims.json"):
        assert "babi-valid" not in (made / name).read_text()


def test_published_perplexity_stands_beside_a_run_of_its_size_tokens_solver_and_length(tmp_path: Path) -> None:
    def at_the_papers_scale(record: Record) -> Record:
        return record | {"num_parameters": 790_000_000, "train_tokens": 207e9, "length": 16 * record["length"]}

    runs = [replace(run, seeds=(0,)) for run in MAMBA2[:2]]
    made = make_report(tmp_path, make_language_runs(tmp_path / "results", runs, at_the_papers_scale), **TABLE)
    beside = {(row["phase_label"], row["length"]): row["published"] for row in held_out(made) if row["published"]}
    assert beside == {("", "2048"): "8.98", ("(4+1)", "2048"): "8.6", ("(24+4)", "2048"): "8.35"}
    assert "published 8.35" in (made / "index.html").read_text()


def test_published_perplexities_are_those_of_the_paper() -> None:
    numbers = {number.id: number for number in load_published().perplexities}
    values = {
        key: numbers[f"d-pile-{key}"].value for key in ("llama-1.3b-32-4", "mamba2-760m-24-4", "llama-760m-explicit")
    }
    assert values == {"llama-1.3b-32-4": 7.24, "mamba2-760m-24-4": 8.35, "llama-760m-explicit": 8.88}
    assert all(isinstance(number.value, float) and number.value > 1 for number in numbers.values())


def test_word_problems_of_several_phases_are_told_apart(tmp_path: Path) -> None:
    roles: dict[str, Any] = {}
    for phase in ("unrolled", "free"):
        runs = (SampleRun("a5-implicit", "A5", True, 0.2, (0.2,), steps=100, lengths=(16,)),)
        made = make_runs(tmp_path / "results", runs, lambda record: record)
        roles |= {role: path for role, path in made.items() if role.startswith("train:")}
        evaluated = make_runs(tmp_path / phase, runs)
        role = next(role for role in evaluated if role.startswith("evaluate:"))
        folder = evaluated[role]
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["name"] = f"a5-implicit-s0/{phase}/word-problem"
        (folder / "manifest.json").write_text(json.dumps(manifest))
        roles[f"evaluate:{manifest['name']}"] = folder
    made_report = make_report(tmp_path, roles, figures=(), tables=("accuracy",))
    names = {row["name"] for row in rows_of(made_report, "accuracy")}
    assert names == {"a5-implicit (unrolled 4)", "a5-implicit (16+4)"}


def test_each_model_says_how_many_tokens_it_read(tmp_path: Path) -> None:
    def few_rows(record: Record) -> Record:
        if record["mode"] == "simultaneous":
            return record | {"loss": None, "perplexity": None, "num_tokens": 0}
        return record | ({"num_tokens": 254} if record["mode"] == "sequential" else {})

    runs = [replace(run, seeds=(0,)) for run in MAMBA2[:2]]
    made = make_report(tmp_path, make_language_runs(tmp_path / "results", runs, few_rows), **TABLE)
    page = (made / "index.html").read_text()
    assert "sequential, 1 seed, 226,000 parameters, 254 tokens read" in page
    assert "blockwise, 1 seed, 226,000 parameters, 65,024 tokens read" in page
