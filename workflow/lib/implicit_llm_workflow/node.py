"""Define `Node`, the class of a job, which the job graph, the fingerprints and the Snakemake rules share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from implicit_llm_contracts.runs.run_directory import job_key


@dataclass(frozen=True)
class Node:
    """A job of an experiment.

    `upstream`: maps the role of each input to the key of the job that makes it. `run`, `seed`: the name and the seed of
    the training run whose phase the job trains or evaluates; None for other jobs.
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
        """The key without the seed, such as "train/a5-implicit/free"; it is equal for all seeds of a run."""
        return self.key if self.seed is None else f"{self.stage}/{self.run}/{self.name.partition('/')[2]}"
