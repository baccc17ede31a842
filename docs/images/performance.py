"""Draw the bar chart of docs/performance.md, `performance.svg`, from the kept measurements of a training step.

    python docs/images/performance.py

A row is a model. The bars are shares of the time of the published code; the mark is the floor of the GPU's roofline.
"""

import json
import runpy
from pathlib import Path

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "results" / "benchmarks"
ROWS = {
    "state-tracking-explicit": "one-layer Mamba2, explicit",
    "state-tracking-free": "one-layer Mamba2, (32+4)",
    "mamba2-130m-explicit": "Mamba2 130M, explicit",
    "mamba2-130m-implicit": "Mamba2 130M, (24+4)",
    "llama3-130m-explicit": "Llama 130M, explicit",
    "llama3-130m-implicit": "Llama 130M, (32+4)",
    "mamba2-1.3b-implicit": "Mamba2 1.3B, (24+4)",
    "llama3-1.3b-implicit": "Llama 1.3B, (32+4)",
}
LEFT, TOP, WIDE, STEP = 206, 52, 520, 32


def draw() -> str:
    ours, published = (
        {row["row"]: row for row in json.loads((KEPT / f"{name}-h200.json").read_text(encoding="utf-8"))[key]}
        for name, key in (("training-step", "rows"), ("published-code", "training"))
    )
    shapes = [f'<text class="title" x="24" y="{TOP - 24}">A training step on one H200, in milliseconds</text>']
    for index, (row, label) in enumerate(ROWS.items()):
        y, theirs, here = TOP + STEP * index, published[row]["ms"], ours[row]["ms"]
        shapes.append(f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{label}</text>')
        for kind, top, ms in (("grey", y, theirs), ("blue", y + 11, here)):
            bar = f"M{LEFT} {top}h{WIDE * ms / theirs:.1f}v10h-{WIDE * ms / theirs:.1f}z"
            shapes.append(f'<path class="{kind}" stroke="none" fill-opacity=".7" d="{bar}"/>')
        floor = LEFT + WIDE * published[row]["floor_ms"] / theirs
        shapes.append(f'<path class="orange" stroke-width="2.5" d="M{floor:.1f} {y + 9}v14"/>')
        shapes.append(f'<text x="{LEFT + WIDE + 10}" y="{y + 15}">{theirs:,.0f} to {here:,.0f}</text>')
    for x, kind, label in ((206, "grey", "published code"), (346, "blue", "here"), (426, "orange", "floor")):
        shapes.append(f'<path class="{kind}" stroke-width="6" d="M{x} 323h20"/>')
        shapes.append(f'<text x="{x + 28}" y="328">{label}</text>')
    title = "Time of a training step by the published code, here, and the floor of the GPU"
    return runpy.run_path(str(HERE / "state_tracking.py"))["svg"](title, shapes)


if __name__ == "__main__":
    (HERE / "performance.svg").write_text(draw(), encoding="utf-8")
