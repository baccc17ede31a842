"""Draw the figure of docs/language-models.md, `language-models.svg`, from the kept losses.

python docs/images/language_models.py
"""

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "results" / "reference" / "language-models" / "training_loss.csv"
LINES = {  # run, phase: label, colour
    ("explicit", "explicit"): ("explicit", "#bc4c00"),
    ("explicit-normed", "explicit"): ("explicit, weights normalised", "#bf8700"),
    ("explicit-long", "explicit"): ("explicit, twice the tokens", "#8250df"),
    ("single-pass", "single"): ("implicit, a single pass", "#1a7f37"),
    ("implicit", "bounded"): ("implicit, (4+1)", "#0969da"),
    ("implicit", "free-80"): ("implicit, free from 80 %", "#1f2328"),
}
SMOOTHED_STEPS = 50


def draw(path: Path = HERE / "language-models.svg") -> None:
    losses = pd.read_csv(KEPT).query("experiment == 'language-models' and step % 10 == 0")
    by_seed = losses.groupby(["run", "phase", "seed"]).loss
    losses["loss"] = by_seed.transform(lambda loss: loss.rolling(SMOOTHED_STEPS // 10).mean())
    losses = losses.query("step >= 80 and step % 20 == 0").set_index(["run", "phase"]).sort_index()
    mpl.rcParams.update({"svg.hashsalt": "language-models", "font.size": 9, "svg.fonttype": "none"})
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.6), sharey=True, layout="constrained")
    units = {"tokens": (1e6, "million tokens"), "flops": (1e15, "10¹⁵ FLOPs")}
    for axis, (x, (scale, title)) in zip(axes, units.items(), strict=True):
        for key, (label, colour) in LINES.items():
            of_steps = losses.loc[key].groupby("step")
            at = of_steps[x].mean() / scale
            axis.plot(at, of_steps.loss.mean(), color=colour, label=label)
            axis.fill_between(at, of_steps.loss.min(), of_steps.loss.max(), color=colour, alpha=0.2, linewidth=0)
        axis.set(xlabel=title, ylim=(1.5, 3.5))
        axis.grid(color="#d1d9e0", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("training loss on new text, nats per token")
    axes[1].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    draw()
