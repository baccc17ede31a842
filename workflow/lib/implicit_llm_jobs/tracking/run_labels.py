"""Tags by which runs are grouped in MLflow: task, family, size, run, phase, seed, is_implicit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from implicit_llm_contracts.runs.identity import run_and_phase

_SIZE = re.compile(r"(?:^|[-_])(\d+(?:\.\d+)?[kmb])(?=[-_]|$)", re.IGNORECASE)


def model_labels(stage: str, name: str, config: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, str]:
    """Tags of a run that makes a model (stages train and checkpoint); what is not known has no tag.

    run: the name without its seed, the same for all seeds. size: as in the name (130m), else layers x width (2x64).
    family: mamba2, llama3, or the type of the Hugging Face model. phase: "checkpoint" for an imported model.
    """
    run, phase = run_and_phase(name, config)
    model = config.get("model")
    model = model if isinstance(model, Mapping) else {}
    model_type = str(model.get("model_type") or summary.get("model_type") or "")
    seed, is_implicit = config.get("seed"), model.get("is_implicit")
    if is_implicit is None and model_type and not model_type.startswith("implicit_"):
        is_implicit = False
    found = {
        "task": config.get("task"),
        "family": model_type.removeprefix("implicit_"),
        "size": _size(run, model),
        "run": run,
        "phase": phase or ("checkpoint" if stage == "checkpoint" else None),
        "seed": None if seed is None else str(seed),
        "is_implicit": None if is_implicit is None else str(bool(is_implicit)).lower(),
    }
    return {key: str(value) for key, value in found.items() if value}


def labels(stage: str, config: Mapping[str, Any], of_model: Mapping[str, str]) -> dict[str, str]:
    """Tags of any other run: those of the model that it reads, if it reads one, and its kind as `task`."""
    kind = config.get("kind")
    if stage != "evaluate":
        return {"task": str(kind)} if kind else {}
    return {**of_model, **({"task": str(kind)} if kind else {})}


def _size(run: str, model: Mapping[str, Any]) -> str | None:
    found = _SIZE.search(run)
    if found is not None:
        return found.group(1).lower()
    layers, width = model.get("num_hidden_layers"), model.get("hidden_size")
    return f"{layers}x{width}" if layers and width else None
