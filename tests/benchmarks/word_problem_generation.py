"""Tokens per second of word-problem generation on one core, against a plain Python loop in the same process.

    python -m tests.benchmarks.word_problem_generation

Medians, with the range of ours. The goal is 100 million tokens/s; the published generator, a Python loop too, made
110,000 tokens/s. "write" is the whole stage body: generation, digests, and files synced to disk.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from implicit_llm_data.groups import load_group, load_monoid
from implicit_llm_data.stages import word_problem as stage
from implicit_llm_data.stages.word_problem import WordProblemConfig, generate
from tests.measuring import seconds, show, spread
from tests.unit.data.text_samples import context_in

TOKENS = 1 << 24
PLAIN_TOKENS = 1 << 17
REPEATS = 5
GOAL = 100
CASES: tuple[tuple[str, Literal["none", "aperiodic"], float | tuple[float, ...], int], ...] = (
    ("A5", "aperiodic", 0.1, 256),
    ("A5", "aperiodic", 0.1, 1024),
    ("A5", "aperiodic", (0.1, 0.5), 256),
    ("A5", "none", 0.2, 16),
    ("A5", "none", 1.0, 256),
    ("S5", "aperiodic", 0.1, 256),
    ("S7", "none", 1.0, 128),
)


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = []
    for group, monoid, hard_fraction, length in CASES:
        samples = TOKENS // length
        config = WordProblemConfig(group, monoid, hard_fraction, length, samples, "train", 0, samples)
        ours, plain, write = [], [], []
        loop = PlainLoop(config)
        for _ in range(REPEATS):  # taken in turn, so that a busy machine slows all three
            ours.append(TOKENS / seconds(partial(generate, config, 0)) / 1e6)
            plain.append(PLAIN_TOKENS / seconds(partial(loop.make, PLAIN_TOKENS // length)) / 1e6)
            write.append(TOKENS / stage_seconds(config) / 1e6)
        found = spread(ours, "ours") | {"plain": statistics.median(plain), "write": statistics.median(write)}
        of = {"ratio": found["ours"] / found["plain"], "of_goal": found["ours"] / GOAL}
        rows.append({"case": f"{group} {monoid} h={hard_fraction} L={length}", **found, **of})
    show(rows, f"numpy {np.__version__}, Python {platform.python_version()}, one core; million tokens/s")


class PlainLoop:
    """The same data made one token at a time, as one would write it first."""

    def __init__(self, config: WordProblemConfig) -> None:
        self._config = config
        self._group = load_group(config.group).table.tolist()
        self._monoid = load_monoid(config.monoid).table.tolist()

    def make(self, num_samples: int) -> list[tuple[list[int], list[int]]]:
        group, monoid, fractions = self._group, self._monoid, self._config.hard_fractions
        source = random.Random(self._config.seed)
        samples = []
        for sample in range(num_samples):
            g, m, inputs, targets = 0, 0, [], []
            for _ in range(self._config.length):
                a = source.randrange(len(group)) if source.random() < fractions[sample % len(fractions)] else 0
                b = source.randrange(len(monoid))
                g, m = group[g][a], monoid[m][b]
                inputs.append(len(monoid) * a + b)
                targets.append(len(monoid) * g + m)
            samples.append((inputs, targets))
        return samples


def stage_seconds(config: WordProblemConfig) -> float:
    """Time of the stage body."""
    with tempfile.TemporaryDirectory() as work:
        context = context_in(Path(work), {"kind": "word_problem", **asdict(config)})
        return seconds(partial(stage.run, context))


if __name__ == "__main__":
    main()
