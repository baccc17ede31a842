"""The tables of seeds in docs/state-tracking.md are the kept numbers, and the kept weights are those of their cards."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.pages import ROOT

KEPT = ROOT / "results/reference/state-tracking"
WEIGHTS = ROOT / "results/reference/weights"
PAGE = (ROOT / "docs/state-tracking.md").read_text(encoding="utf-8")
MODES = {
    "blockwise": "blocks of 32",
    "blockwise-8-token": "blocks of 8, by token",
    "sequential": "sequential",
    "published": "published rule",
}
SEEDS = {"a5m": 3, "s5-implicit": 5, "s5-explicit": 3, "s5-lstm": 3, "s5-llama": 3, "s5-delta-net": 3}
IMPLICIT = ["a5m-released", "a5m-no-dropout", "s5-implicit"]
GROUP = ["run", "phase", "mode", "hard_fraction", "length"]


def accuracy(name: str = "accuracy.csv") -> pd.DataFrame:
    return pd.read_csv(KEPT / name)


def rows_of(run: str) -> list[str]:
    """The rows of the page's table of one run: last ten tokens / whole sequences in percent, a column for each seed."""
    frame = accuracy().query("run == @run")
    rows = []
    for (length, hard), of_data in frame.groupby(["length", "hard_fraction"]):
        for mode, words in MODES.items():
            found = of_data[of_data["mode"] == mode].sort_values("seed")
            if found.empty:  # a seed is missing
                continue
            last, whole = 100 * found.accuracy_last10, 100 * found.accuracy_sequence
            cells = [f"{a:.1f} / {b:.1f}" for a, b in zip(last, whole, strict=True)]
            mean = f"{last.mean():.1f} / {whole.mean():.1f}"
            rows.append("| " + " | ".join([f"{length:,}, {100 * hard:.0f} %", words, *cells, mean]) + " |")
    return rows


def row_of_baseline(run: str) -> str:
    """The last ten tokens in percent at 32, 128 and 512 tokens, each seed."""
    frame = accuracy().query("run == @run").sort_values(["length", "seed"])
    cells = [", ".join(f"{100 * x:.1f}" for x in found.accuracy_last10) for _, found in frame.groupby("length")]
    return " | ".join([f"{frame.num_parameters.iloc[0]:,}", *cells])


@pytest.mark.parametrize("run", IMPLICIT)
def test_every_row_of_the_seeds_is_on_the_page(run: str) -> None:
    missing = [row for row in rows_of(run) if row not in PAGE]
    assert not missing, "\n".join(missing)


def test_every_baseline_is_on_the_page() -> None:
    runs = [run for run in accuracy().run.unique() if run not in IMPLICIT]
    assert len(runs) == 7
    missing = [f"{run}: {row_of_baseline(run)}" for run in runs if row_of_baseline(run) not in PAGE]
    assert not missing, "\n".join(missing)


def test_the_tables_are_made_from_the_kept_inputs(tmp_path: Path) -> None:
    subprocess.run([sys.executable, KEPT / "tables.py", tmp_path], cwd=ROOT, check=True)
    for table in sorted(KEPT.glob("*.csv")):
        assert (tmp_path / table.name).read_bytes() == table.read_bytes(), table.name
    assert len(list(tmp_path.iterdir())) == 4


def test_only_rows_with_every_planned_seed_are_complete() -> None:
    for name, is_complete in {"accuracy.csv": True, "incomplete.csv": False}.items():
        for run, found in accuracy(name).groupby(GROUP).seed.nunique().groupby("run"):
            wanted = next(number for start, number in SEEDS.items() if str(run).startswith(start)) if is_complete else 3
            assert ((found == wanted) == is_complete).all(), run


def test_weights_have_the_digests_of_their_cards() -> None:
    cards = sorted(WEIGHTS.glob("*/README.md"))
    assert len(cards) == 2
    for card in cards:
        digest = hashlib.sha256((card.parent / "model.safetensors").read_bytes()).hexdigest()
        assert digest in card.read_text(encoding="utf-8"), card.parent.name
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*.safetensors")) < 16 * 2**20
