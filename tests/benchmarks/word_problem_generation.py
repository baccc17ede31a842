"""Tokens per second of word-problem generation on one core, against a plain Python loop in the same process.

    python tests/benchmarks/word_problem_generation.py

Medians, with the range of ours. The goal is 100 million tokens/s; the published generator, a Python loop too, made
110,000 tokens/s. "write" is the whole stage body: generation, digests, and files synced to disk.
"""

from __future__ import annotations

import logging
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from implicit_llm_contracts.runs.journal import Journal
from implicit_llm_contracts.runs.stage_context import StageContext
from implicit_llm_data.groups import load_group, load_monoid
from implicit_llm_data.stages import word_problem as stage
from implicit_llm_data.stages.word_problem import WordProblemConfig, generate

TOKENS = 1 << 24
PLAIN_TOKENS = 1 << 17
REPEATS = 5
GOAL = 100e6
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
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(
        f"numpy {np.__version__}, Python {platform.python_version()}, {platform.machine()}, one core; million tokens/s"
    )
    print(f"{'case':34}{'ours':>8}{'min':>8}{'max':>8}{'plain':>8}{'ratio':>8}{'of goal':>9}{'write':>8}")
    for group, monoid, hard_fraction, length in CASES:
        samples = TOKENS // length
        config = WordProblemConfig(group, monoid, hard_fraction, length, samples, "train", 0, samples)
        ours, plain, write = [], [], []
        loop = PlainLoop(config)
        for _ in range(REPEATS):  # taken in turn, so that a busy machine slows all three
            ours.append(TOKENS / seconds(partial(generate, config, 0)) / 1e6)
            plain.append(PLAIN_TOKENS / seconds(partial(loop.make, PLAIN_TOKENS // length)) / 1e6)
            write.append(TOKENS / stage_seconds(config) / 1e6)
        median = statistics.median(ours)
        case = f"{group} {monoid} h={hard_fraction} L={length}"
        print(
            f"{case:34}{median:8.1f}{min(ours):8.1f}{max(ours):8.1f}"
            f"{statistics.median(plain):8.2f}{median / statistics.median(plain):7.0f}x"
            f"{median * 1e6 / GOAL:8.1f}x{statistics.median(write):8.1f}"
        )


class PlainLoop:
    """The same data made one token at a time, as one would write it first."""

    def __init__(self, config: WordProblemConfig) -> None:
        self._config = config
        self._group = load_group(config.group).table.tolist()
        self._monoid = load_monoid(config.monoid).table.tolist()

    def make(self, num_samples: int) -> list[tuple[list[int], list[int]]]:
        group, monoid = self._group, self._monoid
        source = random.Random(self._config.seed)
        samples = []
        for sample in range(num_samples):
            hard_fraction = self._config.hard_fractions[sample % len(self._config.hard_fractions)]
            g = m = 0
            inputs, targets = [], []
            for _ in range(self._config.length):
                a = source.randrange(len(group)) if source.random() < hard_fraction else 0
                b = source.randrange(len(monoid))
                g, m = group[g][a], monoid[m][b]
                inputs.append(len(monoid) * a + b)
                targets.append(len(monoid) * g + m)
            samples.append((inputs, targets))
        return samples


def stage_seconds(config: WordProblemConfig) -> float:
    """Time of the stage body."""
    fields = {"kind": "word_problem", **asdict(config)}
    log = logging.getLogger("benchmark")
    with tempfile.TemporaryDirectory() as work:
        place = {"run_dir": Path(work), "work": Path(work), "journal": Journal(None), "log": log, "is_main": True}
        context = StageContext("data", "benchmark", "", fields, {}, runtime={}, **place)  # type: ignore[arg-type]
        return seconds(partial(stage.run, context))


def seconds(action: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
