"""The stage `evaluate` of kind `jacobian`: Theorem 1 on a trained Mamba2 model and on random layers of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np
import torch

from implicit_llm.data.shards import open_dataset
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
)
from implicit_llm.evaluation.metrics_file import Record, write_metrics
from implicit_llm.evaluation.trained_model import about_model, load_model
from implicit_llm.models.causal_lm import ImplicitMamba2ForCausalLM
from implicit_llm.runs.progress import Progress
from implicit_llm.runs.stage import StageContext, StageResult
from implicit_llm_contracts.runs.fill import fill

__all__ = ["reads_of_inputs", "run"]

TRAINED, RANDOM = "trained", "random layer"


def run(context: StageContext) -> StageResult:
    """Body of `implicit-llm evaluate`: writes metrics.json. Raises: UserError."""
    where = f"evaluate/{context.name}"
    config = fill(JacobianConfig, context.config, where)
    trained = model_input(context)
    role, dataset = _shortest(context)
    if max(config.positions) > dataset.length:
        raise EvaluateInputError(
            f"{where}.positions: {max(config.positions)} is beyond the {dataset.length} tokens of a row of {role}; "
            "name earlier positions"
        )
    # fp64 has no fused kernels.
    model = load_model(trained, {**context.runtime, "kernels": "torch"})
    if not isinstance(model, ImplicitMamba2ForCausalLM) or config.layer >= model.config.num_hidden_layers:
        raise EvaluateInputError(
            f"{where}: the Jacobian is that of a layer of a Mamba2 model, and this is a "
            f"{model.config.model_type} of {model.config.num_hidden_layers} layers; name the runs under `runs`, "
            "or an earlier `layer`"
        )
    about = {"kind": config.kind, "layer": config.layer, **about_model(model, trained)}
    about["mode"] = "sequential" if about["is_implicit"] else "parallel"
    ids_BL = dataset.fetch(np.arange(min(config.num_sequences, len(dataset))))["input_ids"]
    check_tokens(model, int(np.max(ids_BL)), f"{where} on {role}")
    progress = Progress(where, len(ids_BL) * len(config.positions) + len(RANDOM_SEEDS))
    read = {"data": role, "length": dataset.length}
    records: list[Record] = []
    for record in chain(_of_trained(model, ids_BL, config), _of_random(config, is_implicit=about["is_implicit"])):
        records.append(about | (read if record["setting"] == TRAINED else dict.fromkeys(read)) | record)
        progress.tell(len(records), partial("setting: {}".format, record["setting"]))
    means = _means(records)
    context.journal.metrics(len(records), means)
    return StageResult([write_metrics(context.work, _with_one_picture_each(records))], {"jacobian": means})


def _shortest(context: StageContext) -> tuple[str, Any]:
    """The test set of the shortest rows, with its role."""
    datasets: dict[str, Any] = {role: open_dataset(source.work) for role, source in data_inputs(context).items()}
    return min(datasets.items(), key=lambda item: (item[1].length, item[0]))


def _of_trained(model: ImplicitMamba2ForCausalLM, ids_BL: np.ndarray, config: JacobianConfig) -> Iterator[Record]:
    base = prepare(model.backbone)
    for sequence, ids_L in enumerate(torch.as_tensor(ids_BL, dtype=torch.long, device=model.device)):
        for position in config.positions:
            place = {"setting": TRAINED, "sequence": sequence, "position": position}
            yield place | measure(base, ids_L[:position], config)


def _of_random(config: JacobianConfig, *, is_implicit: bool) -> Iterator[Record]:
    """The paper's own check, on a few random layers; `seed` is theirs, and nothing was learned."""
    for seed in RANDOM_SEEDS:
        layer, ids_L = random_layer(seed, is_implicit=is_implicit)
        place = {"setting": RANDOM, "sequence": 0, "position": RANDOM_TOKENS, "seed": seed, "layer": 0}
        size = {"num_layers": 1, "num_parameters": layer.num_parameters()}
        yield place | size | measure(layer, ids_L[:RANDOM_TOKENS], replace(config, layer=0))


def _means(records: list[Record]) -> dict[str, float]:
    """Each measure by setting, over its tokens; what no token gave is left out."""
    found = {}
    for setting in (TRAINED, RANDOM):
        for key in MEASURES:
            values = [r[key] for r in records if r["setting"] == setting and r[key] is not None]
            if values:
                found[f"{key}.{setting.replace(' ', '_')}"] = float(f"{fmean(values):.6g}")
    return found


def _with_one_picture_each(records: list[Record]) -> list[Record]:
    """The records with the entries of the first token of each setting that has them: all would be megabytes."""
    drawn: set[str] = set()
    kept = []
    for record in records:
        is_first = record["entries"] is not None and record["setting"] not in drawn
        if is_first:
            drawn.add(record["setting"])
        kept.append(record | {"entries": record["entries"] if is_first else None})
    return kept
