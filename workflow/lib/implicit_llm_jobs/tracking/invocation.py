"""One invocation of Snakemake, as its jobs know it: from a variable that the driver sets and that they inherit."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

VARIABLE = "IMPLICIT_LLM_INVOCATION"
TAG = "invocations"  # of a run: the ids of all that worked on it, the first one first


@dataclass(frozen=True)
class Invocation:
    """`started`: ISO time in UTC; `command`: what was typed; `commit` of the source tree, None outside of git."""

    id: str
    started: str
    command: str
    commit: str | None = None
    user: str | None = None

    @classmethod
    def current(cls) -> Invocation | None:
        """That of this process; None for a job that was started by hand."""
        try:
            return cls(**json.loads(os.environ[VARIABLE]))
        except (KeyError, ValueError, TypeError):
            return None

    @property
    def name(self) -> str:
        return f"snakemake {self.started[:16].replace('T', ' ')}"

    def tags(self, config: str) -> dict[str, str]:
        """What its run in MLflow carries; `config` is the experiment's name."""
        tags = {
            "stage": "workflow",
            "config": config,
            "invocation": self.id,
            "command": self.command,
            "mlflow.source.name": self.command,
            "mlflow.source.type": "PROJECT",
            "mlflow.note.content": f"`{self.command}`\n\nRuns that began here are nested below this one. All it worked "
            f"on, those that another one had begun included: search for `tags.{TAG} LIKE '%{self.id}%'`.",
        }
        if self.commit:
            tags["mlflow.source.git.commit"] = self.commit
        return tags | ({"mlflow.user": self.user} if self.user else {})
