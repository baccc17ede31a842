"""The losses on docs/pretraining.md are the kept ones, and the kept tables those of the archive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd

from tests.pages import ROOT

KEPT = ROOT / "results/reference/language-models-25m"
PAGE = " ".join((ROOT / "docs/pretraining.md").read_text(encoding="utf-8").split())
ROWS = {
    "explicit": ("small-explicit-lr0.001", "explicit"),
    "explicit, weights normalised": ("small-explicit-normed-lr0.001", "explicit"),
    "implicit, a single pass": ("small-single-pass-lr0.003", "single"),
    "implicit, (4+1)": ("small-implicit-lr0.003", "bounded"),
    "implicit, free from 80 %": ("small-implicit-lr0.003", "free-80"),
    "explicit, twice the tokens": ("small-explicit-long-lr0.001", "explicit"),
}


def last_losses() -> pd.DataFrame:
    """Mean loss over the last tenth of the steps, a column for each seed; each is the mean since the one before."""
    frame = pd.read_csv(KEPT / "training_loss.csv")
    of_run = frame.groupby(["run", "phase", "seed"]).step
    frame["weight"] = of_run.diff().fillna(1)
    last = frame[frame.step > 0.9 * of_run.transform("max")]
    sums = last.assign(loss=last.loss * last.weight).groupby(["run", "phase", "seed"])[["loss", "weight"]].sum()
    return (sums.loss / sums.weight).unstack()


def test_the_losses_on_the_page_are_the_kept_ones() -> None:
    losses = last_losses()
    flops = pd.read_csv(KEPT / "training_loss.csv").groupby(["run", "phase"]).flops.max() / 1e15
    for label, key in ROWS.items():
        cells = [f"{flops.loc[key]:.1f}", *(f"{loss:.2f}" for loss in losses.loc[key]), f"{losses.loc[key].mean():.2f}"]
        assert f"| {label} | {' | '.join(cells)} |" in PAGE


def test_the_differences_to_a_single_pass_on_the_page_are_the_kept_ones() -> None:
    losses = last_losses()
    single = losses.loc[ROWS["implicit, a single pass"]]
    for label in ("implicit, (4+1)", "implicit, free from 80 %"):
        found = losses.loc[ROWS[label]] - single
        half = 4.303 * found.std() / 3**0.5  # Student's t with two degrees of freedom
        mean = found.mean()
        assert f"+{mean:.2f} nats (95 % interval {mean - half:.2f} to {mean + half:.2f})" in PAGE, label


def test_the_losses_on_held_out_text_are_the_kept_ones() -> None:
    frame = pd.read_csv(KEPT / "test_loss.csv")
    whole = frame[frame["mode"].isin(["parallel", "simultaneous"])].groupby(["run", "phase", "length"]).loss
    cells = {at: f"{of.mean():.2f} ({of.min():.2f} to {of.max():.2f})" for at, of in whole}
    for label, key in ROWS.items():
        if label == "implicit, a single pass":
            assert f"its loss is {cells[(*key, 2048)][:4]}." in PAGE
        else:
            assert f"| {label} | {cells[(*key, 2048)]} | {cells[(*key, 8192)]} |" in PAGE
    by_mode = frame.pivot_table(index=["run", "phase", "seed", "length"], columns="mode", values="loss")
    of_iterated = by_mode.drop(index=ROWS["implicit, a single pass"][0])
    assert (of_iterated.blockwise - of_iterated.simultaneous).abs().max() < 0.025


def test_the_tables_are_those_of_the_archive(tmp_path: Path) -> None:
    subprocess.run([sys.executable, KEPT / "tables.py", tmp_path], check=True)
    for name in ("training_loss.csv", "test_loss.csv"):
        assert (tmp_path / name).read_text() == (KEPT / name).read_text()
