"""Numbers on the pages are those of the files they come from."""

from __future__ import annotations

import json
import re
import runpy

import pandas as pd
import pytest

from tests.pages import ROOT

BENCHMARKS = ROOT / "results" / "benchmarks"
TRAINING = {
    "state-tracking-explicit": "one-layer Mamba2, 512 x 256 tokens, explicit",
    "state-tracking-unrolled": "one-layer Mamba2, unrolled(4)",
    "state-tracking-free": "one-layer Mamba2, free (32+4), all 32 iterations",
    "mamba2-130m-explicit": "Mamba2 130M, 8 x 2048, explicit",
    "mamba2-130m-pretrain": "Mamba2 130M, (4+1)",
    "mamba2-130m-implicit": "Mamba2 130M, (24+4), 15 iterations",
    "llama3-130m-explicit": "Llama 130M, 8 x 2048, explicit",
    "llama3-130m-pretrain": "Llama 130M, (4+1)",
    "llama3-130m-implicit": "Llama 130M, (32+4), 21 iterations",
    "mamba2-1.3b-implicit": "Mamba2 1.3B, 4 x 2048, (24+4), 12 iterations",
    "llama3-1.3b-implicit": "Llama 1.3B, 4 x 2048, (32+4), 19 iterations",
}
MODELS = {"mamba2": "Mamba2 130M", "llama3": "Llama 130M"}
WAYS = {"blockwise": "blocks of 32", "blockwise-8-token": "blocks of 8, by token", "published": "published rule"}


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def benchmark(name: str) -> dict:
    return json.loads((BENCHMARKS / f"{name}-h200.json").read_text(encoding="utf-8"))


def cells(text: str, *start: str) -> list[str]:
    """The cells of the one row that starts with these."""
    (row,) = re.findall("^" + re.escape("| " + " | ".join(start) + " | ") + r"(.*) \|$", text, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def digits(value: float) -> float:
    """Three significant digits, as the pages have them."""
    return float(f"{value:.3g}")


@pytest.mark.parametrize("row", TRAINING)
def test_a_training_step_is_the_measured_one(row: str) -> None:
    (published,) = [found for found in benchmark("published-code")["training"] if found["row"] == row]
    ours = [*benchmark("training-step")["rows"], *benchmark("training-step-1.3b")["rows"]]
    ms = next(found["ms"] for found in ours if found["row"] == row)
    theirs, here, ratio, floor = (float(cell) for cell in cells(page("docs/performance.md"), TRAINING[row]))
    assert (theirs, floor) == (published["ms"], published["floor_ms"])
    assert here == (digits(ms) if ms < 1000 else round(ms))
    assert ratio == pytest.approx(theirs / ms, rel=0.03)


@pytest.mark.parametrize("found", benchmark("decoding")["rows"], ids=lambda row: f"{row['model']}-{row['batch']}")
def test_a_decoded_token_is_the_measured_one(found: dict) -> None:
    (published,) = [
        row
        for row in benchmark("published-code")["decoding"]
        if (row["model"], row["batch"]) == (found["model"], found["batch"])
    ]
    family, _, kind = found["model"].split("-")
    row = cells(page("docs/performance.md"), f"{MODELS[family]} {kind}", str(found["batch"]))
    measured = [published["ms"], *(digits(found[key]) for key in ("ms", "plain_ms"))]
    assert [float(cell) for cell in row[:3]] == pytest.approx(measured, abs=0.051)
    assert row[3] == "not measured" if found["generate_ms"] is None else float(row[3]) == digits(found["generate_ms"])
    assert row[4] == (str(found["f_evaluations"]) if found["f_evaluations"] else "")


def test_every_accuracy_of_the_readme_is_a_kept_one() -> None:
    frame = pd.read_csv(ROOT / "results/reference/state-tracking/accuracy.csv").query("hard_fraction != 0.5")
    shown = {
        ("a5m-released", "blockwise", 256): ("A5 × monoid, trained on 256 tokens, tested on 256", "blocks of 32"),
        ("a5m-released", "blockwise", 1024): ("tested on 1,024", "blocks of 32"),
        ("a5m-released", "published", 1024): ("", "published rule"),
        ("s5-implicit", "blockwise-8-token", 128): (
            "S5, trained on 32 tokens, tested on 128",
            "blocks of 8, by token",
        ),
        ("s5-implicit", "published", 128): ("", "published rule"),
        ("s5-explicit-layers16", "parallel", 128): ("S5, 16 explicit layers, tested on 128", "in parallel"),
    }
    rows = re.findall(r"^\| (.*?) ?\| (.+?) \| ([\d., ]+) % \| ([\d.]+) % \|$", page("README.md"), re.MULTILINE)
    measured = []
    for (run, mode, length), (what, way) in shown.items():
        found = frame[(frame.run == run) & (frame["mode"] == mode) & (frame.length == length)].sort_values("seed")
        percent = 100 * found.accuracy_last10
        measured.append((what, way, ", ".join(f"{value:.1f}" for value in percent), f"{percent.mean():.1f}"))
    assert rows == measured


def test_the_figure_of_the_readme_is_drawn_from_the_kept_results() -> None:
    draw = runpy.run_path(str(ROOT / "docs/images/state_tracking.py"))["draw"]
    assert page("docs/images/state-tracking.svg") == draw()


@pytest.mark.parametrize(("length", "hard"), [(256, 0.1), (256, 0.5), (1024, 0.1), (1024, 0.5)])
def test_the_accuracies_with_one_seed_are_the_kept_ones(length: int, hard: float) -> None:
    text = page("docs/state-tracking.md").partition("## With one seed")[2]
    frame = pd.read_csv(ROOT / "results/reference/h200/tables/accuracy.csv").query("run == 'a5m-implicit'")
    found = frame[(frame.length == length) & (frame.hard_fraction == hard)].set_index("mode").accuracy_last10_mean
    (row,) = re.findall(rf"^\| {length:,}, {100 * hard:.0f} %.*", text, re.MULTILINE)
    shown = [float(re.findall(r"[\d.]+", cell)[0]) for cell in row.split("|")[2:5]]
    assert shown == [round(100 * found[mode], 1) for mode in ("sequential", "blockwise", "published")]
