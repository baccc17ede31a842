"""What a report writes: the page, figures, tables, claims and numbers.tex; the same again from kept results."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from implicit_llm_report import stage
from implicit_llm_report.config import ReportError
from implicit_llm_report.kept import make_again
from implicit_llm_report.page.latex_numbers import latex_number
from implicit_llm_report.page.page import hyperparameters
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
    """Every link leads to a place on the page, and no id stands twice."""
    text = (made / "index.html").read_text().strip().removeprefix("<!doctype html>")
    page = ElementTree.fromstring(re.sub(r"(<(?:meta|br)\b[^>]*)>", r"\1/>", text))  # raises where one is not closed
    ids = [one.attrib["id"] for one in page.iter() if "id" in one.attrib]
    links = {link for one in page.iter() for key, link in one.attrib.items() if key.endswith(("href", "src"))}
    assert links
    assert links <= {f"#{name}" for name in ids}
    assert len(ids) == len(set(ids))


def test_page_needs_nothing_but_itself(made: Path) -> None:
    see_that_the_page_is_whole(made)
    assert not re.search(r"<script|<link|@import|url\((?!#)", (made / "index.html").read_text())


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
    head, _, rest = (made / "index.html").read_text().partition("</header>")
    assert "8 tokens are solved at a time, until the relative residual of each is below 0.05" in head
    assert "tokens are solved at a time" not in rest
    assert "released-criterion, converged by batch" in rest
    assert "blockwise, converged by" not in rest
    assert {row["eval_stop"] for row in rows_of(made, "accuracy") if row["mode"] == "released-criterion"} == {"batch"}


def test_each_number_names_mode_seeds_and_spread(made: Path) -> None:
    text = (made / "index.html").read_text()
    row = re.search(r"<tr class=\"headline\">.*?a5-implicit.*?</tr>", text, re.DOTALL)[0]  # type: ignore[index]
    assert "<small>blockwise, 2 seeds, 41,856 parameters, 512 samples" in row
    assert re.search(r">0\.99\d</a><small>0\.99\d to 0\.99\d</small><small>9\.200 f/token", row)


def test_provenance_of_every_run_is_on_the_page(made: Path) -> None:
    text, name = (made / "index.html").read_text(), "evaluate/a5-implicit-s0/free/word-problem"
    manifest = json.loads((made.parents[3] / "results" / name / "manifest.json").read_text())
    fingerprint = manifest["fingerprint"]
    for value in (fingerprint, fingerprint[::2], manifest["files"][0]["sha256"], "5b0a7c1d" * 5, name):
        assert value in text


def test_numbers_of_validation_sets_are_in_a_table_of_their_own_and_nowhere_else(tmp_path: Path) -> None:
    roles = make_runs(tmp_path / "results", SMALL)
    tested = demo_report(tmp_path / "without")
    kept = roles["evaluate:a5-implicit-s0/free/word-problem"] / "work"
    record = json.loads(next(kept.rglob("metrics.json")).read_text())["records"][0]
    record |= {"data": "a5-validation", "accuracy_last10": 0.123}
    roles |= evaluated(tmp_path / "results", "a5-implicit-s0/free/choice", "word_problem", [record])
    parts = {"a5-validation": {"data": "a5", "split": "validation"}}
    made = make_report(tmp_path, roles, experiment="demo", data=parts)
    assert [row["accuracy_last10_mean"] for row in rows_of(made, "validation")] == ["0.123"]
    for same in (
        "tables/accuracy.csv",
        "claims.json",
        "figures/accuracy-by-length.svg",
        "figures/accuracy-by-mode.svg",
    ):
        assert (made / same).read_bytes() == (tested / same).read_bytes()


def test_missing_numbers_are_shown_as_missing_in_every_output(tmp_path: Path) -> None:
    metrics = ("accuracy_last10", "accuracy_sequence", "accuracy_token", "accuracy_per_position")
    lost = dict.fromkeys((*metrics, "token_match_sequential", "f_evaluations_per_token"))
    made = demo_report(tmp_path, change=lambda record: record | lost)
    numbers = (made / "index.html").read_text().split('id="numbers"')[1].split('id="training"')[0]
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
    text = (made / "index.html").read_text()
    assert "held-out text" not in text.split('id="claims"')[0]
    assert "at all questions, from other papers" not in text


def test_names_from_the_outside_are_escaped(tmp_path: Path) -> None:
    text = (demo_report(tmp_path, (replace(SMALL[1], name="<b>&x"),)) / "index.html").read_text()
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


def test_page_opens_with_what_was_reproduced_and_what_was_not(made: Path) -> None:
    page = (made / "index.html").read_text()
    summary = page.split('<section id="summary"')[1].split("</section>")[0]
    stated = [claim for claim in claims_of(made).values() if claim["origin"] == "paper"]
    papers, left_out = ([c for c in stated if c["verdict"] == verdict] for verdict in ("reproduced", "not run"))
    assert f"Of {len(stated)} statements of the paper, this experiment tests {len(stated) - len(left_out)}:" in summary
    assert f"reproduced</span> <b>{len(papers)}</b>" in summary
    assert f"<summary>{len(left_out)} that this experiment does not test" in page
    assert f'href="#claim-{papers[0]["id"]}"' in summary
    assert summary.count("<li>") <= 6 * 6


def test_an_experiment_of_its_own_has_its_own_title_and_no_claims_of_the_paper(tmp_path: Path) -> None:
    made = demo_report(tmp_path, experiment="mine")
    see_that_the_page_is_whole(made)
    page = (made / "index.html").read_text()
    assert "<h1>Experiment mine</h1>" in page
    assert 'id="claims"' not in page
    assert 'id="published"' not in page
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


def test_the_report_of_kept_results_equals_the_report_that_was_made_first(tmp_path: Path) -> None:
    results, kept = tmp_path / "results" / "demo", ("manifest.json", "metrics.json", "provenance.json", "journal.jsonl")
    roles = make_runs(results, SMALL[1:])
    context = make_context(results / "report", roles)
    stage.run(context)
    finish(results / "report", "report", "report", context.config, dict.fromkeys(roles, "0" * 64), {})
    for path in (path for path in results.rglob("*") if path.name in kept):
        (tmp_path / "kept" / path.relative_to(results)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "kept" / path.relative_to(results))
    first = results.rename(tmp_path / "first") / context.work.relative_to(results)
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
    metrics = next((made.parents[3] / "results/evaluate/a5-implicit-s0/free/word-problem/work").glob("*/metrics.json"))
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
