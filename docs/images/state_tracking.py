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
from typing import Any, NamedTuple

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
    top: float = 1.0
    is_logarithmic: bool = True


def accuracies() -> pd.DataFrame:
    return pd.read_csv(KEPT / "accuracy.csv")


def seeds_of(frame: pd.DataFrame, value: str = "accuracy_last10") -> Seeds:
    return [
        [(row.length, getattr(row, value)) for row in of_seed.sort_values("length").itertuples()]
        for _, of_seed in frame.groupby("seed")
    ]


def draw_panel(panel: Panel, left: float) -> Iterator[str]:
    """Draw shares from 0 to the panel's top over an axis from its first to its last tick."""
    low, high = panel.ticks[0], panel.ticks[-1]

    def x_of(value: float) -> float:
        place = log2(value / low) / log2(high / low) if panel.is_logarithmic else (value - low) / (high - low)
        return left + PLOT_WIDTH * (0.04 + 0.92 * place)

    def y_of(share: float) -> float:
        return TOP + PLOT_HEIGHT * (1 - share / panel.top)

    yield f'<text class="title" x="{left}" y="{TOP - 18}">{panel.title}</text>'
    if panel.band is not None:
        yield f'<rect class="band" x="{left}" y="{TOP}" width="{x_of(panel.band) - left:.1f}" height="{PLOT_HEIGHT}"/>'
    for tick in (0, panel.top / 2, panel.top):
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
    """Draw both panels side by side, with the labels of all their lines below."""
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
    """Draw the recipes of A5 x monoid by length, with few and with many hard tokens."""
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
    """Draw exact matches by length, also of LSTMs, and where implicit models fail in 65,536 tokens."""
    frame = accuracies()
    runs = [
        ("blue", "implicit, without state passing", "s5-single-words"),
        ("orange", "LSTM, with it, 1e-3", "s5-passing-lstm-rate0.001"),
        ("grey", "LSTM, with it, 3e-3", "s5-passing-lstm-rate0.003"),
        ("green", "implicit, with it (5 of 10 damped)", "s5-state-passing(-damped)?"),
    ]
    read = frame[frame["mode"].isin([PROTOCOL, "parallel"])]
    lines = [
        Line(kind, label, seeds_of(read[read.run.str.fullmatch(run)], "accuracy_sequence")) for kind, label, run in runs
    ]
    failing = [
        [(8192 * (index + 1), int(wrong) / 256) for index, wrong in enumerate(line.strip("| ").split(" | ")[2:])]
        for line in runpy.run_path(str(KEPT / "rows.py"))["TABLES"]["lost"][2]()
    ]
    panels = [
        Panel("S5: sequences right at every token", (32, 512, 4096, 65536), lines, "tokens in the test sequences", 32),
        Panel(
            "S5: share of wrong predictions by position",
            (0, 16384, 32768, 49152, 65536),
            [Line("green", "implicit, with it", failing)],
            "position in sequences of 65,536 tokens",
            top=0.1,
            is_logarithmic=False,
        ),
    ]
    return two_panels("State passing on S5: exact matches by length, and failures by position", panels)


PARALLEL = {  # color and label of each trained model
    "a5-monoid-published-s0": ("blue", "A5 x monoid"),
    "a5-monoid-released-s0": ("orange", "A5 x monoid, a third of the steps"),
    "s5-state-passing-s0": ("green", "S5, all tokens hard"),
}


def draw_parallel() -> str:
    """Draw iterations of whole-sequence solves by hard tokens, and serial evaluations per token by block."""
    shapes = [*_iterations(62.0), *_serial_steps(530.0)]
    x = 62.0
    for kind, label in PARALLEL.values():
        shapes.append(f'<circle class="{kind}" r="5" cx="{x + 6:.0f}" cy="{HEIGHT - 22}"/>')
        shapes.append(f'<text x="{x + 18:.0f}" y="{HEIGHT - 18}">{label}</text>')
        x += 45 + 6.9 * len(label)
    return svg("Serial depth of implicit layers, by number of hard tokens and by block", shapes)


def _benchmark(name: str) -> dict[str, Any]:
    kept = HERE.parents[1] / "results" / "benchmarks" / f"{name}.json"
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def _iterations(left: float) -> Iterator[str]:
    """A dot for each sequence that converged, and the line fitted to those of a model."""
    kept = _benchmark("hard-tokens-cpu")
    right, top = 140, 240

    def place(hard: float, iterations: float) -> str:
        return f"{left + PLOT_WIDTH * hard / right:.1f} {TOP + PLOT_HEIGHT * (1 - iterations / top):.1f}"

    yield f'<text class="title" x="{left}" y="{TOP - 18}">Whole sequences: iterations by hard tokens</text>'
    for tick in range(0, top + 1, 60):
        yield f'<path class="grid" d="M{place(0, tick)}h{PLOT_WIDTH}"/>'
        _, y = place(0, tick).split()
        yield f'<text x="{left - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{tick}</text>'
    for tick in range(0, right + 1, 20):
        x, _ = place(tick, 0).split()
        yield f'<text x="{x}" y="{TOP + PLOT_HEIGHT + 19}" text-anchor="middle">{tick}</text>'
    yield f'<path class="dashed" d="M{place(0, 0)}L{place(right, right)}"/>'
    for model, (kind, _) in PARALLEL.items():
        rows = [row for row in kept["rows"] if row["model"] == model]
        lists = [zip(row["hard_tokens"], row["iterations"], row["is_converged"], strict=True) for row in rows]
        dots = sorted({(hard, iterations) for one in lists for hard, iterations, is_converged in one if is_converged})
        for hard, iterations in dots:
            x, y = place(hard, iterations).split()
            yield f'<circle class="{kind}" fill-opacity=".4" stroke="none" r="2.6" cx="{x}" cy="{y}"/>'
        (fit,) = (fit for fit in kept["fits"] if fit["model"] == model)
        start, slope, (first, *_, last) = fit["at_none"], fit["per_hard_token"], [hard for hard, _ in dots]
        yield f'<path class="{kind}" d="M{place(first, start + slope * first)}L{place(last, start + slope * last)}"/>'
    words = f'x="{left + PLOT_WIDTH / 2}" y="{TOP + PLOT_HEIGHT + 38}" text-anchor="middle"'
    yield f'<text class="muted" {words}>hard tokens in a sequence (dashed: one iteration each)</text>'


def _serial_steps(left: float) -> Iterator[str]:
    """Draw serial evaluations per token if every token of a block must converge: a bar for each model and block."""
    rows = [row for row in _benchmark("evaluation-blocks-cpu")["rows"] if row["stop"] == "token"]
    yield f'<text class="title" x="{left}" y="{TOP - 18}">Serial evaluations per token, by block</text>'
    blocks = {1: "1 token", 8: "8 (protocol)", 32: "32", 256: "256 (A5: the whole)", 512: "512 (S5: the whole)"}
    for index, (block, label) in enumerate(blocks.items()):
        top = TOP + 2 + 42 * index
        yield f'<text x="{left + 82}" y="{top + 22}" text-anchor="end">{label}</text>'
        for place, (model, (kind, _)) in enumerate(PARALLEL.items()):
            for steps in (
                row["serial_steps_per_token"] for row in rows if (row["model"], row["block_len"]) == (model, block)
            ):
                y, wide = top + 13 * place, 22 * steps
                bar = f"M{left + 90} {y}h{wide:.1f}v11h-{wide:.1f}z"
                yield f'<path class="{kind}" stroke="none" fill-opacity=".6" d="{bar}"/>'
                yield f'<text class="small" x="{left + 96 + wide:.1f}" y="{y + 10}">{steps:.2f}</text>'
    yield f'<path class="dashed" d="M{left + 112} {TOP}v{PLOT_HEIGHT}"/>'
    yield f'<text class="muted" x="{left + 112}" y="{TOP + PLOT_HEIGHT + 19}" text-anchor="middle">1: an RNN</text>'


def draw_modes() -> str:
    """Draw three models at four times their trained length, by the protocol and three other modes and criteria."""
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
