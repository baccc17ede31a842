"""The identity of every job of a plan, known before anything has run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from implicit_llm_contracts.runs.identity import Identity
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.code_digest import JobCode, job_code

MODEL_ROLE = "model"


def code_of_node(nodes: Mapping[str, Node], node: Node) -> JobCode:
    """What a node's job can run."""
    source = nodes[node.upstream[MODEL_ROLE]] if MODEL_ROLE in node.upstream else node
    return job_code(node.stage, node.config, source.config.get("model"))


def identify(
    nodes: Mapping[str, Node],
    code_of: Callable[[JobCode], str],
    settle: Callable[[str, Identity], Identity] = lambda key, wanted: wanted,
) -> dict[str, Identity]:
    """The identity of every node.

    Args: nodes stand in an order in which upstream comes first; code_of gives the digest of a job's code;
    settle may give a node another identity than the one that follows from its config, its code and its inputs.
    """
    identities: dict[str, Identity] = {}
    fingerprints: dict[str, str] = {}
    for key, node in nodes.items():
        upstream = {role: fingerprints[source] for role, source in node.upstream.items()}
        code = code_of(code_of_node(nodes, node))
        identities[key] = settle(key, Identity(node.stage, node.name, node.config, code, upstream))
        fingerprints[key] = identities[key].fingerprint
    return identities
