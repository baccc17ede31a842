"""A small experiment file: two runs on one data set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from implicit_llm_workflow.experiment_files.experiment import Experiment, load_experiment
from implicit_llm_workflow.planning.code_digest import STAGES
from implicit_llm_workflow.planning.plan import Plan

TINY = """\
name: tiny

data:
  s3:
    kind: word_problem
    group: S3
    train: {length: 8, hard_fraction: [0.5, 1], num_samples: 64}
    test: {lengths: [8, 16], hard_fractions: [0.5], num_samples: 32}

override:
  task: {total_steps: 10, batch_size: 8}
  curriculum:
    unrolled: {steps: 4}

runs:
  implicit:
    data: s3
    model: mamba2-implicit
    task: word-problem
    curriculum: unrolled-then-free
    seeds: [0, 1]
    override:
      model: {hidden_size: 16}
      curriculum:
        free: {solver: {tol: 0.1}}
  explicit:
    data: s3
    model: mamba2-explicit
    task: word-problem
    curriculum: explicit

evaluations:
  word-problem:
    kind: word_problem
    modes:
      - {name: blockwise, eval_mode: blockwise, eval_block_len: 4}
"""


@dataclass(frozen=True)
class ExperimentFile:
    path: Path

    def edit(self, old: str, new: str) -> ExperimentFile:
        """Replace text that must be there."""
        text = self.path.read_text()
        assert old in text, old
        self.path.write_text(text.replace(old, new, 1))
        return self

    def load(self) -> Experiment:
        return load_experiment(self.path)

    def plan(self, codes: dict[str, str] | None = None) -> Plan:
        """The plan with a made-up code digest for each stage and results beside the file."""
        known = {STAGES[stage]: code for stage, code in (codes or {}).items()}
        return Plan(
            self.load(),
            self.path.parent / "results",
            lambda code: known.get(code.module.rpartition(".")[0], code.module),
        )
