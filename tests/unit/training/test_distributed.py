"""Several processes train one model together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.training.distributed_run import CONFIG
from tests.unit.training.small_runs import artifacts, logged, train, work_of

ROOT = Path(__file__).parents[3]


def train_together(run_dir: Path, data: Path, env: dict[str, str] | None = None, **runtime: Any) -> int:
    """Two processes on this machine; returns the exit code of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.unit.training.distributed_run", str(run_dir), str(data), json.dumps(runtime)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, check=False)
    return done.returncode


@pytest.mark.slow
def test_two_processes_give_the_result_of_one_up_to_rounding(tmp_path: Path, data: Path) -> None:
    together, alone = tmp_path / "together" / "only", tmp_path / "alone" / "only"
    assert train_together(together, data, micro_batch_size=2) == 0
    train(alone, CONFIG, data)
    found, expected = (
        load_file(work_of(run_dir) / "checkpoint" / "model.safetensors") for run_dir in (together, alone)
    )
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)
    for (step, values), (expected_step, expected_values) in zip(logged(together), logged(alone), strict=True):
        assert step == expected_step
        assert values == pytest.approx(expected_values, rel=1e-4)


@pytest.mark.slow
def test_a_stop_signal_to_one_process_stops_all_at_the_same_step(tmp_path: Path, data: Path) -> None:
    stopped, undisturbed = tmp_path / "stopped" / "only", tmp_path / "undisturbed" / "only"
    assert train_together(stopped, data, {"FAULT": "checkpoint.after_model:sigterm@1"}, save_steps=2) != 0
    assert [path.name for path in (work_of(stopped) / "checkpoints").iterdir()] == ["step-00000002"]
    assert train_together(stopped, data) == 0
    assert train_together(undisturbed, data) == 0
    assert artifacts(stopped) == artifacts(undisturbed)
    assert logged(stopped) == logged(undisturbed)
