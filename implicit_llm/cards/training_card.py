"""The card of a model at the end of a training phase."""

from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCardData

from implicit_llm.cards.model_card import ModelFacts, render_card, solver_words
from implicit_llm_contracts.config.solver import SolverConfig
from implicit_llm_contracts.config.tasks import LANGUAGE_MODEL, TASKS
from implicit_llm_contracts.runs import Manifest, StageContext

TEMPLATE = "training.md.j2"
DATA, START = "data", "start"


def training_card(context: StageContext, model: Any, summary: Mapping[str, Any]) -> str:
    """The card of `model`, which the run of `context` trained; `summary` is that of its manifest."""
    facts, config = ModelFacts.of(model), context.config
    data = context.inputs[DATA].manifest
    pretrained, revision = (config["model"].get(key) for key in ("pretrained", "revision"))
    values = {
        "fingerprint": context.fingerprint,
        "model": facts,
        "config": config,
        "task": TASKS[config["task"]].learns.format(group=_group(data.config)),
        "limits": TASKS[config["task"]].limits,
        "pretrained": pretrained,
        "revision": revision,
        "phases": _phases(context),
        "is_last": config["phase"]["end_step"] == config["total_steps"],
        "summary": summary,
        "data": data,
        "upstream": sorted(data.upstream.items()) if len(data.upstream) < 4 else [],
        "num_upstream": len(data.upstream),
        "corpus": data.summary.get("corpus"),
    }
    head = ModelCardData(
        license="unknown" if pretrained else "apache-2.0",  # who fine-tunes is bound by the licence of the base
        library_name="transformers",
        pipeline_tag="text-generation" if config["task"] == LANGUAGE_MODEL else None,
        tags=[*facts.tags, config["task"].replace("_", "-")],
        datasets=_hub_data(data),
        base_model=None if revision is None else pretrained,  # a name on the hub, not a folder
    )
    return render_card(TEMPLATE, head, values)


def _phases(context: StageContext) -> list[dict[str, Any]]:
    """The phase, the one that it started from, and the fingerprint of what came before these."""
    phase = context.config["phase"]
    rows = [_phase(phase, phase["end_step"], context.fingerprint)]
    if START in context.inputs:
        start = context.inputs[START].manifest
        rows.insert(0, _phase(start.config["phase"], phase["start_step"], start.fingerprint))
        if START in start.upstream:
            earlier = {"name": "earlier phases", "first": 0, "last": rows[0]["first"], "solver": "see that run"}
            rows.insert(0, {**earlier, "fingerprint": start.upstream[START]})
    return rows


def _phase(phase: Mapping[str, Any], last: int, fingerprint: str) -> dict[str, Any]:
    solver = None if phase["solver"] is None else SolverConfig.of(phase["solver"])
    row = {"name": phase["name"], "first": phase["start_step"], "last": last}
    return {**row, "solver": solver_words(solver), "fingerprint": fingerprint}


def _group(data: Mapping[str, Any]) -> str:
    """What the elements of a word problem are of."""
    monoid = data.get("monoid", "none")
    return str(data.get("group", "a group")) + ("" if monoid == "none" else f" × {monoid}")


def _hub_data(data: Manifest) -> list[str] | None:
    """Names on Hugging Face's hub; what is made here, or read of files, has none."""
    dataset = (data.summary.get("corpus") or {}).get("dataset")
    return None if dataset is None else [dataset]
