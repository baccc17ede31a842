"""Find the fewest layers that solve a group at the training length: Merrill's protocol.

For every kind of model and training length, models of several depths are tested at that length. The result is the
smallest depth whose mean accuracy over seeds reaches the threshold.
Source: Schöne et al. 2025, Fig. 1 left; after Merrill, Petty and Sabharwal 2024.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from implicit_llm_report.config import MinimumLayersConfig
from implicit_llm_report.inputs.frame import COLUMNS, Group, groups, headlines, kind_of, plain, shares_of

LAYERS = "layers"  # kind and metric of the rows that this module adds


def depths(frame: pd.DataFrame, config: MinimumLayersConfig) -> pd.DataFrame:
    """Return the accuracies of each kind of model by length and depth, in the mode that represents the model.

    The test has the training length and no more hard tokens than training. If there are several tests, the one with the
    most hard tokens counts; among several models of one depth, the one with the highest mean.
    """
    rows = headlines(plain(frame, "word_problem"))
    is_meant = (rows["group"] == config.group) & (rows["monoid"] == config.monoid) & rows["num_layers"].notna()
    rows = rows[is_meant & (rows["length"] == rows["train_length"]) & (rows["metric"] == config.measure)]
    best: dict[tuple, tuple[tuple, Group]] = {}
    for model in groups(rows, ("name", "data")):
        if not model.is_harder and config.hard_fraction in (None, model.hard_fraction):
            mean, key = model.spread(config.measure).mean, (not model.is_implicit, model.num_layers, model.length)
            rank = max(shares_of(model.hard_fraction)), -1.0 if mean is None else mean
            best[key] = max((rank, model), best.get(key, (rank, model)), key=lambda item: item[0])
    named = [
        model.rows.assign(name=f"{'explicit' if is_explicit else 'implicit'}, {depth} layer{'' if depth == 1 else 's'}")
        for (is_explicit, depth, _), (_, model) in sorted(best.items(), key=lambda item: item[0])
    ]
    return pd.concat([rows[:0], *named])


def fewest_layers(rows: pd.DataFrame, config: MinimumLayersConfig) -> pd.DataFrame:
    """Return a row for each kind of model, length and input: the number, and in `detail` the number as text."""
    found: list[dict[str, Any]] = []
    for kind in groups(rows, ("is_implicit",)):
        name = f"{kind_of(kind)}: fewest layers"
        lengths = kind.cells("length")
        extents = {max(lengths): "most", min(lengths): "least"} if len(lengths) > 1 else {}
        for length, at in lengths.items():
            means = {depth: cell.spread(config.measure).mean for depth, cell in at.cells("num_layers").items()}
            value, words = fewest(means, config.threshold)
            about = {"kind": LAYERS, "metric": LAYERS, "name": name, "run": name, "is_implicit": kind.is_implicit}
            about |= {"length": length, "train_length": length, "extent": extents.get(length), "data": at.group}
            found += [about | {"value": value, "detail": {"words": words}, "role": role} for role in at.roles]
    frame = pd.DataFrame(found, columns=list(COLUMNS), dtype=object)
    return frame.where(frame.notna(), None)


def fewest(values: Mapping[int, float | None], threshold: float) -> tuple[float | None, str]:
    """Return the smallest depth that reaches the threshold, and its text.

    If no depth reaches it, the text is "> 16" and the number is one more than the largest depth. If a smaller depth has
    no number, the text is "missing".
    """
    for depth, value in values.items():
        if value is None:
            return None, "missing"
        if value >= threshold:
            return depth, str(depth)
    return max(values) + 1, f"> {max(values)}"
