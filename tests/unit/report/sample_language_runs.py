"""Finished language-model and CatbAbI runs made up for tests of the report, with plausible numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.unit.report.sample_runs import Change, Phase, Record, evaluated, make_runs, solved_by, trained, two_phases

BOUNDED = {"mode": "fixed_point", "max_iter": 4, "tol": 0.05, "phantom_steps": 1, "tau": 0.8}
FREE_24 = {"mode": "fixed_point", "max_iter": 24, "tol": 0.05, "phantom_steps": 4, "tau": 0.8}
MODES = ("blockwise", "sequential", "released-criterion")
BATCH_SIZE, LENGTH = 16, 128
STEP_TOKENS = BATCH_SIZE * LENGTH
# FLOPs a token of the explicit model and of each phase, as multiples; loss at the end is lower the lower `floor` is.
COST = {"explicit": 1.0, "bounded": 2.4, "free": 5.2}


@dataclass(frozen=True)
class LanguageRun:
    """A run of the sample; `gain` is what it has over the explicit model in nats at the end, `steps` its length."""

    name: str
    model_type: str
    is_implicit: bool
    steps: int = 500
    gain: float = 0.0
    num_parameters: int = 214_000
    seeds: Sequence[int] = (0, 1, 2)
    branches: Sequence[float] = (0.8,)
    has_flops: bool = True


def family(name: str, model_type: str, **changes: Any) -> tuple[LanguageRun, ...]:
    """An implicit run, an explicit one of equal tokens and one of about equal FLOPs."""
    return (
        LanguageRun(f"text-{name}-implicit", model_type, True, gain=0.09, num_parameters=226_000, **changes),
        LanguageRun(f"text-{name}-explicit", model_type, False, **changes),
        LanguageRun(f"text-{name}-explicit-long", model_type, False, steps=1475, gain=0.05, **changes),
    )


def _make_language_run(results: Path, run: LanguageRun, seed: int, change: Change) -> dict[str, Path]:
    name, roles = f"{run.name}-s{seed}", {}
    phases: list[Phase] = [("explicit", 0, run.steps, None)]
    if run.is_implicit:
        branches = [(f"free-{100 * share:g}", round(share * run.steps)) for share in run.branches]
        phases = [("bounded", 0, run.steps, BOUNDED), *((one, first, run.steps, FREE_24) for one, first in branches)]
    config = {"task": "language_model", "model": {"model_type": run.model_type}, "seed": seed, "run": run.name}
    trunk, summary = "", {"data": {"length": LENGTH}}
    config |= {"batch_size": BATCH_SIZE}
    for part in phases:
        phase = part[0]
        values = partial(_training_values, run, phase, seed)
        mine, made = trained(results, name, config, [part], values, summary, trunk)
        trunk, roles = trunk or made, roles | mine
        records = [
            change(_perplexity_record(run, phase, seed, length, mode))
            for length in (128, 256, 512)
            for mode in (MODES if run.is_implicit else ("parallel",))
        ]
        roles |= evaluated(results, f"{name}/{phase}/perplexity", "perplexity", records, {"model": made})
    return roles


make_language_runs = partial(make_runs, make_one=_make_language_run)


def _flops(run: LanguageRun, phase: str, step: int) -> float:
    """Cumulative over the curriculum: the trunk up to the branch, then the branch."""
    unit = 6.0 * run.num_parameters * STEP_TOKENS
    if not phase.startswith("free"):
        return unit * COST["bounded" if phase == "bounded" else "explicit"] * step
    start = round(float(phase.removeprefix("free-")) / 100 * run.steps)
    return unit * (COST["bounded"] * start + COST["free"] * max(0, step - start))


def _loss(run: LanguageRun, phase: str, step: int) -> float:
    decay = 0.1 * max(0.0, step / run.steps - 0.8) / 0.2
    gain = run.gain + (0.05 if phase.startswith("free") else 0.0) * min(1.0, step / run.steps)
    return 2.9 + 4.1 * (1 + step / 12) ** -0.55 - decay - gain * min(1.0, step / 100)


def _training_values(run: LanguageRun, phase: str, seed: int, step: int, solver: object) -> dict[str, float]:
    noise = 0.06 * math.sin(step * 12.9898 + 78.233 * seed) * math.cos(step * 4.1)
    values = {
        "loss": _loss(run, phase, step) + noise + 0.012 * seed,
        "accuracy_last10": 0.3,
        "learning_rate": 3e-3,
        "tokens": step * STEP_TOKENS,
    }
    if run.has_flops:
        values["flops"] = _flops(run, phase, step)
    if run.is_implicit:
        values |= {"num_iter": 4.0 if phase == "bounded" else 11 + noise, "residual": 0.07 + noise / 9}
        values |= {"unconverged_share": 0.2, "f_evaluations": 5.0}
    return values


def _perplexity_record(run: LanguageRun, phase: str, seed: int, length: int, mode: str) -> Record:
    worse = (0.05 if run.is_implicit else 0.45) * math.log2(length / LENGTH)
    loss = _loss(run, phase, run.steps) + 0.05 + 0.012 * seed + worse + (0.01 if mode == "released-criterion" else 0.0)
    starts = [1, 2, 4, 8, 16, 32, 64, 128]
    by_position = {
        "start": starts,
        "end": [*(start - 1 for start in starts[1:]), length],
        "loss": [loss + 1 / start for start in starts],
        "num_tokens": [512] * len(starts),
    }
    return {
        "kind": "perplexity", "run": run.name, "seed": seed, "phase": phase, "is_implicit": run.is_implicit,
        "model_type": run.model_type, "num_layers": 2, "num_parameters": run.num_parameters, "data": "text-test",
        "length": length, **solved_by(mode), "loss": loss, "perplexity": math.exp(loss), "num_tokens": 65_024,
        "perplexity_within_documents": math.exp(loss - 0.02), "loss_by_position": by_position,
        "f_evaluations_per_token": 9.4 if run.is_implicit else 1.0, "residual": 0.049 if run.is_implicit else None,
        "unconverged_share": 0.01 if run.is_implicit else None, "train_length": LENGTH,
        "train_tokens": run.steps * STEP_TOKENS,
        "train_flops": _flops(run, phase, run.steps) if run.has_flops else None,
    }  # fmt: skip


def make_babi_runs(
    results: Path,
    seeds: Sequence[int] = (0, 1),
    tasks: Sequence[int] = tuple(range(1, 21)),
    changes: Sequence[Record] = ({},),
) -> dict[str, Path]:
    """An implicit and an explicit one-layer model on the tasks; `changes` makes each record once for each of them."""
    roles: dict[str, Path] = {}
    for name, is_implicit in (("babi-implicit", True), ("babi-explicit", False)):
        for seed in seeds:
            record = _babi_record(f"{name}-s{seed}", is_implicit, seed, tasks)
            roles |= _make_babi_run(results, f"{name}-s{seed}", is_implicit, [record | change for change in changes])
    return roles


def _make_babi_run(results: Path, name: str, is_implicit: bool, tested: Sequence[Record]) -> dict[str, Path]:
    phases = two_phases(300, 900) if is_implicit else [("explicit", 0, 900, None)]
    config = {"task": "catbabi", "batch_size": 16, "seed": tested[0]["seed"]}
    roles, made = trained(results, name, config, phases, lambda step, _: {"loss": 3 / (1 + step / 60) + 0.3})
    valid = [record | {"data": "babi-valid", "accuracy": 0.125} for record in tested]
    return roles | evaluated(results, f"{name}/{phases[-1][0]}/catbabi", "catbabi", [*valid, *tested], {"model": made})


def _babi_record(name: str, is_implicit: bool, seed: int, tasks: Sequence[int]) -> Record:
    by_task = {
        str(task): min(1.0, 0.45 + 0.5 * abs(math.sin(task * 1.7)) + (0.08 if is_implicit else 0.0) - 0.02 * seed)
        for task in tasks
    }
    return {
        "kind": "catbabi", "protocol": "windowed", "run": name.rpartition("-s")[0], "seed": seed,
        "phase": "free" if is_implicit else "explicit", "is_implicit": is_implicit, "model_type": "implicit_mamba2",
        "num_layers": 1, "num_parameters": 61_000 + 3_000 * is_implicit, "data": "babi-test", "length": 200,
        **solved_by("blockwise" if is_implicit else "parallel"), "accuracy": sum(by_task.values()) / len(by_task),
        "accuracy_by_task": by_task, "num_questions": 50 * len(by_task),
        "num_questions_by_task": dict.fromkeys(by_task, 50), "lm_accuracy": 0.61, "lm_perplexity": 3.2,
        "lm_accuracy_by_task": dict.fromkeys(by_task, 0.6), "lm_perplexity_by_task": dict.fromkeys(by_task, 3.5),
        "f_evaluations_per_token": 8.1 if is_implicit else 1.0, "residual": None, "unconverged_share": None,
        "train_tokens": 2_880_000, "train_flops": 1e12,
    }  # fmt: skip
