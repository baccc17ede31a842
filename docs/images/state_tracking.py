"""Draw `state-tracking.svg` and `evaluation-modes.svg` from the kept results.

    python docs/images/state_tracking.py

The first has one panel for each task: implicit models by the protocol, explicit ones in parallel. The second has three
models at four times their trained length, by the protocol and three other modes and criteria. A dot is a seed, a line
or bar the mean over the seeds.
"""

from collections.abc import Iterator
from math import log2
from pathlib import Path
from typing import NamedTuple

import pandas as pd

HERE = Path(__file__).parent
REFERENCE = HERE.parents[1] / "results" / "reference"
WIDTH, HEIGHT = 860, 330
PLOT_WIDTH, PLOT_HEIGHT, TOP = 300, 210, 62
MODELS = [  # title, run and phase, tokens
    ("A5 x monoid, released (32+4)", "a5m-released/free-32", 1024),
    ("A5 x monoid, fast recipe", "a5m-fast/free", 1024),
    ("S5", "s5-implicit/free", 128),
]
MODES = {
    "blockwise-8-token": "protocol",
    "sequential": "sequential",
    "blockwise": "blocks of&#160;32",
    "released-criterion": "released criterion",
}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.card { fill: #ffffff } .title { font-weight: 600; font-size: 14px } .small { font-size: 12px }
.grid { stroke: #d1d9e0 } .chance { stroke: #818b98; stroke-dasharray: 4 4 }
.implicit { stroke: #0969da; fill: #0969da } .explicit { stroke: #bc4c00; fill: #bc4c00 }
.passing { stroke: #1a7f37; fill: #1a7f37 } .other { stroke: #818b98; fill: #818b98 }
polyline { fill: none !important; stroke-width: 2.5 } text { stroke: none !important }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .card { fill: #0d1117 } .grid { stroke: #3d444d } .chance { stroke: #9198a1 }
  .implicit { stroke: #4493f8; fill: #4493f8 } .explicit { stroke: #db6d28; fill: #db6d28 }
  .passing { stroke: #3fb950; fill: #3fb950 }
}
"""


class Line(NamedTuple):
    kind: str
    label: str
    label_at: tuple[float, float]  # pixels from the left of the panel, accuracy
    accuracy: pd.DataFrame  # columns length, seed, accuracy_last10


class Panel(NamedTuple):
    title: str
    chance: float
    lines: list[Line]


def panels() -> list[Panel]:
    """The two tasks, read from the table."""
    frame = pd.read_csv(REFERENCE / "state-tracking" / "accuracy.csv").query("hard_fraction != 0.5")
    blocks = frame[frame["mode"] == "blockwise-8-token"]
    released = blocks[(blocks.run == "a5m-released") & (blocks.phase == "free-32")]
    s5 = [
        Line("passing", "with state passing, 5 seeds", (116, 1.04), blocks[blocks.run == "s5-state-passing"]),
        Line("implicit", "1 implicit layer, 5 seeds", (132, 0.25), blocks[blocks.run == "s5-implicit"]),
        Line("explicit", "16 explicit layers, 3 seeds", (104, 0.06), frame[frame.run == "s5-explicit-layers16"]),
    ]
    a5 = [
        Line("implicit", "1 implicit layer, 3 seeds", (60, 0.55), released),
        Line("explicit", "1 explicit layer, 3 seeds", (60, 0.07), frame[frame.run == "a5m-explicit"]),
    ]
    return [Panel("S5, trained on 32 tokens", 1 / 120, s5), Panel("A5 x monoid, trained on 256 tokens", 1 / 60, a5)]


def draw_panel(panel: Panel, left: float) -> Iterator[str]:
    lengths = sorted({length for line in panel.lines for length in line.accuracy.length})
    logs = [log2(length / lengths[0]) for length in lengths]
    x_of = {n: left + PLOT_WIDTH * (0.08 + 0.84 * at / logs[-1]) for n, at in zip(lengths, logs, strict=True)}

    def y_of(accuracy: float) -> float:
        return TOP + PLOT_HEIGHT * (1 - accuracy)

    yield f'<text class="title" x="{left}" y="{TOP - 26}">{panel.title}</text>'
    for tick in (0, 0.5, 1):
        yield f'<path class="grid" d="M{left} {y_of(tick)}h{PLOT_WIDTH}"/>'
        yield f'<text x="{left - 8}" y="{y_of(tick) + 4}" text-anchor="end">{tick:.0%}</text>'
    yield f'<path class="chance" d="M{left} {y_of(panel.chance):.1f}h{PLOT_WIDTH}"/>'
    for length, x in x_of.items():
        yield f'<text x="{x:.1f}" y="{TOP + PLOT_HEIGHT + 22}" text-anchor="middle">{length:,}</text>'
    for line in panel.lines:
        mean = line.accuracy.groupby("length").accuracy_last10.mean()
        points = " ".join(f"{x_of[length]:.1f},{y_of(value):.1f}" for length, value in mean.items())
        yield f'<polyline class="{line.kind}" points="{points}"/>'
        for row in line.accuracy.itertuples():
            yield f'<circle class="{line.kind}" fill-opacity=".45" r="4" ' + (
                f'cx="{x_of[row.length]:.1f}" cy="{y_of(row.accuracy_last10):.1f}"/>'
            )
        x, accuracy = line.label_at
        yield f'<text class="{line.kind}" x="{left + x}" y="{y_of(accuracy):.1f}">{line.label}</text>'


def draw() -> str:
    """The figure of the README as SVG."""
    shapes = [shape for left, panel in zip((90, 510), panels(), strict=True) for shape in draw_panel(panel, left)]
    caption = "tokens in the test sequences; accuracy on the last ten; dots: seeds, line: mean, dashes: chance"
    return svg("Accuracy of implicit and explicit Mamba2 models by sequence length", shapes, caption)


def svg(title: str, shapes: list[str], caption: str) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="card" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
            *shapes,
            f'<text class="small" x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{caption}</text>',
            "</svg>\n",
        ]
    )


def draw_modes() -> str:
    """The figure of evaluation modes as SVG."""
    shapes = [shape for left, model in zip((60, 330, 600), MODELS, strict=True) for shape in draw_model(*model, left)]
    caption = "accuracy on the last ten tokens at four times the trained length; bar: mean over seeds, dots: seeds"
    return svg("Accuracy of three implicit models by evaluation mode and criterion", shapes, caption)


def draw_model(title: str, run: str, length: int, left: float) -> Iterator[str]:
    """A bar for each mode: the mean over seeds, each of which is a dot."""
    frame = pd.read_csv(REFERENCE / "state-tracking" / "accuracy.csv").query("hard_fraction != 0.5")
    of_run = frame[(frame.run + "/" + frame.phase == run) & (frame.length == length)]
    yield f'<text class="title" x="{left}" y="{TOP - 26}">{title}</text>'
    for place, (mode, words) in enumerate(MODES.items()):
        x, accuracy = left + 60 * place, of_run[of_run["mode"] == mode].accuracy_last10
        top = TOP + PLOT_HEIGHT * (1 - accuracy.mean())
        kind = "other" if place else "implicit"
        bar = f"M{x} {TOP + PLOT_HEIGHT}V{top:.1f}h44V{TOP + PLOT_HEIGHT}z"
        yield f'<path class="{kind}" fill-opacity=".35" stroke="none" d="{bar}"/>'
        for value in accuracy:
            yield f'<circle class="{kind}" r="4" cx="{x + 22}" cy="{TOP + PLOT_HEIGHT * (1 - value):.1f}"/>'
        percent = f"{100 * accuracy.mean():.1f}"
        yield f'<text class="small" x="{x + 22}" y="{TOP + PLOT_HEIGHT - 8}" text-anchor="middle">{percent}</text>'
        for line, word in enumerate(words.split(), start=1):
            at = TOP + PLOT_HEIGHT + 2 + 13 * line
            yield f'<text class="small" x="{x + 22}" y="{at}" text-anchor="middle">{word}</text>'


if __name__ == "__main__":
    (HERE / "state-tracking.svg").write_text(draw(), encoding="utf-8")
    (HERE / "evaluation-modes.svg").write_text(draw_modes(), encoding="utf-8")
