"""One job of an experiment, as the graph, the fingerprints and the rules see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Node:
    """One job. `upstream` maps the role an input has for this job to the key of the node it comes from."""

    stage: str
    name: str
    config: Mapping[str, Any]
    upstream: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Path of its run directory below results/<config>: "train/a5-implicit-s1/free"; the one report is "report"."""
        return self.stage if self.stage == self.name else f"{self.stage}/{self.name}"
