"""The stage `evaluate` of kind `jacobian`: Theorem 1 on a trained Mamba2 model and on random layers of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np
import torch

from implicit_llm.evaluation.answers import check_tokens
from implicit_llm.evaluation.inputs import EvaluateInputError, data_inputs, model_input, reads_of_inputs
from implicit_llm.evaluation.jacobian import (
    MEASURES,
    RANDOM_SEEDS,
    RANDOM_TOKENS,
    JacobianConfig,
    measure,
    prepare,
    random_layer,
    steps,
)
from implicit_llm.evaluation.metrics_file import Record, write_metrics
from implicit_llm.evaluation.trained_model import about_model, load_model
from implicit_llm.models.causal_lm import ImplicitMamba2ForCausalLM
from implicit_llm_contracts.runs.fill import fill
from implicit_llm_contracts.runs.stage_context import StageContext, StageResult
from implicit_llm_data.groups import load_monoid
from implicit_llm_data.shards import open_dataset
from implicit_llm_jobs.progress import Progress

__all__ = ["reads_of_inputs", "run"]

TRAINED, RANDOM = "trained", "random layer"


def run(context: StageContext) -> StageResult:
    """Body of `implicit-llm evaluate`: writes metrics.json. Raises: UserError."""
    where = f"evaluate/{context.name}"
    config = fill(JacobianConfig, context.config, where)
    trained = model_input(context)
    role, dataset = _shortest(context)
    positions = config.positions_in(dataset.length)
    if positions[-1] > dataset.length:
        raise EvaluateInputError(
            f"{where}.positions: {positions[-1]} is beyond the {dataset.length} tokens of a row of {role}; "
            "name earlier positions"
        )
    # No fused kernel computes in fp64.
    model = load_model(trained, {**context.runtime, "kernels": "torch"})
    if not isinstance(model, ImplicitMamba2ForCausalLM) or config.layer >= model.config.num_hidden_layers:
        raise EvaluateInputError(
            f"{where}: layer {config.layer} of a Mamba2 model is wanted, but this is a "
            f"{model.config.model_type} of {model.config.num_hidden_layers} layers; name Mamba2 runs under `runs`, "
            "or an earlier `layer`"
        )
    about = {"kind": config.kind, "layer": config.layer, **about_model(model, trained)}
    about["mode"] = "sequential" if about["is_implicit"] else "parallel"
    ids_BL = dataset.fetch(np.arange(min(config.num_sequences, len(dataset))))["input_ids"]
    check_tokens(model, int(np.max(ids_BL)), f"{where} on {role}")
    progress = Progress(where, len(ids_BL) * len(positions) + len(RANDOM_SEEDS))
    about_data = {"data": role, "length": dataset.length}
    is_hard_BL = _is_hard(context.inputs[role].manifest.identity["config"], ids_BL)
    of_trained = _of_trained(model, torch.as_tensor(ids_BL, dtype=torch.long, device=model.device), positions, config)
    records: list[Record] = []
    for record in chain(of_trained, _of_random(config, is_implicit=about["is_implicit"])):
        is_hard = None
        if record["setting"] == TRAINED and is_hard_BL is not None:
            is_hard = bool(is_hard_BL[record["sequence"], record["position"] - 1])
        of_data = about_data if record["setting"] == TRAINED else dict.fromkeys(about_data)
        records.append(about | of_data | {"is_hard": is_hard} | record)
        progress.tell(len(records), partial("setting: {}".format, record["setting"]))
    means = _means(records)
    context.journal.metrics(len(records), means)
    return StageResult([write_metrics(context.work, _with_one_picture_each(records))], {"jacobian": means})


def _shortest(context: StageContext) -> tuple[str, Any]:
    """Role and data of the test set with the shortest rows; among several, the one with the most hard tokens."""
    sources = data_inputs(context)
    datasets: dict[str, Any] = {role: open_dataset(source.work) for role, source in sources.items()}

    def order(role: str) -> tuple[int, float, str]:
        hard = sources[role].manifest.identity["config"].get("hard_fraction", 0)
        return datasets[role].length, -float(np.max(hard)), role

    role = min(datasets, key=order)
    return role, datasets[role]


def _is_hard(data: dict[str, Any], ids_BL: np.ndarray) -> np.ndarray | None:
    """Which tokens of a word problem are not the identity of the group; None for other data."""
    return ids_BL // load_monoid(data["monoid"]).order != 0 if "group" in data else None


def _of_trained(
    model: ImplicitMamba2ForCausalLM, ids_BL: torch.Tensor, positions: tuple[int, ...], config: JacobianConfig
) -> Iterator[Record]:
    for sequence, position, step in steps(prepare(model.backbone), ids_BL, positions, config.layer):
        place = {"setting": TRAINED, "sequence": sequence, "position": position}
        yield place | measure(step, config.checked_rows if position == positions[-1] else 0)


def _of_random(config: JacobianConfig, *, is_implicit: bool) -> Iterator[Record]:
    """The paper's own check, on a few untrained layers; `seed` is the seed of their weights."""
    for seed in RANDOM_SEEDS:
        layer, ids_L = random_layer(seed, is_implicit=is_implicit)
        place = {"setting": RANDOM, "seed": seed, "layer": 0, "num_layers": 1, "num_parameters": layer.num_parameters()}
        for sequence, position, step in steps(layer, ids_L[None], (RANDOM_TOKENS,), 0):
            yield place | {"sequence": sequence, "position": position} | measure(step, config.checked_rows)


def _means(records: list[Record]) -> dict[str, float]:
    """Mean of each measure by setting and, for word problems, kind of token; measures without values are left out."""
    trained = [r for r in records if r["setting"] == TRAINED]
    groups = {
        TRAINED: trained,
        f"{TRAINED}_hard": [r for r in trained if r["is_hard"] is True],
        f"{TRAINED}_identity": [r for r in trained if r["is_hard"] is False],
        RANDOM.replace(" ", "_"): [r for r in records if r["setting"] == RANDOM],
    }
    found = {}
    for name, members in groups.items():
        for key in MEASURES:
            values = [r[key] for r in members if r[key] is not None]
            if values:
                found[f"{key}.{name}"] = float(f"{fmean(values):.6g}")
    return found


def _with_one_picture_each(records: list[Record]) -> list[Record]:
    """Keep `entries` of one token per setting only, a hard one if possible: all of them would be megabytes."""
    drawn = []
    for setting in (TRAINED, RANDOM):
        pictured = [r for r in records if r["setting"] == setting and r["entries"] is not None]
        drawn += sorted(pictured, key=lambda r: not r["is_hard"])[:1]
    return [r if any(r is kept for kept in drawn) else r | {"entries": None} for r in records]
