"""Draw the figure of the README, `hero.svg`, from the kept numbers of results/reference/state-tracking/hero.json.

    python docs/images/hero.py             # draw it
    python docs/images/hero.py measure     # first write the numbers again: from inputs.tar.xz, and the solver on a CPU

Top: accuracy at each position of S5 sequences of 512 tokens, a line for each seed. Bottom: the first 32 tokens of one
sequence solved as one block by the model of the package, its residuals by iteration and token.
"""

import json
import runpy
import sys
from collections.abc import Iterator
from math import log, log2
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "results" / "reference" / "state-tracking"
LENGTH, TRAINED = 512, 32
WIDTH, LEFT, RIGHT = 860, 66, 838
TOP, HEIGHT = 44, 236
LOWER, LOWER_HEIGHT = 372, 168
SHADES = 8
RUNS = {  # of the kept report: class, and label with its place: position, accuracy, alignment
    "s5-explicit-layers1": ("explicit", "1 explicit layer", 2.9, 0.62, "end"),
    "s5-explicit-layers4": ("explicit", "4 layers", 9.0, 0.62, "start"),
    "s5-explicit-layers16": ("explicit", "16 layers", 38, 0.3, "start"),
    "s5-single-words": ("implicit", "1 implicit layer, in blocks of 8", 132, 0.62, "end"),
    "s5-state-passing": ("passing", "1 implicit layer, trained with state passing", 512, 1.045, "end"),
}
STYLE = """
text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; stroke: none }
.paper { fill: #ffffff } .title { font-weight: 600; font-size: 15px } .muted { fill: #59636e; font-size: 13px }
.grid { stroke: #d1d9e0 } .band { fill: #eff2f5 } .label { font-weight: 600 } .line { fill: none; stroke-width: 1.6 }
.implicit { stroke: #0969da; fill: #0969da } .explicit { stroke: #bc4c00; fill: #bc4c00 }
.passing { stroke: #1a7f37; fill: #1a7f37 } .shade { fill: #0969da } polyline { fill: none !important }
text.implicit, text.explicit, text.passing { stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .paper { fill: #0d1117 } .grid { stroke: #3d444d } .band { fill: #1c2128 }
  .muted { fill: #9198a1 }
  .implicit { stroke: #4493f8; fill: #4493f8 } .explicit { stroke: #db6d28; fill: #db6d28 }
  .passing { stroke: #3fb950; fill: #3fb950 } .shade { fill: #4493f8 }
}
"""


def measure() -> None:
    """Write the kept numbers: every position up to 32, then as many as can be seen apart."""
    positions = sorted({*range(1, TRAINED + 1), *(round(2 ** (step / 16)) for step in range(80, 16 * 9 + 1))})
    records = [
        record
        for record in runpy.run_path(str(KEPT / "accuracy_by_position.py"))["records"]()
        if record["length"] == LENGTH and record["mode"] in ("parallel", "blockwise-8-token")
    ]
    accuracy = {
        run: [
            [round(record["accuracy_per_position"][at - 1], 4) for at in positions]
            for record in records
            if record["run"] == run
        ]
        for run in RUNS
    }
    kept = {"positions": positions, "accuracy": accuracy, **_solver()}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in kept.items())
    (KEPT / "hero.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _solver() -> dict[str, Any]:
    """Return residuals and correct predictions by iteration for the first 32 tokens of one sequence."""
    import torch

    from implicit_llm_workflow.commands.try_it import model_and_sequences

    model, ids_1L, labels_1L = model_and_sequences(TRAINED, 1, 0)
    with torch.inference_mode():
        residual_KL, is_right_KL = watch(model, ids_1L, labels_1L)
    residuals = [[round(float(value), 4) for value in row] for row in residual_KL]
    return {"tol": model.solver.tol, "residual": residuals, "is_right": is_right_KL.int().tolist()}


def watch(model: Any, ids_1L: Any, labels_1L: Any) -> tuple[Any, Any]:
    """Solve the tokens as one block; return residuals and correct predictions, by iteration (K) and token (L).

    A hook on the last norm sees f(z) of every iteration.
    """
    import torch

    outputs: list[torch.Tensor] = []
    hook = model.base.norm_f.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    model.solver = {"eval_block_len": ids_1L.shape[1]}
    model(ids_1L)
    hook.remove()
    f_KLD = torch.cat(outputs[:-1])  # the last evaluation closes the block
    z_KLD = torch.zeros_like(f_KLD)
    for k in range(1, len(f_KLD)):
        z_KLD[k] = torch.lerp(z_KLD[k - 1], f_KLD[k - 1], model.solver.tau)
    residual_KL = (f_KLD - z_KLD).norm(dim=-1) / f_KLD.norm(dim=-1)
    return residual_KL, model.get_output_embeddings()(f_KLD).argmax(-1) == labels_1L


def draw() -> str:
    """The figure as SVG."""
    kept = json.loads((KEPT / "hero.json").read_text(encoding="utf-8"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 590" role="img">'
    title = "<title>Accuracy by position of implicit and explicit layers, and the solver by iteration and token</title>"
    paper = f'<rect class="paper" width="{WIDTH}" height="590" rx="8"/>'
    shapes = [*_accuracy(kept["positions"], kept["accuracy"]), *_iterations(kept)]
    return "\n".join([head, title, f"<style>{STYLE}</style>", paper, *shapes, "</svg>\n"])


def _x(position: float) -> float:
    return LEFT + (RIGHT - LEFT) * log2(position) / log2(LENGTH)


def _y(accuracy: float) -> float:
    return TOP + HEIGHT * (1.09 - accuracy) / 1.09


def _accuracy(positions: list[int], accuracy: dict[str, list[list[float]]]) -> Iterator[str]:
    title = "Accuracy on S5 by position: trained on 32 tokens, tested on 512; a line is a seed"
    yield f'<text class="title" x="{LEFT}" y="26">{title}</text>'
    yield f'<rect class="band" x="{LEFT}" y="{TOP}" width="{_x(TRAINED) - LEFT:.1f}" height="{HEIGHT}"/>'
    yield f'<text class="muted" x="{LEFT + 8}" y="{_y(0.05):.1f}">lengths of training</text>'
    for tick in (0, 0.5, 1):
        yield f'<path class="grid" d="M{LEFT} {_y(tick):.1f}H{RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{_y(tick) + 5:.1f}" text-anchor="end">{tick:.0%}</text>'
    for power in range(10):
        x = _x(2**power)
        yield f'<text x="{x:.1f}" y="{TOP + HEIGHT + 19}" text-anchor="middle">{2**power}</text>'
    for run, (kind, *_) in RUNS.items():
        for seed in accuracy[run]:
            points = " ".join(f"{_x(at):.1f},{_y(value):.1f}" for at, value in zip(positions, seed, strict=True))
            yield f'<polyline class="line {kind}" points="{points}"/>'
    for kind, label, position, value, anchor in RUNS.values():
        place = f'x="{_x(position):.1f}" y="{_y(value):.1f}" text-anchor="{anchor}"'
        yield f'<text class="label {kind}" {place}>{label}</text>'
    words = "position (each token is one of 120 permutations; the answer is the product so far)"
    yield f'<text class="muted" x="{(LEFT + RIGHT) / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">{words}</text>'


def _iterations(kept: dict[str, Any]) -> Iterator[str]:
    """Draw residuals as shades, and a line where predictions become correct for good."""
    residual, is_right, tol = kept["residual"], kept["is_right"], kept["tol"]
    wide, high = (RIGHT - LEFT) / len(residual), LOWER_HEIGHT / TRAINED
    title = "Inside the solver: about one more token right in each iteration"
    yield f'<text class="title" x="{LEFT}" y="{LOWER - 14}">{title}</text>'
    paths: dict[int, list[str]] = {}
    for k, row in enumerate(residual):
        for token, value in enumerate(row):
            shade = round(SHADES * min(1, max(0, 1 - log(max(value, tol)) / log(tol))))
            box = f"M{LEFT + k * wide:.1f} {LOWER + token * high:.1f}h{wide:.1f}v{high:.1f}h-{wide:.1f}z"
            paths.setdefault(shade, []).append(box)
    for shade, boxes in sorted(paths.items()):
        if shade:
            yield f'<path class="shade" fill-opacity="{shade / SHADES:.2f}" d="{"".join(boxes)}"/>'
    right = [
        next(k for k in range(len(residual)) if all(row[token] for row in is_right[k:])) for token in range(TRAINED)
    ]
    steps = "".join(f"H{LEFT + k * wide:.1f}v{high:.2f}" for k in right)
    yield f'<path class="line passing" fill-opacity="0" stroke-width="2.2" d="M{LEFT} {LOWER}{steps}"/>'
    for token in (1, 16, 32):
        yield f'<text x="{LEFT - 8}" y="{LOWER + token * high + 3:.1f}" text-anchor="end">{token}</text>'
    turn = f'x="18" y="{LOWER + LOWER_HEIGHT / 2}" transform="rotate(-90 18 {LOWER + LOWER_HEIGHT / 2})"'
    yield f'<text class="muted" {turn} text-anchor="middle">token</text>'
    for k in range(10, len(residual) + 1, 10):
        yield f'<text x="{LEFT + (k - 0.5) * wide:.1f}" y="{LOWER + LOWER_HEIGHT + 18}" text-anchor="middle">{k}</text>'
    legend = f'x="{RIGHT}" text-anchor="end"'
    yield f'<text class="muted" {legend} y="{LOWER + 24}">shade: residual of the token, from 1 down to {tol}</text>'
    yield f'<text class="label passing" {legend} y="{LOWER + 44}">its prediction is right from here on</text>'
    at = f'x="{(LEFT + RIGHT) / 2}" y="{LOWER + LOWER_HEIGHT + 38}" text-anchor="middle"'
    yield f'<text class="muted" {at}>iteration of the solver</text>'


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    (HERE / "hero.svg").write_text(draw(), encoding="utf-8")
