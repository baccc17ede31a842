"""Draw the dot plot of docs/language-models.md, `language-model-losses.svg`, from the kept losses.

    python docs/images/language_model_losses.py

A small dot is a seed, a large one the mean, a bar its 95 % interval. A panel is a text, once it was run; a nat has the
same width in all of them.
"""

import runpy
from collections.abc import Iterator
from math import ceil, floor
from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent
ROWS = runpy.run_path(str(HERE.parents[1] / "results/reference/language-models/rows.py"))
STYLE = runpy.run_path(str(HERE / "state_tracking.py"))["STYLE"]
WIDTH, FLOPS_RIGHT, LEFT, RIGHT = 860, 312, 340, 830
ROW, HEAD, FOOT = 26, 44, 40
COLORS = {
    "explicit": "orange",
    "normed": "orange",
    "single": "green",
    "bounded": "blue",
    "free": "blue",
    "long": "grey",
}


def draw() -> str:
    texts = {text: {model: ROWS["losses"](text, model) for model in ROWS["LABELS"]} for text in ROWS["TEXTS"]}
    found = {
        text: {model: losses for model, losses in models.items() if not losses.empty} for text, models in texts.items()
    }
    ends = {text: (floor(10 * low), ceil(10 * high)) for text, (low, high) in ends_of(found)}
    steps = max(high - low for low, high in ends.values())
    panels, top = [], 8
    for text, (low, _) in ends.items():
        panels += draw_panel(text, found[text], low / 10, steps, top)
        top += HEAD + ROW * len(found[text]) + FOOT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img">',
            "<title>Loss on held-out text by model and text, with 95 % intervals and the FLOPs of training</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="card" width="{WIDTH}" height="{top}" rx="8"/>',
            *panels,
            "</svg>\n",
        ]
    )


def ends_of(found: dict[str, dict[str, pd.Series]]) -> Iterator[tuple[str, tuple[float, float]]]:
    """The lowest and the highest loss or end of an interval of each text that was run."""
    for text, models in found.items():
        shown = [end for losses in models.values() for end in (*losses, *(ROWS["interval"](losses) or ()))]
        if shown:
            yield text, (min(shown), max(shown))


def draw_panel(text: str, losses: dict[str, pd.Series], low: float, steps: int, top: int) -> Iterator[str]:
    """A row for each model, over an axis that begins at `low` and has `steps` tenths of a nat."""
    bounds = {model: ROWS["interval"](values) for model, values in losses.items()}
    bottom = top + HEAD + ROW * len(losses)

    def x_of(loss: float) -> float:
        return LEFT + (RIGHT - LEFT) * (loss - low) / (steps / 10)

    yield f'<text class="title" x="16" y="{top + 22}">{text}</text>'
    yield f'<text class="muted small" x="{FLOPS_RIGHT}" y="{top + 22}" text-anchor="end">10¹⁵ FLOPs</text>'
    for tick in range(0, steps + 1, 1 if steps <= 8 else 2):
        x = x_of(low + tick / 10)
        yield f'<path class="grid" d="M{x:.1f} {top + HEAD - 10}V{bottom}"/>'
        yield f'<text class="small" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{low + tick / 10:.1f}</text>'
    words = "loss on held-out text, nats per token"
    yield f'<text class="muted small" x="{(LEFT + RIGHT) / 2}" y="{bottom + 32}" text-anchor="middle">{words}</text>'
    for number, (model, values) in enumerate(losses.items()):
        y, color = top + HEAD + ROW * number + 4, COLORS[model]
        flops = ROWS["tested"](text, model).train_flops.mean() / 1e15
        yield f'<text x="16" y="{y + 4}">{ROWS["LABELS"][model]}</text>'
        yield f'<text x="{FLOPS_RIGHT}" y="{y + 4}" text-anchor="end">{flops:.1f}</text>'
        if (ends := bounds[model]) is not None:
            yield f'<path class="{color} median" d="M{x_of(ends[0]):.1f} {y}H{x_of(ends[1]):.1f}"/>'
        for loss in values:
            yield f'<circle class="{color}" fill-opacity=".55" r="2.2" cx="{x_of(loss):.1f}" cy="{y + 8}"/>'
        yield f'<circle class="{color}" r="4.6" cx="{x_of(values.mean()):.1f}" cy="{y}"/>'


if __name__ == "__main__":
    (HERE / "language-model-losses.svg").write_text(draw(), encoding="utf-8")
