"""The picture of `implicit-llm try`: accuracy beyond the training length, and the solver at work on one block.

Shapes: `B` sequences, `L` tokens, `K` iterations of the solver.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from implicit_llm_report.figures import style, svg

INCHES = (7.2, 6.2)
HEIGHTS = (3.4, 2.0)
RC = {**style.RC, "font.size": 9.5, "axes.labelsize": 9.5, "xtick.labelsize": 9, "ytick.labelsize": 9}
RC |= {"axes.titlesize": 11, "axes.titlepad": 10, "svg.hashsalt": "first-look"}
SHADE = np.array([0x2F, 0x86, 0xD0]) / 255  # seen on white and on black
TASK = "position (S5: each token is one of 120 permutations, the answer is the product so far)"
IMPLICIT_LABEL = "implicit, 1 layer, 1.5M parameters: these weights (bold), five seeds (thin)"
# Beside the lines of the explicit runs: token, alignment, text.
EXPLICIT_LABELS = (
    (2.55, "right", "explicit,\n{0} layer\n{1:.1f}M"),
    (12.1, "center", "{0} layers\n{1:.1f}M"),
    (37, "left", "{0} layers\n{1:.1f}M parameters"),
)
# The colours of an SVG follow the reader's light or dark setting.
CSS = "<style>:root {{ {} }} @media (prefers-color-scheme: dark) {{ :root {{ {} }} }}</style>"


@dataclass(frozen=True)
class Trial:
    """What the command measured, and the kept runs beside it: first the implicit one, then explicit ones by depth."""

    is_right_BL: np.ndarray
    f_evaluations: float  # of a token
    kept: list[dict[str, Any]]
    train_length: int
    # One block of the first sequence, by iteration: the residual of each token, and whether its prediction is right.
    residual_KL: np.ndarray
    is_right_KL: np.ndarray
    tol: float


def write_picture(path: Path, trial: Trial) -> None:
    """Write the picture in the format of the file's suffix; an SVG has a light and a dark version in one file."""
    with matplotlib.rc_context(RC):
        canvas = Figure(figsize=INCHES, facecolor=style.PAPER, layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
        top, bottom = canvas.subplots(2, 1, height_ratios=HEIGHTS)
        draw_accuracy(top, trial)
        draw_iterations(bottom, trial)
        buffer = io.BytesIO()
        is_svg = path.suffix == ".svg"
        canvas.savefig(buffer, format=path.suffix[1:], dpi=200, metadata={"Date": None} if is_svg else None)
    picture = buffer.getvalue()
    if is_svg:
        themes = CSS.format(svg.theme_css(1), svg.theme_css(2))
        picture = svg.with_variables(picture.decode()).replace("<defs>", themes + "<defs>", 1).encode()
    path.write_bytes(picture)


def draw_accuracy(axis: Axes, trial: Trial) -> None:
    """Accuracy at each token, on a logarithmic axis: where each model loses the state."""
    length = trial.is_right_BL.shape[1]
    implicit, *explicit = trial.kept
    axis.axvspan(1, trial.train_length, color=style.BAND, linewidth=0, zorder=0)
    for run, color, width in [*((run, style.VERMILION, 1.3) for run in explicit), (implicit, style.BLUE, 1.0)]:
        for row in run["accuracy_per_position"]:
            draw_line(axis, np.array(row), color=color, linewidth=width, alpha=0.75)
    draw_line(axis, trial.is_right_BL.mean(0), color=style.BLUE, linewidth=3.2)
    for run, (x, side, words) in zip(explicit, EXPLICIT_LABELS, strict=True):
        label = words.format(run["num_layers"], run["num_parameters"] / 1e6)
        axis.text(x, 0.5, label, color=style.VERMILION, ha=side, va="center", weight="bold")
    axis.text(length, 1.06, IMPLICIT_LABEL, color=style.BLUE, ha="right", weight="bold")
    axis.text(1.06, 0.07, "lengths of training", color=style.MUTED, size=9)
    axis.set_title(f"Trained on {trial.train_length} tokens, evaluated on {length:,}")
    axis.set(xscale="log", xlim=(1, length), ylim=(-0.02, 1.14), ylabel="accuracy", xlabel=TASK)
    ticks = [2**power for power in range(14) if 2**power <= length]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])


def draw_line(axis: Axes, accuracy_L: np.ndarray, **look: Any) -> None:
    """Every one of the first tokens, then as many as can be seen apart on a logarithmic axis."""
    tokens = np.unique(np.geomspace(1, len(accuracy_L), 240).astype(int))
    axis.plot(tokens, accuracy_L[tokens - 1], **look)


def draw_iterations(axis: Axes, trial: Trial) -> None:
    """Residuals as shades, by iteration and token, and a line where predictions become right for good."""
    residual_LK, iterations = trial.residual_KL.T, len(trial.residual_KL)
    shade_LK4 = np.empty((*residual_LK.shape, 4))
    shade_LK4[..., :3] = SHADE
    shade_LK4[..., 3] = np.clip(1 - np.log(residual_LK) / np.log(trial.tol), 0, 1)
    tokens = len(residual_LK)
    axis.imshow(shade_LK4, extent=(0.5, iterations + 0.5, tokens + 0.5, 0.5), aspect="auto", interpolation="none")
    is_wrong_LK = ~trial.is_right_KL.T
    solved_L = np.where(is_wrong_LK.any(1), iterations - is_wrong_LK[:, ::-1].argmax(1), 0) + 0.5
    axis.step(np.append(solved_L, solved_L[-1]), np.arange(tokens + 1) + 0.5, where="pre", color=style.GREEN)
    corner: dict[str, Any] = {"transform": axis.transAxes, "ha": "right", "size": 9}
    axis.text(0.99, 0.9, f"shade: residual of the token, from 1 down to {trial.tol}", color=style.MUTED, **corner)
    axis.text(0.99, 0.78, "line: its prediction is right from here on", color=style.GREEN, weight="bold", **corner)
    axis.set_title("Inside the solver: each iteration gets about one more token right")
    axis.set(xlabel="iteration of the solver", ylabel="token")
    axis.set_yticks([1, *range(8, tokens + 1, 8)])
    axis.grid(visible=False)
