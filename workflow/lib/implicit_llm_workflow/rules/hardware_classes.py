"""Hardware classes: names that a profile gives to kinds of machines, as the resource `hardware` of rules."""

from __future__ import annotations

from typing import Any

from implicit_llm_contracts.config.flops import UncountedModel, num_parameters
from implicit_llm_workflow.estimates.training_memory import STATE_BYTES
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.plan import Plan


def hardware_of(workflow: Any, rule: str) -> str | None:
    """The class that the profile in use gives to a rule; None without one."""
    found = workflow.get_rule(rule).resources.get("hardware")
    text = str(getattr(found, "raw", found) or "").strip("'\"")
    return text or None


def rule_of(node: Node) -> str:
    """The rule that does a job of training or evaluation."""
    return f"{node.stage}_{node.config.get('kind', node.config.get('task'))}"


def largest_checkpoint_bytes(plan: Plan) -> int:
    """Of a training state of the plan; models of unknown size count nothing."""
    sizes = [0]
    for node in plan.nodes.values():
        if node.stage == "train":
            try:
                sizes.append(STATE_BYTES * num_parameters(node.config["model"]))
            except UncountedModel:
                continue
    return max(sizes)
