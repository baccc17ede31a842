"""Several processes train one model together."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from implicit_llm.training.distributed import WrongWorld, require_world
from implicit_llm.training.metrics import OCCASIONAL
from implicit_llm_contracts.runs.launched import WORLD_VARIABLE
from tests.unit.training.distributed_run import CONFIGS, STEPS
from tests.unit.training.small_runs import artifacts, logged, saved, train, work_of

ROOT = Path(__file__).parents[3]
# Between numbers of processes: the order of the sums over a batch differs, in fp32.
LOSS_TOLERANCE = 1e-5  # relative
BF16_LOSS_TOLERANCE = 2**-9  # relative: half a unit in the last place
WEIGHT_TOLERANCE = 1e-4  # absolute, after six steps at a rate of 0.01


def train_together(
    run_dir: Path,
    data: Path,
    processes: int = 2,
    config: str = "explicit",
    env: dict[str, str] | None = None,
    poison: dict[str, Any] | None = None,
    **runtime: Any,
) -> subprocess.CompletedProcess[str]:
    """Processes of torchrun on this machine, with gloo."""
    order = json.dumps({"config": config, "runtime": runtime, "poison": poison})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "tests.unit.training.distributed_run", str(run_dir), str(data), order]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        check=False,
        capture_output=True,
        text=True,
    )


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(work_of(run_dir) / "checkpoint" / "model.safetensors")


def check_same_training(found: Path, expected: Path) -> None:
    """The same loss curve and weights within the tolerances, and all other metrics about the same."""
    for (step, values), (expected_step, expected_values) in zip(logged(found), logged(expected), strict=True):
        assert step == expected_step
        assert values["loss"] == pytest.approx(expected_values["loss"], rel=LOSS_TOLERANCE)
        for key in OCCASIONAL:  # on the first sequences of each process
            values.pop(key, None)
            expected_values.pop(key, None)
        assert values == pytest.approx(expected_values, rel=1e-3)
    of_found, of_expected = weights(found), weights(expected)
    assert all(torch.allclose(of_found[name], of_expected[name], atol=WEIGHT_TOLERANCE) for name in of_expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "processes", "micro_batch_size"),
    [("explicit", 2, None), ("explicit", 4, 1), ("implicit", 2, 2), ("implicit", 4, 2)],
)
def test_processes_and_accumulation_give_the_loss_curve_of_one_process(
    tmp_path: Path, data: Path, config: str, processes: int, micro_batch_size: int | None
) -> None:
    together, alone = tmp_path / "together" / "only", tmp_path / "alone" / "only"
    assert train_together(together, data, processes, config, micro_batch_size=micro_batch_size).returncode == 0
    train(alone, CONFIGS[config], data)
    assert len(logged(alone)) == STEPS
    check_same_training(together, alone)


@pytest.mark.slow
def test_sums_in_bf16_change_the_loss_curve_by_their_rounding_alone(tmp_path: Path, data: Path) -> None:
    together, alone = tmp_path / "together" / "only", tmp_path / "alone" / "only"
    assert train_together(together, data, 2, "implicit, sums in bf16").returncode == 0
    train(alone, CONFIGS["implicit"], data)
    differences = [
        abs(found["loss"] / expected["loss"] - 1)
        for (_, found), (_, expected) in zip(logged(together), logged(alone), strict=True)
    ]
    assert LOSS_TOLERANCE < max(differences) < BF16_LOSS_TOLERANCE


def test_a_sharded_optimizer_gives_the_result_of_a_whole_one_bit_for_bit(tmp_path: Path, data: Path) -> None:
    whole, sharded = tmp_path / "whole" / "only", tmp_path / "sharded" / "only"
    assert train_together(whole, data).returncode == 0
    done = train_together(sharded, data, shard_optimizer=True)
    assert "on 2 cpu, optimizer states sharded, " in done.stderr
    assert artifacts(sharded) == artifacts(whole)
    assert logged(sharded) == logged(whole)


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True])
def test_another_number_of_processes_can_go_on(tmp_path: Path, data: Path, is_sharded: bool) -> None:
    parts, alone = tmp_path / "parts" / "only", tmp_path / "alone" / "only"
    stop = {"FAULT": "train.after_step:sigterm@2"}
    shared = {"shard_optimizer": is_sharded}
    assert train_together(parts, data, 2, "implicit", stop, **shared).returncode != 0
    assert train_together(parts, data, 4, "implicit", stop, micro_batch_size=1, **shared).returncode != 0
    assert saved(parts) == ["step-00000002", "step-00000004"]
    train(parts, CONFIGS["implicit"], data, micro_batch_size=4)
    train(alone, CONFIGS["implicit"], data)
    check_same_training(parts, alone)


@pytest.mark.slow
def test_a_stop_signal_to_one_process_stops_all_at_the_same_step(tmp_path: Path, data: Path) -> None:
    stopped, undisturbed = tmp_path / "stopped" / "only", tmp_path / "undisturbed" / "only"
    signal = {"FAULT": "checkpoint.after_model:sigterm@1"}
    assert train_together(stopped, data, env=signal, save_steps=2).returncode != 0
    assert (work_of(stopped) / "checkpoints" / "step-00000002").is_dir()
    assert train_together(stopped, data).returncode == 0
    assert train_together(undisturbed, data).returncode == 0
    assert artifacts(stopped) == artifacts(undisturbed)
    assert logged(stopped) == logged(undisturbed)


def test_another_number_of_processes_than_was_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORLD_VARIABLE, "1")
    require_world()
    monkeypatch.setenv(WORLD_VARIABLE, "4")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(WrongWorld, match=r"4 processes .*, 1 train together; give the rule .*: .*SLURM_JOB_ID=7"):
        require_world()
