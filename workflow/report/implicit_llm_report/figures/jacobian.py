"""Draw Theorem 1: heat maps of the state's Jacobian for explicit and implicit layers."""

from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from implicit_llm_report.figures.charts import tell_if_empty
from implicit_llm_report.figures.svg import Figure, Panel
from implicit_llm_report.inputs.frame import Group, groups, kind_of, roles_of
from implicit_llm_report.inputs.sources import Given

MOST_PANELS = 6
RANDOM = "random layer"
SHADES = 1e-7, 1.0  # range of the values with different colours


def jacobian_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of random layers, once per kind because all evaluations agree, then those of trained models."""
    rows = frame[frame["kind"] == "jacobian"]
    is_random = rows["setting"] == RANDOM
    random = [
        kind.rows[kind.rows["role"] == min(kind.roles)].assign(name=f"{RANDOM}, {kind_of(kind)}")
        for kind in groups(rows[is_random], ("is_implicit",))
    ]
    return pd.concat([rows[:0], *random, rows[~is_random]])


def jacobian(given: Given) -> Figure | None:
    """Draw a heat map of one token for each model, if it has entries."""
    shown = groups(jacobian_rows(given.measured), ("name", "setting"))[:MOST_PANELS]
    panels = tuple(
        Panel(model.name, partial(_draw, model=model), f"{model.name}: absolute values of the Jacobian")
        for model in shown
    )
    return Figure("jacobian", "Jacobian of the state transition", panels, (), roles_of(shown)) if panels else None


def _draw(axis: Axes, model: Group) -> None:
    """Draw absolute values, the first row on top; every kind of colour vision can order the shades of cividis."""
    pictures = model.curves("entries")
    axis.set(xticks=[], yticks=[], xlabel="entry of the state before the token", ylabel="after the token")
    axis.grid(visible=False)
    tell_if_empty(axis, pictures)
    if pictures:
        scale = LogNorm(*SHADES, clip=True)
        image = axis.imshow(np.abs(pictures[0]), cmap="cividis", norm=scale, interpolation="none")
        axis.figure.colorbar(image, ax=axis, format="{x:g}")
