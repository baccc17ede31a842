"""Check Theorem 1 on a trained Mamba2 model and on random layers: implicit state transitions are not diagonal.

At single tokens, in fp64, measure how far the Jacobian of a layer's state is from diagonal, and how fast f contracts.
Shapes: `B` sequences of the test set, `L` length, `S` entries of a layer's state, `D` model.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel

import implicit_llm
from implicit_llm.analysis.jacobian import (
    JacobianStep,
    NotConverged,
    fixed_point,
    relative_difference,
    state_jacobian,
    state_jacobian_by_autograd,
    step_from,
)
from implicit_llm.evaluation.answers import check_tokens, finite
from implicit_llm.evaluation.frame import (
    EvaluateInputError,
    Record,
    about_model,
    data_inputs,
    load_model,
    write_metrics,
)
from implicit_llm.models.cache import ConvergedStateCache
from implicit_llm.models.mamba2.model import ImplicitMamba2ForCausalLM, ImplicitMamba2Model
from implicit_llm_contracts.config.evaluation import JacobianConfig
from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS, JACOBIAN
from implicit_llm_contracts.runs.stage_context import MODEL_ROLE, StageContext, StageResult
from implicit_llm_data.groups import load_monoid
from implicit_llm_data.shards import open_dataset
from implicit_llm_jobs.progress import ProgressLog

log = logging.getLogger(__name__)

TRAINED, RANDOM = "trained", "random layer"
MEASURES = ("off_diagonal_share", "transition_radius", "f_radius", "relative_difference", "num_iter", "residual")
SHOWN = 48  # entries of the state in a heat map
NUM_POSITIONS, LAST_POSITION = 16, 256  # how many positions are measured by default, and the last of them
MAX_ITER, TOL, TAU = 2000, 1e-12, 0.8
# Derivatives converge as fast as the iterates, so 1.5 times the fixed point's iterations make their error negligible.
UNROLL_FACTOR, MIN_UNROLL = 1.5, 20

# The paper itself checks one random layer with one state entry for each channel.
RANDOM_LAYER = {"hidden_size": 64, "expand": 1, "head_dim": 64, "state_size": 1, "num_hidden_layers": 1}
RANDOM_VOCAB, RANDOM_TOKENS, RANDOM_SEEDS = 60, 6, (0, 1, 2, 3)


def run(context: StageContext) -> StageResult:
    """Run an evaluation job: write metrics.json with a record for each token. Raises: UserError."""
    where = f"evaluate/{context.name}"
    config = context.settings(JacobianConfig)
    for option in EVALUATION_KINDS[JACOBIAN].refused:
        if context.runtime.get(option) not in (None, "auto"):
            raise EvaluateInputError(
                f"{where}: --{option.replace('_', '-')} does nothing, because Jacobians are computed by the reference "
                "kernels, one token after another; leave it out"
            )
    trained = context.given(MODEL_ROLE)
    role, dataset = _shortest(context)
    positions = positions_in(config, dataset.length)
    if positions[-1] > dataset.length:
        raise EvaluateInputError(
            f"{where}.positions: {positions[-1]} is beyond the {dataset.length} tokens of a row of {role}; "
            "name earlier positions"
        )
    # The fused kernels support neither fp64 nor forward derivatives.
    model = load_model(trained, {**context.runtime, "kernels": "reference"})
    if not isinstance(model, ImplicitMamba2ForCausalLM) or config.layer >= model.config.num_hidden_layers:
        raise EvaluateInputError(
            f"{where}: layer {config.layer} of a Mamba2 model is wanted, but this is a "
            f"{model.config.model_type} of {model.config.num_hidden_layers} layers; name Mamba2 runs under `runs`, "
            "or an earlier `layer`"
        )
    about = {"kind": config.kind, "is_hard": None, **about_model(model, trained)}
    about["mode"] = "sequential" if about["is_implicit"] else "parallel"
    ids_BL = dataset.fetch(np.arange(min(config.num_sequences, len(dataset))))["input_ids"]
    check_tokens(model, int(np.max(ids_BL)), f"{where} on {role}")
    progress = ProgressLog(where, "matrix", len(ids_BL) * len(positions) + len(RANDOM_SEEDS))
    data = context.inputs[role].manifest.config
    # The hard tokens of a word problem are those whose group part is not the identity.
    is_hard_BL = ids_BL // load_monoid(data["monoid"]).order != 0 if "group" in data else None
    records: list[Record] = []

    def add(place: Record, model: ImplicitMamba2Model, ids_BL: Tensor, positions: tuple[int, ...], layer: int) -> None:
        for row, position, step in steps(model, ids_BL, positions, layer):
            found = measure(step, config.checked_rows if position == positions[-1] else 0)
            records.append(about | place | {"layer": layer, "sequence": row, "position": position} | found)
            if place["setting"] == TRAINED and is_hard_BL is not None:
                records[-1]["is_hard"] = bool(is_hard_BL[row, position - 1])
            progress.tell(len(records), partial("setting: {}".format, place["setting"]))

    ids = torch.as_tensor(ids_BL, dtype=torch.long, device=model.device)
    place = {"setting": TRAINED, "data": role, "length": dataset.length}
    add(place, prepare(model.backbone), ids, positions, config.layer)
    for seed in RANDOM_SEEDS:  # untrained layers as in the paper; `seed` determines weights and tokens
        layer, ids_L = random_layer(seed, is_implicit=about["is_implicit"])
        place = {"setting": RANDOM, "data": None, "length": None, "seed": seed}
        place |= {"num_layers": 1, "num_parameters": layer.num_parameters()}
        add(place, layer, ids_L[None], (RANDOM_TOKENS,), 0)
    means = _means(records)
    context.journal.metrics(len(records), means)
    return StageResult([write_metrics(context.work, _with_one_picture_each(records))], {"jacobian": means})


def _shortest(context: StageContext) -> tuple[str, Any]:
    """Return role and data of the test set with the shortest sequences and, among these, the largest hard_fraction."""
    sources = data_inputs(context)
    datasets: dict[str, Any] = {role: open_dataset(source.work) for role, source in sources.items()}
    hard = {role: float(np.max(source.manifest.config.get("hard_fraction", 0))) for role, source in sources.items()}
    return min(datasets.items(), key=lambda item: (item[1].length, -hard[item[0]], item[0]))


def _means(records: list[Record]) -> dict[str, float]:
    """Return the mean of each measure by setting and, for word problems, by token kind; omit means of no values."""
    trained = [r for r in records if r["setting"] == TRAINED]
    groups = {
        TRAINED: trained,
        f"{TRAINED}_hard": [r for r in trained if r["is_hard"] is True],
        f"{TRAINED}_identity": [r for r in trained if r["is_hard"] is False],
        RANDOM.replace(" ", "_"): [r for r in records if r["setting"] == RANDOM],
    }
    found = {
        f"{key}.{name}": [r[key] for r in members if r[key] is not None]
        for name, members in groups.items()
        for key in MEASURES
    }
    return {name: float(f"{fmean(values):.6g}") for name, values in found.items() if values}


def _with_one_picture_each(records: list[Record]) -> list[Record]:
    """Return the records with `entries` for one token per setting, a hard one if possible; all would need megabytes."""
    drawn = []
    for setting in (TRAINED, RANDOM):
        pictured = [r for r in records if r["setting"] == setting and r["entries"] is not None]
        drawn += sorted(pictured, key=lambda r: not r["is_hard"])[:1]
    return [r if any(r is kept for kept in drawn) else r | {"entries": None} for r in records]


def positions_in(config: JacobianConfig, length: int) -> tuple[int, ...]:
    """Return the configured positions, or else default ones for `length` tokens, in order; positions count from 1."""
    spread = torch.linspace(2, min(length, LAST_POSITION), NUM_POSITIONS).round().long().tolist()
    return tuple(sorted(set(config.positions or spread)))


def prepare(model: ImplicitMamba2Model) -> ImplicitMamba2Model:
    """Change the model in place to fp64 and evaluation mode, with states found token by token to a tight tolerance."""
    model = model.double().eval()
    if model.solver is not None:
        model.solver = replace(model.solver, tol=TOL, eval_mode="sequential", eval_stop="sequence", eval_max_iter=512)
    return model


def steps(
    model: ImplicitMamba2Model, ids_BL: Tensor, positions: tuple[int, ...], layer: int
) -> Iterator[tuple[int, int, JacobianStep | None]]:
    """Yield (sequence, position, step), position by position; after a state that is not finite, all steps are None."""
    cache, is_finite = ConvergedStateCache(), True
    for position in positions:
        try:
            if is_finite:
                model(ids_BL[:, cache.get_seq_length() : position - 1], past_key_values=cache)
        except FloatingPointError as error:
            log.warning("token %d, and those after it: %s", position, error)
            is_finite = False
        for row, ids_L in enumerate(ids_BL):
            if is_finite and cache.prefix is not None:
                before = cache.prefix.select(torch.tensor([row], device=ids_L.device))
                yield row, position, step_from(model, before, ids_L[position - 1], layer)
            else:
                yield row, position, None


def measure(step: JacobianStep | None, checked_rows: int) -> dict[str, Any]:
    """Return the measures of one token; they are None without a step, or if the fixed point was not reached.

    An explicit layer has only off_diagonal_share, transition_radius and `entries`: absolute values of the Jacobian for
    SHOWN entries of the state, for a figure. checked_rows: the number of rows that autograd computes for comparison.
    """
    known: dict[str, Any] = dict.fromkeys((*MEASURES, "entries", "state_size")) | {"is_checked": checked_rows > 0}
    if step is None:
        return known
    known["state_size"], found = len(step.state_S), None
    if step.is_implicit:
        try:
            found = fixed_point(step, tol=TOL, max_iter=MAX_ITER, tau=TAU)
        except NotConverged as error:
            log.warning("%s", error)
            return known
    jacobian = state_jacobian(step, None if found is None else found.z_D)
    drawn = draw_entries(step, SHOWN)
    known |= {
        "off_diagonal_share": finite(jacobian.off_diagonal_share()),
        "transition_radius": finite(jacobian.spectral_radius()),
        "entries": [[float(f"{value:.3g}") for value in row] for row in jacobian.dense(drawn, drawn).abs().tolist()],
    }
    if found is None:
        return known
    if checked_rows:
        rows, num_unroll = draw_entries(step, checked_rows), MIN_UNROLL + int(UNROLL_FACTOR * found.num_iter)
        expected = state_jacobian_by_autograd(step, rows, z_D=found.z_D, num_unroll=num_unroll, tau=TAU)
        known["relative_difference"] = finite(relative_difference(jacobian.dense(rows), expected))
    f_radius = float(torch.linalg.eigvals(jacobian.df_dz_DD).abs().max())
    return known | {"num_iter": found.num_iter, "residual": finite(found.residual), "f_radius": finite(f_radius)}


def draw_entries(step: JacobianStep, count: int) -> Tensor:
    """Return the sorted indices of `count` entries of the state, drawn with a fixed seed; all if there are fewer."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randperm(len(step.state_S), generator=generator)[:count]
    return drawn.sort().values.to(step.state_S.device)


def random_layer(seed: int, *, is_implicit: bool) -> tuple[ImplicitMamba2Model, Tensor]:
    """Return a model of one random layer in the paper's setting, and tokens (RANDOM_TOKENS,) for it.

    The call restores torch's random state of the CPU, but not that of GPUs, which it seeds.
    """
    name = f"mamba2-state-tracking-{'implicit' if is_implicit else 'explicit'}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = implicit_llm.load_config(name, vocab_size=RANDOM_VOCAB, **RANDOM_LAYER)
        model = prepare(AutoModel.from_config(config))
        return model, torch.randint(RANDOM_VOCAB, (RANDOM_TOKENS,))
