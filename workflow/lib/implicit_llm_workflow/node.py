"""One job of an experiment, as the graph, the fingerprints and the rules see it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from implicit_llm_contracts.runs.run_directory import job_key


@dataclass(frozen=True)
class Node:
    """One job. `upstream` maps the role an input has for this job to the key of the node it comes from.

    `run` and `seed`: of the training that the job is or evaluates, None for other jobs.
    """

    stage: str
    name: str
    config: Mapping[str, Any]
    upstream: Mapping[str, str] = field(default_factory=dict)
    run: str | None = None
    seed: int | None = None

    @property
    def key(self) -> str:
        return job_key(self.stage, self.name)

    @property
    def seedless_key(self) -> str:
        """The key without the seed, the same for all seeds of a run: "train/a5-implicit/free"."""
        return self.key if self.seed is None else f"{self.stage}/{self.run}/{self.name.partition('/')[2]}"
