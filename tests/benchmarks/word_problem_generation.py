"""Tokens per second of word-problem generation on one core.

    python -m tests.benchmarks.word_problem_generation

Medians, with the range. The goal is 100 million tokens/s; the published generator, a Python loop, made 110,000
tokens/s. "write" is the whole stage body: generation, digests, and files synced to disk.
"""

import os
import platform
import statistics
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from implicit_llm_contracts.config.word_problem import WordProblemConfig
from implicit_llm_data.stages import word_problem as stage
from implicit_llm_data.stages.word_problem import generate
from tests.measuring import seconds, show, spread
from tests.unit.data.text_samples import context_in

TOKENS = 1 << 24
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
        generated, written = [], []
        for _ in range(REPEATS):  # taken in turn, so that a busy machine slows both
            generated.append(TOKENS / seconds(partial(generate, config, 0)) / 1e6)
            written.append(TOKENS / stage_seconds(config) / 1e6)
        found = spread(generated, "generate") | {"write": statistics.median(written)}
        rows.append({"case": f"{group} {monoid} h={hard_fraction} L={length}", **found, "goal": GOAL})
    show(rows, f"numpy {np.__version__}, Python {platform.python_version()}, one core; million tokens/s")


def stage_seconds(config: WordProblemConfig) -> float:
    """Return the time of the stage body."""
    with tempfile.TemporaryDirectory() as work:
        context = context_in(Path(work), {"kind": "word_problem", **asdict(config)})
        return seconds(partial(stage.run, context))


if __name__ == "__main__":
    main()
