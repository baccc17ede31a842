"""Draw the figures of docs/state-tracking.md from the kept results.

    python docs/images/state_tracking.py

A thin line or a dot is a seed, a thick line the median of the seeds, a bar their mean.
"""

import json
import runpy
from collections.abc import Callable, Iterator, Sequence
from math import log2
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pandas as pd

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "results" / "reference" / "state-tracking"
WIDTH, HEIGHT = 860, 350
PLOT_WIDTH, PLOT_HEIGHT, TOP = 330, 210, 46
PROTOCOL = "blockwise-8-token"
MODELS = [  # title, run and phase, tokens
    ("A5 x monoid, a third", "a5m-released/free-32", 1024),
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
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; stroke: none !important }
text.small { font-size: 11.5px }
.card { fill: #ffffff } .title { font-weight: 600; font-size: 14px } .muted { fill: #59636e }
.grid { stroke: #d1d9e0 } .dashed { stroke: #818b98; stroke-dasharray: 4 4; fill: none } .band { fill: #eff2f5 }
.blue { stroke: #0969da; fill: #0969da } .orange { stroke: #bc4c00; fill: #bc4c00 }
.green { stroke: #1a7f37; fill: #1a7f37 } .grey { stroke: #818b98; fill: #818b98 } text.grey { fill: #59636e }
polyline { fill: none !important } .seed { stroke-width: 1; stroke-opacity: .65 } .median { stroke-width: 2.6 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .card { fill: #0d1117 } .grid { stroke: #3d444d } .band { fill: #1c2128 }
  .muted, text.grey { fill: #9198a1 } .dashed { stroke: #9198a1 }
  .blue { stroke: #4493f8; fill: #4493f8 } .orange { stroke: #db6d28; fill: #db6d28 }
  .green { stroke: #3fb950; fill: #3fb950 }
}
"""
Seeds = Sequence[Sequence[tuple[float, float]]]  # a line of (x, y) for each seed


class Line(NamedTuple):
    kind: str
    label: str
    seeds: Seeds


class Panel(NamedTuple):
    title: str
    ticks: Sequence[int]
    lines: Sequence[Line]
    words: str  # below the axis
    band: int | None = None  # the lengths of training


def accuracies() -> pd.DataFrame:
    return pd.read_csv(KEPT / "accuracy.csv")


def seeds_of(frame: pd.DataFrame, value: str = "accuracy_last10") -> Seeds:
    return [
        [(row.length, getattr(row, value)) for row in of_seed.sort_values("length").itertuples()]
        for _, of_seed in frame.groupby("seed")
    ]


def draw_panel(panel: Panel, left: float) -> Iterator[str]:
    """Shares from 0 to 100 % over a logarithmic axis."""
    low, high = panel.ticks[0], panel.ticks[-1]

    def x_of(value: float) -> float:
        return left + PLOT_WIDTH * (0.04 + 0.92 * log2(value / low) / log2(high / low))

    def y_of(share: float) -> float:
        return TOP + PLOT_HEIGHT * (1 - share)

    yield f'<text class="title" x="{left}" y="{TOP - 18}">{panel.title}</text>'
    if panel.band is not None:
        yield f'<rect class="band" x="{left}" y="{TOP}" width="{x_of(panel.band) - left:.1f}" height="{PLOT_HEIGHT}"/>'
    for tick in (0, 0.5, 1):
        yield f'<path class="grid" d="M{left} {y_of(tick)}h{PLOT_WIDTH}"/>'
        yield f'<text x="{left - 8}" y="{y_of(tick) + 4}" text-anchor="end">{100 * tick:.0f} %</text>'
    for tick in panel.ticks:
        yield f'<text x="{x_of(tick):.1f}" y="{TOP + PLOT_HEIGHT + 19}" text-anchor="middle">{tick:,}</text>'
    place = f'x="{left + PLOT_WIDTH / 2}" y="{TOP + PLOT_HEIGHT + 38}" text-anchor="middle"'
    yield f'<text class="muted" {place}>{panel.words}</text>'
    for line in panel.lines:
        for seed in line.seeds:
            yield polyline(f"{line.kind} seed", [(x_of(x), y_of(y)) for x, y in seed])
            for x, y in seed:
                yield f'<circle class="{line.kind}" r="2.4" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}"/>'
        middle = [(column[0][0], median(y for _, y in column)) for column in zip(*line.seeds, strict=False)]
        yield polyline(f"{line.kind} median", [(x_of(x), y_of(y)) for x, y in middle])


def polyline(kind: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def two_panels(title: str, panels: Sequence[Panel]) -> str:
    """Both side by side, with the labels of all their lines below."""
    shapes = [shape for left, panel in zip((62, 500), panels, strict=True) for shape in draw_panel(panel, left)]
    labels = dict.fromkeys((line.kind, line.label) for panel in panels for line in panel.lines)
    x = 62.0
    for kind, label in labels:
        shapes.append(f'<path class="{kind} median" d="M{x:.0f} {HEIGHT - 23}h22"/>')
        shapes.append(f'<text x="{x + 29:.0f}" y="{HEIGHT - 18}">{label}</text>')
        x += 50 + 6.9 * len(label)
    return svg(title, shapes)


def svg(title: str, shapes: list[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="card" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def draw_a5() -> str:
    """A5 x monoid by length: the recipes, with few and with many hard tokens."""
    frame = accuracies()
    by_protocol = frame[frame["mode"] == PROTOCOL]
    runs = [
        ("grey", "fast recipe", by_protocol[by_protocol.run == "a5m-fast"]),
        ("orange", "explicit, 1 layer", frame[frame.run == "a5m-explicit"]),
        ("blue", "released recipe, a third of the steps", by_protocol[_is(by_protocol, "a5m-released/free-32")]),
        ("green", "released recipe, all steps", by_protocol[_is(by_protocol, "a5m-published/free-32")]),
    ]
    panels = [
        Panel(
            f"A5 x monoid, {100 * hard:.0f} % hard tokens",
            (256, 1024, 4096),
            [Line(kind, label, seeds_of(rows[rows.hard_fraction == hard])) for kind, label, rows in runs],
            "tokens in the test sequences",
            256,
        )
        for hard in (0.1, 0.5)
    ]
    return two_panels("Accuracy on A5 x monoid by length, recipe and share of hard tokens", panels)


def _is(frame: pd.DataFrame, run: str) -> pd.Series:
    return frame.run + "/" + frame.phase == run


def draw_state_passing() -> str:
    """Left exact matches by length, with and without state passing; right where sequences of 65,536 tokens fail."""
    frame = accuracies()
    by_protocol = frame[frame["mode"] == PROTOCOL]
    runs = [("blue", "without state passing", "s5-single-words"), ("green", "with state passing", "s5-state-passing")]
    lines = [
        Line(kind, label, seeds_of(by_protocol[by_protocol.run == run], "accuracy_sequence"))
        for kind, label, run in runs
    ]
    failing = [
        [(8192 * (index + 1), int(wrong) / 256) for index, wrong in enumerate(line.strip("| ").split(" | ")[2:])]
        for line in runpy.run_path(str(KEPT / "rows.py"))["TABLES"]["lost"][2]()
    ]
    panels = [
        Panel("S5: sequences right at every token", (32, 512, 4096, 65536), lines, "tokens in the test sequences", 32),
        Panel(
            "S5: share of wrong predictions by position",
            (8192, 16384, 32768, 65536),
            [Line("green", "with state passing", failing)],
            "position in sequences of 65,536 tokens",
        ),
    ]
    return two_panels("State passing on S5: exact matches by length, and failures by position", panels)


def draw_parallel() -> str:
    """Iterations of whole-sequence solves by the number of hard tokens, and serial evaluations a token by block."""
    frame = accuracies()
    whole = frame[(frame["mode"] == "released-criterion") & (frame.accuracy_last10 > 0.5)]
    low, high, left = 16.0, 256.0, 62.0

    def place(value: float, start: float, size: float) -> float:
        return start + size * log2(value / low) / log2(high / low)

    shapes = [f'<text class="title" x="{left}" y="{TOP - 18}">Whole sequences: iterations by hard tokens</text>']
    for tick in (16, 32, 64, 128, 256):
        x, y = place(tick, left, PLOT_WIDTH), place(tick, TOP + PLOT_HEIGHT, -PLOT_HEIGHT)
        shapes.append(f'<path class="grid" d="M{left} {y:.1f}h{PLOT_WIDTH}"/>')
        shapes.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>')
        shapes.append(f'<text x="{x:.1f}" y="{TOP + PLOT_HEIGHT + 19}" text-anchor="middle">{tick}</text>')
    shapes.append(f'<path class="dashed" d="M{left} {TOP + PLOT_HEIGHT}L{left + PLOT_WIDTH} {TOP}"/>')
    for row in whole.itertuples():
        x = place(row.length * row.hard_fraction, left, PLOT_WIDTH)
        y = place(row.iterations_per_token, TOP + PLOT_HEIGHT, -PLOT_HEIGHT)
        kind = "green" if row.run.startswith("s5") else "blue"
        shapes.append(f'<circle class="{kind}" fill-opacity=".5" r="4" cx="{x:.1f}" cy="{y:.1f}"/>')
    words = f'x="{left + PLOT_WIDTH / 2}" y="{TOP + PLOT_HEIGHT + 38}" text-anchor="middle"'
    shapes.append(f'<text class="muted" {words}>hard tokens in a sequence (dashed: one iteration each)</text>')
    shapes += _serial_steps(530.0)
    for x, kind, label in ((62, "blue", "A5 x monoid"), (262, "green", "S5, all tokens hard")):
        shapes.append(f'<circle class="{kind}" r="5" cx="{x + 6}" cy="{HEIGHT - 22}"/>')
        shapes.append(f'<text x="{x + 18}" y="{HEIGHT - 18}">{label}</text>')
    return svg("Serial depth of implicit layers, by number of hard tokens and by block", shapes)


def _serial_steps(left: float) -> Iterator[str]:
    """Serial evaluations a token if every token of a block must converge: a bar for each length of the blocks."""
    kept = HERE.parents[1] / "results" / "benchmarks" / "evaluation-blocks-cpu.json"
    rows = [row for row in json.loads(kept.read_text(encoding="utf-8"))["rows"] if row["stop"] == "token"]
    yield f'<text class="title" x="{left}" y="{TOP - 18}">Serial evaluations per token, by block</text>'
    for kind, model, shift in (("blue", "a5-monoid-published-s0", 0), ("green", "s5-state-passing-s0", 19)):
        steps = {row["block_len"]: row["serial_steps_per_token"] for row in rows if row["model"] == model}
        for index, block in enumerate((1, 8, 32, 64, max(steps))):
            y, wide = TOP + 2 + 42 * index + shift, 22 * steps[block]
            bar = f"M{left + 90} {y}h{wide:.1f}v16h-{wide:.1f}z"
            yield f'<path class="{kind}" stroke="none" fill-opacity=".6" d="{bar}"/>'
            yield f'<text x="{left + 96 + wide:.1f}" y="{y + 12}">{steps[block]:.2f}</text>'
    for index, label in enumerate(("1 token", "8 (protocol)", "32", "64", "all")):
        yield f'<text x="{left + 82}" y="{TOP + 24 + 42 * index}" text-anchor="end">{label}</text>'
    yield f'<path class="dashed" d="M{left + 112} {TOP}v{PLOT_HEIGHT}"/>'
    yield f'<text class="muted" x="{left + 112}" y="{TOP + PLOT_HEIGHT + 19}" text-anchor="middle">1: an RNN</text>'


def draw_modes() -> str:
    """Three models at four times their trained length, by the protocol and three other modes and criteria."""
    shapes = [shape for left, model in zip((60, 330, 600), MODELS, strict=True) for shape in draw_model(*model, left)]
    caption = "accuracy on the last ten tokens at four times the trained length; bar: mean over seeds, dots: seeds"
    shapes.append(f'<text class="muted" x="{WIDTH / 2}" y="{HEIGHT - 18}" text-anchor="middle">{caption}</text>')
    return svg("Accuracy of three implicit models by evaluation mode and criterion", shapes)


def draw_model(title: str, run: str, length: int, left: float) -> Iterator[str]:
    frame = accuracies().query("hard_fraction != 0.5")
    of_run = frame[_is(frame, run) & (frame.length == length)]
    yield f'<text class="title" x="{left}" y="{TOP - 18}">{title}</text>'
    for place, (mode, words) in enumerate(MODES.items()):
        x, accuracy = left + 60 * place, of_run[of_run["mode"] == mode].accuracy_last10
        top = TOP + PLOT_HEIGHT * (1 - accuracy.mean())
        kind = "grey" if place else "blue"
        bar = f"M{x} {TOP + PLOT_HEIGHT}V{top:.1f}h44V{TOP + PLOT_HEIGHT}z"
        yield f'<path class="{kind}" fill-opacity=".35" stroke="none" d="{bar}"/>'
        for value in accuracy:
            yield f'<circle class="{kind}" r="4" cx="{x + 22}" cy="{TOP + PLOT_HEIGHT * (1 - value):.1f}"/>'
        percent = f"{100 * accuracy.mean():.1f}"
        yield f'<text x="{x + 22}" y="{TOP + PLOT_HEIGHT - 8}" text-anchor="middle">{percent}</text>'
        for line, word in enumerate(words.split(), start=1):
            at = TOP + PLOT_HEIGHT + 4 + 14 * line
            yield f'<text class="small" x="{x + 22}" y="{at}" text-anchor="middle">{word}</text>'


FIGURES: dict[str, Callable[[], str]] = {
    "a5": draw_a5,
    "state-passing": draw_state_passing,
    "parallel": draw_parallel,
    "evaluation-modes": draw_modes,
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (HERE / f"{name}.svg").write_text(draw(), encoding="utf-8")
