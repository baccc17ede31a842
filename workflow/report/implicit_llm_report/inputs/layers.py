"""Find the fewest layers with which a model solves a group at its training length, by Merrill's protocol.

For every kind of model and training length, models of several depths are tested at this length. The result is the
smallest depth whose mean accuracy over seeds reaches the threshold.
Source: Schöne et al. 2025, Fig. 1 left; after Merrill, Petty and Sabharwal 2024.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from implicit_llm_report.config import MinimumLayersConfig
from implicit_llm_report.inputs.frame import COLUMNS, Group, groups, headlines, kind_of, plain, shares_of

LAYERS = "layers"  # kind and metric of the resulting rows


def depths(frame: pd.DataFrame, config: MinimumLayersConfig) -> pd.DataFrame:
    """Return the accuracies of each kind of model by length and depth, in the mode that represents each model.

    The tests have the training length and no larger share of hard tokens than training; if `config` names a share, they
    also have this share. For each kind, length and depth, only the hardest test counts. If several models have this
    test, only the model with the highest mean counts. The column `name` has the kind and depth.
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
    """Return a row for each kind of model, length and role: `value` has the number of layers, and `detail` its text."""
    found: list[dict[str, Any]] = []
    for kind in groups(rows, ("is_implicit",)):
        name = f"{kind_of(kind)}: fewest layers"
        lengths = kind.cells("length")
        extents = {max(lengths): "most", min(lengths): "least"} if len(lengths) > 1 else {}
        for length, at in lengths.items():
            means = {depth: cell.spread(config.measure).mean for depth, cell in at.cells("num_layers").items()}
            value, words = fewest(means, config.threshold)
            about = {
                **{"kind": LAYERS, "metric": LAYERS, "name": name, "run": name, "is_implicit": kind.is_implicit},
                **{"length": length, "train_length": length, "extent": extents.get(length), "data": at.group},
                **{"value": value, "detail": {"words": words}},
            }
            found += [about | {"role": role} for role in at.roles]
    frame = pd.DataFrame(found, columns=list(COLUMNS), dtype=object)
    return frame.where(frame.notna(), None)


def fewest(values: Mapping[int, float | None], threshold: float) -> tuple[float | None, str]:
    """Return the smallest depth whose value reaches the threshold, and its text. `values`: by depth, in rising order.

    If no depth reaches the threshold, the text is "> 16" for a largest depth of 16, and the number is 17. If a depth
    has no value and no smaller one reaches the threshold, the number is None and the text is "missing".
    """
    for depth, value in values.items():
        if value is None:
            return None, "missing"
        if value >= threshold:
            return depth, str(depth)
    return max(values) + 1, f"> {max(values)}"
