"""Fingerprints: what a result depends on, as one digest that is known before anything has run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from implicit_llm_workflow.canonical import canonical_json, digest
from implicit_llm_workflow.node import Node
from implicit_llm_workflow.planning.code_digest import stage_module


@dataclass(frozen=True)
class Identity:
    """A node's identity as its job is given it; the name is told, but is not part of the fingerprint."""

    stage: str
    name: str
    config: Mapping[str, Any]
    code: str
    upstream: Mapping[str, str]  # role -> fingerprint

    @property
    def fingerprint(self) -> str:
        """sha256 (hexadecimal) of the canonical JSON of stage, config, code and upstream fingerprints."""
        return digest({"stage": self.stage, "config": self.config, "code": self.code, "upstream": self.upstream})

    def to_json(self) -> str:
        """The text for `--identity`."""
        values = {
            "stage": self.stage,
            "name": self.name,
            "config": self.config,
            "code": self.code,
            "upstream": self.upstream,
        }
        return canonical_json({**values, "fingerprint": self.fingerprint})


def identify(
    nodes: Mapping[str, Node],
    code_of: Callable[[str], str],
    settle: Callable[[str, Identity], Identity] = lambda key, wanted: wanted,
) -> dict[str, Identity]:
    """The identity of every node.

    Args: nodes stand in an order in which upstream comes first; code_of gives the code digest of a stage's module;
    settle may give a node another identity than the one that follows from its config, its code and its inputs.
    """
    identities: dict[str, Identity] = {}
    fingerprints: dict[str, str] = {}
    for key, node in nodes.items():
        upstream = {role: fingerprints[source] for role, source in node.upstream.items()}
        code = code_of(stage_module(node.stage, node.config))
        identities[key] = settle(key, Identity(node.stage, node.name, node.config, code, upstream))
        fingerprints[key] = identities[key].fingerprint
    return identities
