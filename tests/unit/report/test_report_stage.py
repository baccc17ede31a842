from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from implicit_llm_report import stage
from implicit_llm_report.config import ReportError
from implicit_llm_report.figures.word_problems import accuracy_by_length
from implicit_llm_report.inputs.published import Published
from implicit_llm_report.inputs.sources import Given, load_inputs
from tests.unit.report.sample_runs import MODES, Record, SampleRun, config_of, make_context, make_runs

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


class Page(HTMLParser):
    """What the tests ask of a page: its ids, its links, and whether its elements are closed."""

    VOID = frozenset(("meta", "br", "link", "img", "input", "hr"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [value for key, value in attrs if key == "id" and value]
        self.links += [value for key in ("href", "src", "xlink:href") if (value := values.get(key))]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a report of two runs, one of them with two seeds."""
    return make_report(tmp_path_factory.mktemp("sample"))


def make_report(folder: Path, runs: tuple[SampleRun, ...] = SMALL, **changes: Any) -> Path:
    context = make_context(folder / "report", make_runs(folder / "results", runs, **changes))
    stage.run(context)
    return context.work / "declared"


def test_page_needs_nothing_but_itself(made: Path) -> None:
    text = (made / "index.html").read_text()
    page = Page(text)
    assert page.links
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"<script|<link|@import|url\((?!#)", text)


def test_every_link_on_the_page_has_its_target_and_no_id_stands_twice(made: Path) -> None:
    page = Page((made / "index.html").read_text())
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert page.open == []


def test_every_declared_file_is_there_and_figures_are_whole_svg(made: Path) -> None:
    assert sorted(path.name for path in (made / "figures").iterdir()) == sorted(
        f"{n}.{form}" for n in FIGURES for form in ("svg", "rst")
    )
    for name in FIGURES:
        assert ElementTree.parse(made / "figures" / f"{name}.svg").getroot().tag.endswith("svg")
    assert {"index.html", "claims.json", "numbers.tex"} <= {path.name for path in made.iterdir()}
    assert {path.name for path in (made / "tables").iterdir()} == {
        f"{table}.{form}" for table in ("accuracy", "published") for form in ("csv", "tex")
    }


def test_equal_inputs_give_equal_bytes(made: Path, tmp_path: Path) -> None:
    again = make_report(tmp_path)
    for path in sorted(made.rglob("*.*")):
        assert path.read_bytes() == (again / path.relative_to(made)).read_bytes(), path.name


def test_figures_as_files_carry_outlines_and_no_date(made: Path) -> None:
    svg = (made / "figures" / "accuracy-by-length.svg").read_text()
    assert "<text" not in svg
    assert "dc:date" not in svg


def test_figures_on_the_page_are_text_in_the_colours_of_the_page(made: Path) -> None:
    svg = re.search(r'<div class="panels.*?</figure>', (made / "index.html").read_text(), re.DOTALL)[0]  # type: ignore[index]
    assert ">accuracy, last 10 tokens</text>" in svg
    assert "var(--blue)" in svg
    assert not re.search(r"#[0-9a-f]{6}\b", svg)


def test_each_number_names_mode_seeds_and_spread(made: Path) -> None:
    text = (made / "index.html").read_text()
    row = re.search(r"<tr class=\"headline\">.*?a5-implicit.*?</tr>", text, re.DOTALL)[0]  # type: ignore[index]
    assert "<small>blockwise, 2 seeds, 41,856 parameters, 512 samples" in row
    assert re.search(r">0\.99\d</a><small>0\.99\d to 0\.99\d</small><small>9\.200 f/token", row)


def test_provenance_of_every_run_is_on_the_page(made: Path) -> None:
    text = (made / "index.html").read_text()
    manifest = json.loads(
        (made.parents[3] / "results/evaluate/a5-implicit-s0/free/word-problem/manifest.json").read_text()
    )
    name, fingerprint = "evaluate/a5-implicit-s0/free/word-problem", manifest["fingerprint"]
    for value in (fingerprint, fingerprint[::2], manifest["files"][0]["sha256"], "5b0a7c1d" * 5, name):
        assert value in text


def without_numbers(record: Record) -> Record:
    metrics = ("accuracy_last10", "accuracy_sequence", "accuracy_token", "accuracy_per_position")
    return record | dict.fromkeys((*metrics, "token_match_sequential", "f_evaluations_per_token"))


def test_missing_numbers_are_shown_as_missing_in_every_output(tmp_path: Path) -> None:
    made = make_report(tmp_path, change=without_numbers)
    numbers = (made / "index.html").read_text().split('id="numbers"')[1].split('id="training"')[0]
    assert numbers.count("missing</span>") > 2 * len(MODES)
    assert ">0.000<" not in numbers
    assert "missing" in (made / "tables/accuracy.tex").read_text()
    rows = [line.split(",") for line in (made / "tables/accuracy.csv").read_text().splitlines()]
    assert {row[rows[0].index("accuracy_last10_mean")] for row in rows[1:]} == {""}
    claims = json.loads((made / "claims.json").read_text())["claims"]
    assert {claim["verdict"] for claim in claims} == {"missing", "not run at this scale"}
    assert sorted(path.stem for path in (made / "figures").glob("*.svg")) == sorted(FIGURES)


def test_published_number_stands_beside_the_same_measurement_only(tmp_path: Path) -> None:
    runs = (
        SampleRun("a5m", "A5", True, 0.1, (0.1,), monoid="aperiodic", steps=200, train_length=256, lengths=(256, 512)),
    )
    rows = csv.DictReader((make_report(tmp_path, runs) / "tables/accuracy.csv").open())
    beside = {(row["mode"], row["length"]): row["published"] for row in rows if row["published"]}
    assert beside == {("blockwise", "256"): "1.0", ("sequential", "256"): "1.0", ("published", "256"): "0.92"}


def test_claims_file_has_verdict_measured_and_published_value(made: Path) -> None:
    claims = {claim["id"]: claim for claim in json.loads((made / "claims.json").read_text())["claims"]}
    solved = claims["implicit-solves-a5"]
    assert solved["verdict"] == "holds"
    assert solved["published"] == "solved"
    assert solved["num_seeds"] == 2
    assert solved["sources"] == [f"evaluate:a5-implicit-s{seed}/free/word-problem" for seed in (0, 1)]
    assert claims["deep-explicit-cannot"]["verdict"] == "not run at this scale"


def test_explicit_runs_alone_make_a_report_without_solver_figures(tmp_path: Path) -> None:
    made = make_report(tmp_path, SMALL[1:])
    names = {path.stem for path in (made / "figures").glob("*.svg")}
    assert names == {"accuracy-by-length", "accuracy-by-position", "training-curves"}


def test_names_from_the_outside_are_escaped(tmp_path: Path) -> None:
    made = make_report(tmp_path, SMALL[1:], change=lambda record: record | {"run": "<b>&x"})
    assert "<b>&x" not in (made / "index.html").read_text()


def test_report_without_inputs_or_with_damaged_metrics_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="--input"):
        stage.run(make_context(tmp_path / "empty", {}))
    roles = make_runs(tmp_path / "results", SMALL[1:])
    metrics = next((tmp_path / "results" / "evaluate").rglob("metrics.json"))
    metrics.write_text("{}")
    with pytest.raises(ReportError, match=re.escape(str(metrics))):
        stage.run(make_context(tmp_path / "report", roles))


def test_page_opens_with_what_was_reproduced_and_what_was_not(made: Path) -> None:
    page = (made / "index.html").read_text()
    claims = json.loads((made / "claims.json").read_text())["claims"]
    summary = page[page.index('<section id="summary"') : page.index("</section>", page.index('<section id="summary"'))]
    papers = [claim for claim in claims if claim["origin"] == "paper" and claim["verdict"] == "holds"]
    assert f"{len(papers)} reproduced" in summary
    assert f'href="#claim-{papers[0]["id"]}"' in summary
    assert summary.count("<li>") <= 6 * 6


def test_an_experiment_of_its_own_has_its_own_title_and_no_claims_of_the_paper(tmp_path: Path) -> None:
    context = make_context(tmp_path / "report", make_runs(tmp_path / "results", SMALL), {"experiment": "mine"})
    stage.run(context)
    declared = context.work / "declared"
    page = (declared / "index.html").read_text()
    assert "<h1>Experiment mine</h1>" in page
    assert 'id="claims"' not in page
    assert 'id="published"' not in page
    assert json.loads((declared / "claims.json").read_text())["claims"] == []
    assert (declared / "tables/published.csv").is_file()
    assert set(Page(page).links) <= {f"#{name}" for name in Page(page).ids}


def test_no_two_lines_of_the_accuracy_figure_look_alike(tmp_path: Path) -> None:
    deep = tuple(SampleRun(f"s3-{n}", "S3", True, 0.5, (0.5,), steps=50, lengths=(16, 64)) for n in ("one", "two"))
    context = make_context(tmp_path / "report", make_runs(tmp_path / "results", (*SMALL, *deep)))
    inputs, config = load_inputs(context.inputs, config_of(context)), config_of(context)
    figure = accuracy_by_length(Given(inputs, config, Published({})))
    assert figure is not None
    looks = [(series.color, series.marker, series.dashes) for series in figure.legend]
    assert len(set(looks)) == len(looks) == len({series.label for series in figure.legend})
