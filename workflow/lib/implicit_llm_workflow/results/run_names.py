"""What a person calls the models of an experiment: jobs, runs with or without phase and seed, ends of such names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from itertools import product
from typing import Any

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan

MODEL_STAGES = ("train", "checkpoint")
SHOWN_NAMES = 6


class NotComparable(UserError):
    """A name that no run has, or several have, or a folder that is none of a run."""


def run_and_phase(key: str) -> tuple[str, str]:
    """ "train/a5-s0/free" is a5-s0 and free; an imported checkpoint is a phase of its own name."""
    stage, _, name = key.partition("/")
    run, _, phase = name.rpartition("/")
    return (run, phase) if run else (name, stage)


def find_model(name: str, plan: Plan) -> tuple[str, list[str]]:
    """What a name means: its full form, and the keys of the jobs, several only if they differ in nothing but the seed.

    The first reading that fits holds: a job, a run with its phase, a run (what comes out of it), the same without a
    seed (all of them), then the end of such a name. Raises: NotComparable if none fits, or that fits several.
    """
    models = {key: node for key, node in plan.nodes.items() if node.stage in MODEL_STAGES}
    name = name.strip("/")
    for is_tail in (False, True):
        for is_for_all_seeds, read in product((False, True), (_with_phase, _run)):
            found: dict[str, list[str]] = {}
            for key, node in models.items():
                texts = read(node.seedless_key if is_for_all_seeds else key, node)
                if any(_fits(name, text, is_tail=is_tail) for text in texts):
                    full = "/".join(run_and_phase(node.seedless_key if is_for_all_seeds else key))
                    found.setdefault(full, []).append(key)
            if len(found) == 1:
                return next(iter(found.items()))
            if found:
                more = ", ..." if len(found) > SHOWN_NAMES else ""
                raise NotComparable(
                    f"{name}: means several runs; name one of {', '.join([*found][:SHOWN_NAMES])}{more}"
                )
    raise NotComparable(f"{name}: experiment {plan.experiment.name} has no such run; {_hint(name, models, plan)}")


def _with_phase(key: str, node: Node) -> list[str]:
    return [key, "/".join(run_and_phase(key))]


def _run(key: str, node: Node) -> list[str]:
    """Of a phase with which the training is complete."""
    phase: Mapping[str, Any] = node.config.get("phase") or {}
    return [run_and_phase(key)[0]] if phase.get("end_step") == node.config.get("total_steps") else []


def _fits(name: str, text: str, *, is_tail: bool) -> bool:
    if not is_tail:
        return name == text
    return text.endswith(name) and text[-len(name) - 1 : -len(name)] in ("/", "-")


def _hint(name: str, models: Mapping[str, Node], plan: Plan) -> str:
    keys = [(key, node) for node in models.values() for key in (node.key, node.seedless_key)]
    names = {text for key, node in keys for read in (_with_phase, _run) for text in read(key, node)}
    close = difflib.get_close_matches(name, sorted(names - models.keys()), n=3, cutoff=0.5)
    listed = f"`implicit-llm runs --config {plan.experiment.source}` lists them"
    return f"did you mean {' or '.join(close)}?" if close else listed
