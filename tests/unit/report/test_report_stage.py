"""What a report writes: the page, figures, tables, claims and numbers.tex; the same again from kept results."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

from implicit_llm_report import stage
from implicit_llm_report.claims.verdicts import counted
from implicit_llm_report.claims.verdicts import rows_of as rows_of_claims
from implicit_llm_report.config import MOST_FIGURES, Front, ReportError
from implicit_llm_report.kept import make_again
from implicit_llm_report.page.front import MOST_LINES, MOST_ROWS, TABLES, front_tables, with_few_models
from implicit_llm_report.page.latex_numbers import latex_number
from implicit_llm_report.page.page import hyperparameters
from implicit_llm_report.sections import ROWS
from tests.unit.report.sample_language_runs import family, make_language_runs
from tests.unit.report.sample_runs import (
    MODES,
    SampleRun,
    claims_of,
    evaluated,
    figure_of,
    finish,
    inputs_of,
    legend_of,
    make_context,
    make_report,
    make_runs,
    names_in,
    page_of,
    rows_of,
)

FIGURES = (
    "accuracy-by-length",
    "accuracy-by-position",
    "accuracy-by-mode",
    "training-curves",
    "solver-health",
    "spectral-radius",
)
SMALL = (
    SampleRun("a5-implicit", "A5", True, 0.2, (0.2,), steps=200, seeds=(0, 1), lengths=(16, 64)),
    SampleRun("a5-explicit", "A5", False, 0.2, (0.2,), steps=200, lengths=(16, 64)),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a report of two runs, one of them with two seeds."""
    return demo_report(tmp_path_factory.mktemp("sample"))


def demo_report(folder: Path, runs: tuple[SampleRun, ...] = SMALL, *, change: Any = dict, **config: Any) -> Path:
    return make_report(folder, make_runs(folder / "results", runs, change), **{"experiment": "demo"} | config)


def see_that_the_page_is_whole(made: Path) -> None:
    """Every link leads to a place on one of the pages, and no id is there twice."""
    ids: dict[str, list[str]] = {}
    links: set[str] = set()
    for path in made.glob("*.html"):
        text = path.read_text().strip().removeprefix("<!doctype html>")
        text = re.sub(r"(<(?:meta|br)\b[^>]*)>", r"\1/>", text)
        elements = list(ElementTree.fromstring(text).iter())  # raises where one is not closed
        ids[path.name] = [one.attrib["id"] for one in elements if "id" in one.attrib]
        found = {link for one in elements for key, link in one.attrib.items() if key.endswith(("href", "src"))}
        links |= {f"{path.name}{link}" if link.startswith("#") else link for link in found}
        assert len(ids[path.name]) == len(set(ids[path.name]))
    assert links
    places = {f"{page}#{name}" for page, names in ids.items() for name in names}
    assert {link for link in links if not link.startswith("https:")} <= places | set(ids)


def test_page_needs_nothing_but_itself(made: Path) -> None:
    see_that_the_page_is_whole(made)
    for page in made.glob("*.html"):
        assert not re.search(r"<script|<link|@import|url\((?!#)", page.read_text())


def test_every_declared_file_is_there_and_figures_are_whole_svg(made: Path) -> None:
    assert sorted(path.name for path in (made / "figures").iterdir()) == sorted(
        f"{n}.{form}" for n in FIGURES for form in ("svg", "rst")
    )
    for name in FIGURES:
        assert ElementTree.parse(made / "figures" / f"{name}.svg").getroot().tag.endswith("svg")
    assert {"index.html", "numbers.html", "claims.json", "numbers.tex"} <= {path.name for path in made.iterdir()}
    assert {path.name for path in (made / "tables").iterdir()} == {
        f"{table}.{form}" for table in ("accuracy", "published") for form in ("csv", "tex")
    }


def test_figures_are_outlines_in_files_and_text_in_the_colours_of_the_page_on_it(made: Path) -> None:
    assert not re.search("<text|dc:date", (made / "figures" / "accuracy-by-length.svg").read_text())
    panels = figure_of(made, "accuracy-by-length").split('<div class="panels')[1]
    assert ">accuracy, last 10 tokens</text>" in panels
    assert "var(--blue)" in panels
    assert not re.search(r"#[0-9a-f]{6}\b", panels)


def test_one_figure_has_all_modes_and_the_others_the_protocol_alone(made: Path) -> None:
    by_mode, by_position = (set(legend_of(figure_of(made, f"accuracy-by-{x}"))) for x in ("mode", "position"))
    assert by_mode == {f"implicit, {mode}" for mode in MODES}
    assert by_position == {"implicit", "explicit", "chance (best constant answer)"}


def test_the_page_states_the_protocol_once_at_its_head_and_the_criterion_in_the_rows_of_other_modes(made: Path) -> None:
    head, _, rest = page_of(made).partition("</header>")
    assert "8 tokens are solved at a time, until the relative residual of each is below 0.05" in head
    assert "tokens are solved at a time" not in rest
    assert "released-criterion, converged by batch" in rest
    assert "blockwise, converged by" not in rest
    assert {row["eval_stop"] for row in rows_of(made, "accuracy") if row["mode"] == "released-criterion"} == {"batch"}


def test_each_number_names_mode_seeds_and_spread(made: Path) -> None:
    text = page_of(made)
    row = re.search(r"<tr class=\"headline\">.*?a5-implicit.*?</tr>", text, re.DOTALL)[0]  # type: ignore[index]
    assert "<small>blockwise, 2 seeds, 41,856 parameters, 512 samples" in row
    assert re.search(r">99\.\d\u00a0%</a><small>99\.\d\u00a0% to 99\.\d\u00a0%</small><small>9\.200 f/token", row)


def test_training_time_is_that_of_all_processes_together_and_by_run_with_their_number(made: Path) -> None:
    front = (made / "index.html").read_text(encoding="utf-8")
    assert re.search(r"([0-9]+) training jobs, \1 minutes", front)  # each took half a minute of two processes
    assert '<td class="num">0.5<small>2 × cpu</small></td>' in page_of(made)


def test_a_count_of_one_has_a_noun_in_the_singular(tmp_path: Path) -> None:
    alone = SampleRun("a5-explicit", "A5", False, 0.2, (0.2,), steps=200, lengths=(16,))
    made = demo_report(tmp_path, (alone,), change=lambda record: record | {"num_samples": 1})
    front = (made / "index.html").read_text(encoding="utf-8")
    assert "1 training job, 1 minute ·" in front
    for page in (front, page_of(made)):
        words = re.sub("<[^>]*>", " ", page)
        assert re.findall(r"(?<![\d.,])\b1 (?:training |more |published )?\w+s\b", words) == []


def test_chance_has_no_range_because_it_has_no_seeds(made: Path) -> None:
    front = (made / "index.html").read_text(encoding="utf-8")
    (row,) = re.findall("chance: the best constant answer</th>(.*?)</tr>", front, re.DOTALL)
    assert re.findall(r">(\d+\.\d)<", row)
    assert " to " not in row
    assert " to " in front.split(row)[0].rpartition("<table")[2]


def test_provenance_of_every_run_is_on_the_page(made: Path) -> None:
    text, name = page_of(made), "evaluate/a5-implicit-s0/free/word-problem"
    manifest = json.loads((made.parents[1] / "results" / name / "manifest.json").read_text())
    fingerprint = manifest["fingerprint"]
    for value in (fingerprint, fingerprint[::2], manifest["files"][0]["sha256"], "5b0a7c1d" * 5, name):
        assert value in text


LANGUAGE = family("mamba2", "implicit_mamba2", seeds=(0,))[:2]


@pytest.mark.parametrize(
    ("make", "evaluation", "number", "table", "same"),
    [
        (partial(make_runs, runs=SMALL), "a5-implicit-s0/free/word-problem", "accuracy_last10", "validation",
         ("tables/accuracy.csv", "figures/accuracy-by-length.svg", "figures/accuracy-by-mode.svg")),
        (partial(make_language_runs, runs=LANGUAGE), "text-mamba2-explicit-s0/explicit/perplexity", "loss",
         "validation-perplexity", ("tables/perplexity.csv", "figures/perplexity-by-length.svg")),
    ],
)  # fmt: skip
def test_numbers_of_validation_sets_are_in_a_table_of_their_own_and_nowhere_else(
    tmp_path: Path, make: Any, evaluation: str, number: str, table: str, same: tuple[str, ...]
) -> None:
    roles = make(tmp_path / "results")
    shown = {kind: [Path(file).stem for file in same if file.startswith(kind)] for kind in ("tables", "figures")}
    shown["tables"].append(table)
    about = {"data": {"on-validation": {"data": "x", "split": "validation"}}} | shown
    tested = make_report(tmp_path / "without", roles, **about)
    kept = next((roles[f"evaluate:{evaluation}"] / "work").rglob("metrics.json"))
    record = json.loads(kept.read_text())["records"][0] | {"data": "on-validation", number: 0.125}
    name, _, kind = evaluation.rpartition("/")
    roles |= evaluated(tmp_path / "results", f"{name}/choice", kind.replace("-", "_"), [record])
    made = make_report(tmp_path / "with", roles, **about)
    assert [row[f"{number}_mean"] for row in rows_of(made, table)] == ["0.125"]
    for file in (*same, "claims.json"):
        assert (made / file).read_bytes() == (tested / file).read_bytes()


def test_missing_numbers_are_shown_as_missing_in_every_output(tmp_path: Path) -> None:
    metrics = ("accuracy_last10", "accuracy_sequence", "accuracy_token", "accuracy_per_position")
    lost = dict.fromkeys((*metrics, "token_match_sequential", "f_evaluations_per_token"))
    made = demo_report(tmp_path, change=lambda record: record | lost)
    numbers = page_of(made).split('id="numbers"')[1].split('id="training"')[0]
    assert numbers.count("missing</span>") > 2 * len(MODES)
    assert ">0.000<" not in numbers
    assert "missing" in (made / "tables/accuracy.tex").read_text()
    assert {row["accuracy_last10_mean"] for row in rows_of(made, "accuracy")} == {""}
    assert {claim["verdict"] for claim in claims_of(made).values()} == {"missing", "not run"}
    assert names_in(made, "figures") == set(FIGURES)
    found = definitions(made)
    mine = {key: value for key, value in found.items() if key.endswith("/accuracy_last10")}
    assert len(mine) == 2 * (len(MODES) + 1)
    assert set(mine.values()) == {r"\resultmissing"} == {found["claim/implicit-solves-a5"]}


def test_published_number_stands_beside_the_same_measurement_only(tmp_path: Path) -> None:
    runs = (
        SampleRun("a5m", "A5", True, 0.1, (0.1,), monoid="aperiodic", steps=200, train_length=256, lengths=(256, 512)),
    )
    rows = rows_of(demo_report(tmp_path, runs, figures=(), tables=("accuracy",)), "accuracy")
    beside = {(row["mode"], row["length"]): row["published"] for row in rows if row["published"]}
    assert beside == {("blockwise", "256"): "1.0", ("sequential", "256"): "1.0", ("released-criterion", "256"): "0.92"}


def test_claims_file_has_verdict_measured_and_published_value(made: Path) -> None:
    claims = claims_of(made)
    solved = claims["implicit-solves-a5"]
    assert (solved["verdict"], solved["published"], solved["num_seeds"]) == ("reproduced", "solved", 2)
    assert solved["sources"] == [f"evaluate:a5-implicit-s{seed}/free/word-problem" for seed in (0, 1)]
    assert claims["deep-explicit-cannot"]["verdict"] == "not run"


def test_explicit_runs_alone_make_a_report_without_solver_figures(tmp_path: Path) -> None:
    made = demo_report(tmp_path, SMALL[1:])
    assert names_in(made, "figures") == {"accuracy-by-length", "accuracy-by-position", "training-curves"}
    assert names_in(made, "tables") == {"accuracy", "published"}
    text = page_of(made)
    assert "held-out text" not in text.split('id="claims"')[0]
    assert "at all questions, from other papers" not in text


def test_names_from_the_outside_are_escaped(tmp_path: Path) -> None:
    text = page_of(demo_report(tmp_path, (replace(SMALL[1], name="<b>&x"),)))
    assert "&lt;b&gt;&amp;x" in text
    assert "<b>&x" not in text


def test_report_without_inputs_or_with_damaged_metrics_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no inputs; add"):
        stage.run(make_context(tmp_path / "empty", {}))
    roles = make_runs(tmp_path / "results", SMALL[1:])
    metrics = next((tmp_path / "results" / "evaluate").rglob("metrics.json"))
    metrics.write_text("{}")
    with pytest.raises(ReportError, match=re.escape(str(metrics))):
        stage.run(make_context(tmp_path / "report", roles))


def test_the_first_page_opens_with_the_verdicts_then_figures_then_a_table_for_each_test(made: Path) -> None:
    page = (made / "index.html").read_text()
    verdicts, figures, numbers = (page.index(f'<section id="{name}"') for name in ("verdicts", "figures", "numbers"))
    assert verdicts < figures < numbers
    rows = rows_of_claims(claims_of(made).values())
    assert counted(rows) in page
    table = page[verdicts:figures]
    asked = [row for row in rows if row.is_asked and row.is_short]
    for row in asked:
        assert f'<a href="numbers.html#claim-{row.id}">{row.claim}</a>' in table
        assert row.verdict in table
    assert len(asked) >= 3
    assert all(row.is_run for row in asked)  # no headline of the demo is a claim that it cannot test
    assert 1 <= page.count("<figure") <= MOST_FIGURES


def test_the_first_page_draws_at_most_six_lines_a_panel_and_counts_the_models_that_it_leaves_out(
    tmp_path: Path,
) -> None:
    runs = tuple(replace(SMALL[index % 2], name=f"{'ie'[index % 2]}{index}", seeds=(0,)) for index in range(26))
    given = inputs_of(make_context(tmp_path / "report", make_runs(tmp_path / "results", runs)))
    few = with_few_models(given)
    assert few.measured["name"].nunique() == MOST_LINES
    assert few.measured.groupby("is_implicit")["name"].nunique().tolist() == [3, 3]
    (table, *_) = front_tables({name: ROWS[name](given) for name in TABLES})
    assert len(table.table.side) == MOST_ROWS
    assert table.table.foot is not None
    assert table.num_left_out == 26 + 1 - MOST_ROWS
    without_chance = replace(given, measured=given.measured[given.measured["metric"] != table.table.foot])
    (unknown, *_) = front_tables({name: ROWS[name](without_chance) for name in TABLES})
    assert (table.not_run, unknown.not_run, unknown.num_left_out) == ([], [], 26 - MOST_ROWS)
    (table, *_) = front_tables({name: ROWS[name](given) for name in TABLES}, ["e25"])
    assert "e25" in [head.title for head in table.table.side]
    assert len(table.table.side) == MOST_ROWS


def test_a_test_on_the_first_page_has_six_lines_although_another_test_has_other_models(tmp_path: Path) -> None:
    runs = tuple(replace(SMALL[0], name=f"i{index}", seeds=(0,)) for index in range(12))
    given = inputs_of(make_context(tmp_path / "report", make_runs(tmp_path / "results", runs)))
    rows = given.measured
    last = rows[rows["name"].isin(["i10", "i11"])].assign(group="S3")
    few = with_few_models(replace(given, measured=pd.concat([rows, last], ignore_index=True))).measured
    assert few.groupby("group")["name"].nunique().to_dict() == {"A5": MOST_LINES, "S3": 2}


def test_models_and_figures_of_the_first_page_and_their_names_are_those_of_the_experiment(tmp_path: Path) -> None:
    names = {"a5-implicit": "A5, one layer"}
    front = {"figures": ["accuracy-by-position"], "models": ["A5, *"]}
    made = demo_report(tmp_path, names=names, front=front)
    page = (made / "index.html").read_text()
    assert re.findall(r'<figure id="figure-([^"]+)"', page) == ["accuracy-by-position"]
    legend = legend_of(page.split("<figure")[1])
    assert legend == ["A5, one layer", "chance (best constant answer)"]
    assert 'scope="row">A5, one layer' in page_of(made)
    assert {row["run"] for row in rows_of(made, "accuracy")} == {"a5-implicit", "a5-explicit"}


def test_more_figures_than_the_first_page_shows_are_refused() -> None:
    with pytest.raises(ValueError, match="more than the 5"):
        Front(figures=("accuracy-by-length",) * 6)


def test_an_experiment_of_its_own_has_its_own_title_and_no_claims_of_the_paper(tmp_path: Path) -> None:
    made = demo_report(tmp_path, experiment="mine")
    see_that_the_page_is_whole(made)
    page = (made / "index.html").read_text()
    assert "<h1>Experiment mine</h1>" in page
    assert 'id="verdicts"' not in page
    assert 'id="claims"' not in page + page_of(made)
    assert 'id="published"' not in page_of(made)
    assert claims_of(made) == {}
    assert "published" in names_in(made, "tables")


def test_settings_that_differ_between_runs_are_columns_and_the_others_are_said_once(tmp_path: Path) -> None:
    settings = hyperparameters(inputs_of(make_context(tmp_path / "report", make_runs(tmp_path / "results", SMALL))))
    assert [(row["run"], row["seeds"]) for row in settings["rows"]] == [
        ("a5-explicit", [0]),
        ("a5-implicit", [0, 1]),
        ("a5-implicit", [0, 1]),
    ]
    assert "phase.solver.mode" in settings["differing"]
    assert not settings["shared"].keys() & set(settings["differing"])
    assert all(row["settings"][key] == value for row in settings["rows"] for key, value in settings["shared"].items())


@pytest.mark.parametrize("name", ["report", "report-with-missing"])
def test_the_report_of_kept_results_equals_the_report_that_was_made_first(name: str, tmp_path: Path) -> None:
    results, kept = tmp_path / "results" / "demo", ("manifest.json", "metrics.json", "provenance.json", "journal.jsonl")
    roles = make_runs(results, SMALL[1:])
    context = make_context(results / "report", roles)
    stage.run(context)
    finish(results / "report", "report", "report", context.config, dict.fromkeys(roles, "0" * 64), {})
    for path in (path for path in results.rglob("*") if path.name in kept):
        (tmp_path / "kept" / path.relative_to(results)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "kept" / path.relative_to(results))
    first = results.rename(tmp_path / "first") / context.work.relative_to(results)
    (tmp_path / "kept/report").rename(tmp_path / "kept" / name)
    make_again(tmp_path / "kept", tmp_path / "page")
    for path in (first / "declared").rglob("*.*"):
        assert (tmp_path / "page" / path.relative_to(first)).read_bytes() == path.read_bytes(), path.name


def definitions(made: Path) -> dict[str, str]:
    """What numbers.tex defines."""
    text = (made / "numbers.tex").read_text()
    assert "10^" not in re.sub(r"\\ensuremath\{.*?\}\}\}", "", text)
    return dict(re.findall(r"^\\resultdef\{([^{}]+)\}\{(.*)\}$", text, re.MULTILINE))


def test_each_number_has_a_key_of_record_mode_and_length_and_its_value(made: Path) -> None:
    found = definitions(made)
    key = "word_problem/a5-implicit/free/a5-test-L64-h0.2/sequential/64/accuracy_last10"
    metrics = next((made.parents[1] / "results/evaluate/a5-implicit-s0/free/word-problem/work").glob("*/metrics.json"))
    mine = [r for r in json.loads(metrics.read_text())["records"] if (r["mode"], r["length"]) == ("sequential", 64)]
    assert found[f"{key}.high"] == f"{mine[0]['accuracy_last10']:.4g}"
    assert float(found[f"{key}.low"]) < float(found[key]) < float(found[f"{key}.high"])
    assert found[f"{key}.seeds"] == "2"
    assert found["claim/implicit-solves-a5.verdict"] in ("reproduced", "not reproduced")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.9984321, "0.9984"),
        (-0.3, r"\ensuremath{-0.3}"),
        (1.25e-7, r"\ensuremath{1.25\times10^{-7}}"),
        (None, r"\resultmissing"),
    ],
)
def test_numbers_as_latex(value: float | None, text: str) -> None:
    assert latex_number(value) == text


def test_hostile_names_of_runs_and_phases_change_no_number_no_verdict_and_no_order(tmp_path: Path) -> None:
    renamed = {
        "a5-explicit": "u-implicit (24+4)", "a5-implicit": "v-explicit-s1", "text-mamba2-explicit": "w-s2",
        "text-mamba2-implicit": "x-s7-y", "free-80": "(99+9)",
    }  # fmt: skip
    roles = make_runs(tmp_path / "words", (replace(SMALL[0], seeds=(0,)), SMALL[1])) | make_language_runs(
        tmp_path / "text", family("mamba2", "implicit_mamba2", seeds=(0,))[:2]
    )
    jobs = {
        role: job | {"run": renamed[job["run"]], "seed": 3, "phase": renamed.get(job["phase"], job["phase"])}
        for role, job in make_context(tmp_path, roles).config["jobs"].items()
    }
    tables = ("accuracy", "perplexity", "published")
    plain = make_report(tmp_path / "plain", roles, figures=(), tables=tables)
    hostile = make_report(tmp_path / "hostile", roles, figures=(), tables=tables, jobs=jobs)

    def named(text: str) -> str:
        for old in sorted(renamed, key=lambda old: -len(renamed[old])):
            text = text.replace(renamed[old], old)
        return text

    told = ("id", "verdict", "measured", "num_seeds", "run")
    expected = [[claim[key] for key in told] for claim in claims_of(plain).values()]
    found = json.loads(named(json.dumps(list(claims_of(hostile).values()))))
    assert [[claim[key] for key in told] for claim in found] == expected
    assert sum(verdict == "reproduced" for _, verdict, *_ in expected) > 5
    for name in tables:
        wanted, shown = ((folder / f"tables/{name}.csv").read_text() for folder in (plain, hostile))
        assert named(shown) == wanted


def test_an_input_of_which_nothing_is_said_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"evaluate:a5-explicit-s0/explicit/word-problem.*plan the workflow again"):
        demo_report(tmp_path, SMALL[1:], jobs={})
