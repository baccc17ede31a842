"""What a downstream evaluation is: every field changes the numbers or which of them there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from implicit_llm_contracts.config.evaluation import ModeConfig, SweepConfig

# Draws behind the standard error of a perplexity; the harness's own number.
BOOTSTRAP_DRAWS = 100_000


@dataclass(frozen=True)
class LmEvalConfig:
    """Tasks of the harness, by name, each with the metrics that its YAML file names.

    `limit` takes the first documents of each task only; None takes all. `task_path` is a folder of further tasks, whose
    files have the digests `task_files` (sha256 by path below the folder; None does not check). `precision` bf16 runs
    the model under autocast. `bootstrap_draws`: for the standard error of a perplexity.
    """

    kind: Literal["lm_eval"]
    modes: tuple[ModeConfig, ...]
    tasks: tuple[str, ...]
    num_fewshot: int = 0
    limit: int | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    task_path: str | None = None
    task_files: Mapping[str, str] | None = field(default=None)
    bootstrap_draws: int = BOOTSTRAP_DRAWS
    sweep: SweepConfig | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("tasks: names no task; name at least one, for example arc_easy")
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks: {', '.join(self.tasks)} names a task twice; remove one")
        if self.num_fewshot < 0:
            raise ValueError(f"num_fewshot: {self.num_fewshot} is negative; the paper's tables are zero-shot, 0")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit: {self.limit} is not a positive integer; use 1 or more, or leave it out")
        if self.bootstrap_draws < 0:
            raise ValueError(f"bootstrap_draws: {self.bootstrap_draws} is negative; 0 gives no standard error")
