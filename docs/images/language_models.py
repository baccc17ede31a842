"""Draw the figure of docs/pretraining.md, `language-models-25m.svg`, from the kept losses.

python docs/images/language_models.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "results" / "reference" / "language-models-25m" / "training_loss.csv"
LINES = {  # run, phase: label, colour
    ("small-explicit-lr0.001", "explicit"): ("explicit", "#bc4c00"),
    ("small-explicit-normed-lr0.001", "explicit"): ("explicit, weights normalised", "#d4a72c"),
    ("small-explicit-long-lr0.001", "explicit"): ("explicit, twice the tokens", "#8250df"),
    ("small-single-pass-lr0.003", "single"): ("implicit, a single pass", "#1a7f37"),
    ("small-implicit-lr0.003", "bounded"): ("implicit, (4+1)", "#0969da"),
    ("small-implicit-lr0.003", "free-80"): ("implicit, free from 80 %", "#54aeff"),
}


def draw(path: Path = HERE / "language-models-25m.svg") -> None:
    losses = pd.read_csv(KEPT).query("step >= 30 and step % 10 == 0").set_index(["run", "phase"]).sort_index()
    mpl.rcParams.update({"svg.hashsalt": "language-models", "font.size": 9, "svg.fonttype": "none"})
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.6), sharey=True, layout="constrained")
    units = {"tokens": (1e6, "million tokens"), "flops": (1e15, "10¹⁵ FLOPs")}
    for axis, (x, (scale, title)) in zip(axes, units.items(), strict=True):
        for key, (label, colour) in LINES.items():
            of_steps = losses.loc[key].groupby("step")
            at = of_steps[x].mean() / scale
            axis.plot(at, of_steps.loss.mean(), color=colour, label=label)
            axis.fill_between(at, of_steps.loss.min(), of_steps.loss.max(), color=colour, alpha=0.2, linewidth=0)
        axis.set(xlabel=title, ylim=(2.4, 7.2))
        axis.grid(color="#d1d9e0", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("training loss on new text, nats a token")
    axes[1].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    draw()
