"""The losses on docs/pretraining.md are the kept ones, and the kept tables those of the archive."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.pages import ROOT

KEPT = ROOT / "results/reference/language-models"
PAGE = " ".join((ROOT / "docs/pretraining.md").read_text(encoding="utf-8").split())
ROWS = {  # run and phase, and the run with 25M tokens
    "explicit": (("explicit", "explicit"), "small-explicit-lr0.001"),
    "implicit, a single pass": (("single-pass", "single"), "small-single-pass-lr0.003"),
    "implicit, (4+1)": (("implicit", "bounded"), "small-implicit-lr0.003"),
    "implicit, free from 80 %": (("implicit", "free-80"), "small-implicit-lr0.003"),
    "explicit, twice the tokens": (("explicit-long", "explicit"), "small-explicit-long-lr0.001"),
}


@pytest.fixture(scope="module")
def losses() -> dict[str, pd.DataFrame]:
    """By experiment: mean loss over the last tenth of the steps, by run and phase, a column for each seed.

    A kept loss is the mean since the one before.
    """
    frame = pd.read_csv(KEPT / "training_loss.csv")
    job = ["experiment", "run", "phase", "seed"]
    frame["weight"] = frame.groupby(job).step.diff().fillna(1)
    last = frame[frame.step > 0.9 * frame.groupby(job).step.transform("max")]
    sums = last.assign(loss=last.loss * last.weight).groupby(job)[["loss", "weight"]].sum()
    mean = sums.loss / sums.weight
    return {name: mean.loc[name].unstack() for name in ("language-models", "language-models-25m")}


def test_the_losses_on_the_page_are_the_kept_ones(losses) -> None:
    kept, small = losses["language-models"], losses["language-models-25m"]
    frame = pd.read_csv(KEPT / "training_loss.csv").query("experiment == 'language-models'")
    flops = frame.groupby(["run", "phase"]).flops.max() / 1e15
    for label, (key, small_run) in ROWS.items():
        seeds = ["not run" if math.isnan(loss) else f"{loss:.3f}" for loss in kept.loc[key]]
        mean = "" if "not run" in seeds else f" {kept.loc[key].mean():.3f}"
        cells = f"| {label} | {flops.loc[key]:.1f} | {' | '.join(seeds)} |{mean} |"
        assert f"{cells} {small.loc[small_run, key[1]].mean():.2f} |" in PAGE, label
    normed, slow = small.loc["small-explicit-normed-lr0.001", "explicit"], small.loc["small-explicit-lr0.0003"]
    assert f"({normed.mean():.2f} against {small.loc['small-explicit-lr0.001'].mean(axis=None):.2f})" in PAGE
    first = small.loc["small-explicit-lr0.001", "explicit"][0]
    assert f"({slow.loc['explicit'][0]:.2f} against {first:.2f})" in PAGE


def test_the_differences_on_the_page_are_the_kept_ones(losses) -> None:
    kept = losses["language-models"]
    single, bounded = kept.loc["single-pass", "single"], kept.loc["implicit", "bounded"]
    of_seeds = (
        bounded - single,
        single - kept.loc["explicit", "explicit"],
        kept.loc["explicit-long", "explicit"] - bounded,
    )
    for found in of_seeds:
        mean, half = found.mean(), 4.303 * found.std() / 3**0.5  # Student's t with two degrees of freedom
        assert f"{mean:+.3f} nats ({mean - half:.3f} to {mean + half:.3f})" in PAGE
    assert f"ends {bounded[0] - kept.loc['implicit', 'free-80'][0]:.3f} nats below its (4+1) trunk" in PAGE


def test_the_losses_on_held_out_text_are_the_kept_ones() -> None:
    frame = pd.read_csv(KEPT / "test_loss.csv").query("experiment == 'language-models'")
    trained = frame[frame["mode"].isin(["parallel", "as_trained"])].groupby(["run", "phase", "length"]).loss
    cells = {at: f"{of.mean():.2f} ({of.min():.2f} to {of.max():.2f})" for at, of in trained}
    for label, (key, _) in ROWS.items():
        if label != "implicit, free from 80 %":
            assert f"| {label} | {' | '.join(cells[(*key, length)] for length in (2048, 4096, 8192))} |" in PAGE
    by_mode = frame.pivot_table(index=["run", "phase", "length", "seed"], columns="mode", values="loss")
    assert f"has a loss of {by_mode.simultaneous.loc['implicit', 'bounded', 2048].mean():.2f} at" in PAGE
    assert f"by at most {(by_mode.blockwise - by_mode.simultaneous).abs().max():.2f}." in PAGE


def test_the_tables_are_those_of_the_archive(tmp_path: Path) -> None:
    subprocess.run([sys.executable, KEPT / "tables.py", tmp_path], check=True)
    for name in ("training_loss.csv", "test_loss.csv"):
        assert (tmp_path / name).read_text() == (KEPT / name).read_text()
