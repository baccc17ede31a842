"""Tables, verdicts and model cards: made from the kept inputs, with the digests of the packaged models."""

import hashlib
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from implicit_llm_report.claims.verdicts import FROM_NOTE, MARKS
from implicit_llm_report.kept import make_again
from implicit_llm_workflow.results.listing import models
from tests.pages import ROOT
from tests.unit.pages.page_texts import (
    LANGUAGE_MODELS,
    NOTEBOOK,
    STATE_TRACKING,
    TRAINED,
    WRITTEN,
    benchmark,
    cells,
    read,
)

REPORTED = sorted(path.parent.name for path in LANGUAGE_MODELS.parent.glob("language-models*/claims.json"))


def block_row(row: dict) -> str:
    """A row of the table of blocks, as docs/evaluation.md has it."""
    names = {
        "a5-monoid-published-s0": "A5 × monoid",
        "a5-monoid-released-s0": "A5 × monoid, a third of the steps",
        "s5-state-passing-s0": "S5",
        "catbabi-implicit-s0": "CatbAbI",
    }
    block = f"{row['block_len']}{', the whole' if row['block_len'] == row['length'] else ''}"
    block = f"**{block}**" if row["block_len"] == 8 else block
    block = block if row["stop"] == "token" else f"{block}, mean residual"
    work = f"{row['f_evaluations_per_token']:.1f} | {row['serial_steps_per_token']:.2f}"
    cells = f"{100 * row['accuracy']:.1f} % | {work} | {100 * row['share_at_cap']:.2f} % | {row['seconds']:.0f}"
    return f"| {names[row['model']]} | {block} | {cells} |"


def test_the_table_of_blocks_is_the_measured_one() -> None:
    found = re.findall(r"^\| (?:A5 × monoid.*|S5|CatbAbI) \|.*$", read("docs/evaluation.md"), re.MULTILINE)
    assert found == [block_row(row) for row in benchmark("evaluation-blocks", "cpu")["rows"]]


def language_block_row(row: dict) -> str:
    names = {"language-models-repeated": "Llama, repeated text", "language-models-mamba2": "Mamba2"}
    block = {2048: "2,048, the whole", 256: "**256**"}.get(row["block_len"], str(row["block_len"]))
    block = block if row["stop"] == "token" else "256, mean residual"
    work = f"{row['f_evaluations_per_token']:.1f} | {row['serial_steps_per_token']:.2f}"
    cells = f"{row['loss']:.3f} | {work} | {100 * row['unconverged_share']:.2f} % | {row['seconds']:.1f}"
    return f"| {names[row['model'].split('/')[0]]} | {block} | {cells} |"


def test_the_table_of_blocks_of_language_models_is_the_measured_one() -> None:
    rows = [row for row in benchmark("language-blocks", "h100")["rows"] if row["table"] == "blocks"]
    found = re.findall(r"^\| (?:Llama, repeated text|Mamba2) \|.*$", read("docs/evaluation.md"), re.MULTILINE)
    assert found == [language_block_row(row) for row in rows]
    by_mean, by_token = (
        [row for row in rows if (row["block_len"], row["stop"]) == (256, s)] for s in ("sequence", "token")
    )
    faster = [token["seconds"] / mean["seconds"] for mean, token in zip(by_mean, by_token, strict=True)]
    assert "1.4 to 1.9 times the speed" in read("docs/evaluation.md")
    assert (round(min(faster), 1), round(max(faster), 1)) == (1.4, 1.9)
    assert all(0.2 < row["unconverged_share"] < 0.25 for row in by_mean)


@pytest.mark.parametrize("name", ["a5-monoid-published-s0", "a5-monoid-released-s0", "catbabi-implicit-s0"])
def test_the_card_of_a_packaged_model_has_its_numbers_by_the_protocol_and_by_the_criterion_before(name: str) -> None:
    card = " ".join((TRAINED / name / "README.md").read_text().split())
    rows = [row for row in benchmark("evaluation-blocks", "cpu")["rows"] if row["model"] == name]
    (by_token,) = (row for row in rows if (row["stop"], row["block_len"]) == ("token", 8))
    (by_mean,) = (row for row in rows if row["stop"] == "sequence")
    for row in (by_token, by_mean):
        cells = f"{100 * row['accuracy']:.1f} % | {row['f_evaluations_per_token']:.1f}"
        assert f"| {cells} | {100 * row['share_at_cap']:.2f} % | {row['seconds']:.0f} |" in card


def test_the_table_of_the_demo_is_the_measured_one() -> None:
    frame = pd.read_csv(ROOT / "results/reference/demo/accuracy.csv")
    frame = frame[frame["mode"].isin(["blockwise-8-token", "parallel"])].sort_values("length")
    for (name, hard), of in frame.groupby(["name", "hard_fraction"]):
        group, kind = name.split("-")
        cells = " | ".join(f"{100 * accuracy:.1f} %" for accuracy in of.accuracy_last10)
        assert f"| {group.upper()} | {hard} | {kind}, 1 layer | {cells} |" in read("docs/demo.md")
    assert len(frame) == 18
    last = frame.query("group == 'A5' and hard_fraction == 0.5 and length == 64").set_index("name").accuracy_last10
    numbers = re.search(r"^best_accuracy_last10 a5-test-L64-h0.5 +(\S+) +(\S+)$", read("docs/inspect.md"), re.M)
    assert numbers.groups() == tuple(f"{last[name]:.4g}" for name in ("a5-implicit", "a5-explicit"))


def test_the_list_of_trained_models_has_the_measured_accuracies() -> None:
    rows = [
        row for row in benchmark("evaluation-blocks", "cpu")["rows"] if (row["stop"], row["block_len"]) == ("token", 8)
    ]
    for row in rows:
        listed = next(model for model in models() if model.name == row["model"])
        about = f"of the predictions in {row['sequences']} sequences of {row['length']} tokens"
        assert listed.accuracy == f"{100 * row['accuracy']:.1f} % {about}"
    assert {row["model"] for row in rows} == {model.name for model in models()}


def drawn_by(script: str) -> dict:
    return runpy.run_path(str(ROOT / "docs/images" / script))


DRAWN = drawn_by("state_tracking.py")["FIGURES"] | {
    script.removesuffix(".py").replace("_", "-"): drawn_by(script)["draw"]
    for script in WRITTEN["DRAWN"]
    if script != "state_tracking.py"
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_of_a_page_is_drawn_from_the_kept_results(name: str) -> None:
    assert read(f"docs/images/{name}.svg") == DRAWN[name]()


@pytest.mark.parametrize("page", WRITTEN["WHOLE"])
def test_a_page_of_complete_tables_is_that_of_the_kept_results(page: str) -> None:
    assert read(page) == WRITTEN["WHOLE"][page]()


@pytest.mark.parametrize("page", ["docs/state-tracking.md", "docs/language-models.md"])
def test_a_page_of_results_has_at_most_1500_words_and_six_figures(page: str) -> None:
    text = re.sub(r"<!--.*?-->", "", read(page))
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 1500
    assert text.count("<img ") <= 6


@pytest.mark.parametrize("page", WRITTEN["PAGES"])
def test_the_generated_parts_of_a_page_are_those_of_the_kept_results(page: str) -> None:
    assert read(page) == WRITTEN["written"](read(page))
    assert page == "README.md" or "<!-- begin " in read(page)


@pytest.mark.parametrize(
    ("file", "by", "page"),
    [("seeds", "dropout", "docs/demo.md"), ("tolerance", "tol", NOTEBOOK)],
)
def test_the_seeds_of_the_demo_are_the_kept_ones(file: str, by: str, page: str) -> None:
    frame = pd.read_csv(ROOT / f"results/reference/demo/{file}.csv").query("unrolled_steps == 1000")
    for (value, hard, length), rows in frame.groupby([by, "hard_fraction", "length"]):
        found = rows.sort_values("seed").accuracy_last10
        shown = cells(read(page), f"{value:g}", f"{hard:g}", str(length))
        assert shown == [f"{100 * accuracy:.1f}" for accuracy in (*found, found.mean())]


@pytest.mark.parametrize(
    ("folder", "script", "files", "number"),
    [
        (LANGUAGE_MODELS, "tables.py", "*.csv", 4),
        (STATE_TRACKING, "tables.py", "*.csv", 4),
        (STATE_TRACKING, "page.py", "claims.json tables/babi.csv tables/jacobian.csv tables/test-time.csv", 4),
    ],
)
def test_tables_and_verdicts_are_made_from_the_kept_inputs(
    folder: Path, script: str, files: str, number: int, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, folder / script, tmp_path], cwd=ROOT, check=True)
    made_in = tmp_path / "declared" if script == "page.py" else tmp_path
    made, kept = (
        {path.name: path.read_bytes() for pattern in files.split() for path in place.glob(pattern)}
        for place in (made_in, folder)
    )
    assert made == kept
    assert len(made) == number


@pytest.mark.parametrize("name", REPORTED)
def test_the_verdicts_on_language_models_are_made_from_the_kept_inputs(name: str, tmp_path: Path) -> None:
    shutil.unpack_archive(LANGUAGE_MODELS / "inputs.tar.xz", tmp_path)
    make_again(tmp_path / "results" / name, tmp_path / "page", ROOT / f"workflow/config/{name}.yaml")
    kept = (LANGUAGE_MODELS.parent / name / "claims.json").read_bytes()
    assert (tmp_path / "page/declared/claims.json").read_bytes() == kept
    page = (tmp_path / "page/declared/index.html").read_text(encoding="utf-8")
    table = page.partition('<table class="verdicts">')[2].partition("</table>")[0]
    assert (MARKS in page) == (FROM_NOTE in table)


def test_results_that_are_kept_replace_those_of_their_experiment_with_what_a_report_reads(tmp_path: Path) -> None:
    pack = runpy.run_path(str(LANGUAGE_MODELS / "tables.py"))["pack"]
    new, kept = tmp_path / "new", tmp_path / "kept"
    for name in ("evaluate/a-s0/p/e/work/0/metrics.json", "train/a-s0/p/work/0/model/model.safetensors"):
        (new / name).parent.mkdir(parents=True)
        (new / name).write_text("{}")
    (kept / "train/b-s0").mkdir(parents=True)
    pack(new, kept)
    found = [path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file() or path.name == "train"]
    assert found == ["evaluate/a-s0/p/e/work/0/metrics.json"]
    with pytest.raises(SystemExit, match=r"evaluate has no metrics\.json; give the folder of an experiment"):
        pack(tmp_path / "nothing", kept)
    assert (kept / found[0]).exists()


def test_trained_models_have_the_digests_of_their_cards_and_stay_small() -> None:
    cards = sorted(TRAINED.glob("*/README.md"))
    assert len(cards) == 4
    for card in cards:
        digest = hashlib.sha256((card.parent / "model.safetensors").read_bytes()).hexdigest()
        assert digest in card.read_text(encoding="utf-8"), card.parent.name
    assert sum(path.stat().st_size for path in TRAINED.rglob("*") if path.is_file()) < 24 * 2**20


def test_the_reproduced_claims_are_of_as_many_kinds_as_the_page_of_results_says() -> None:
    table, _, rest = read("docs/results.md").partition("<!-- end verdicts -->")
    reproduced = [line.split(" | ")[0] for line in table.splitlines() if "**reproduced**" in line]
    language, modes, jacobian, babi = (
        sum(bool(re.search(words, claim)) for claim in reproduced)
        for words in ("perplexity", "Simultaneous", "transition|Jacobian", "CatbAbI")
    )
    words = len(reproduced) - language - modes - jacobian - babi
    counts = (
        f"Of the {len(reproduced)} reproduced claims, {words} are on A5 and S5, {jacobian} on the Jacobian, and {babi} "
        f"on CatbAbI. Small language models have {language + modes}: {language} on perplexity and {modes} on the "
        f"agreement of two modes."
    )
    assert counts in " ".join(rest.split())
