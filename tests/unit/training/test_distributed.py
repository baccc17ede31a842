"""Several processes train one model together, started by torchrun or by the launcher of the workflow."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from implicit_llm.training.distributed import WrongWorld, join_world
from implicit_llm.training.metrics import OCCASIONAL
from implicit_llm.training.operations.checkpoint import read_checkpoint
from implicit_llm_contracts.runs.launched import WORLD_VARIABLE
from tests.limits import wait_until
from tests.unit.training.small_runs import CONFIGS, FEW_STEPS, MANY_STEPS, logged, outcome, saved, train, work_of

ROOT = Path(__file__).parents[3]
# Between numbers of processes: the order of the sums over a batch differs, in fp32.
LOSS_TOLERANCE = 1e-5  # relative
BF16_LOSS_TOLERANCE = 2**-9  # relative: half a unit in the last place
WEIGHT_TOLERANCE = 1e-4  # absolute, after six steps at a rate of 0.01


def start(words: list[str], run_dir: Path, data: Path, order: dict[str, Any], **env: str) -> subprocess.Popen[str]:
    """Start small_runs.py, which says what an order is, by these words."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            *words,
            "tests.unit.training.small_runs",
            str(run_dir),
            str(data),
            json.dumps(order),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stderr=subprocess.PIPE,
        text=True,
    )


def train_together(
    run_dir: Path,
    data: Path,
    processes: int = 2,
    config: str = "explicit",
    env: dict[str, str] | None = None,
    poison: dict[str, Any] | None = None,
    **runtime: Any,
) -> tuple[int, str]:
    """Exit code and stderr of processes of torchrun on this machine, with gloo."""
    words = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    order = {"config": config, "runtime": runtime, "poison": poison}
    process = start(words, run_dir, data, order, **(env or {}))
    errors = process.communicate()[1]
    return process.returncode, errors


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
    assert train_together(together, data, processes, config, micro_batch_size=micro_batch_size)[0] == 0
    assert json.loads((together / "provenance.json").read_text())["processes"] == processes
    train(alone, CONFIGS[config], data)
    assert len(logged(alone)) == FEW_STEPS
    check_same_training(together, alone)


@pytest.mark.slow
def test_sums_in_bf16_change_the_loss_curve_by_their_rounding_alone(tmp_path: Path, data: Path) -> None:
    together, alone = tmp_path / "together" / "only", tmp_path / "alone" / "only"
    assert train_together(together, data, 2, "implicit, sums in bf16")[0] == 0
    train(alone, CONFIGS["implicit"], data)
    differences = [
        abs(found["loss"] / expected["loss"] - 1)
        for (_, found), (_, expected) in zip(logged(together), logged(alone), strict=True)
    ]
    assert LOSS_TOLERANCE < max(differences) < BF16_LOSS_TOLERANCE


def test_a_sharded_optimizer_gives_the_result_of_a_whole_one_bit_for_bit(tmp_path: Path, data: Path) -> None:
    whole, sharded = tmp_path / "whole" / "only", tmp_path / "sharded" / "only"
    assert train_together(whole, data)[0] == 0
    assert "on 2 cpu, optimizer states sharded, " in train_together(sharded, data, shard_optimizer=True)[1]
    assert outcome(sharded) == outcome(whole)


def test_each_process_draws_dropout_of_its_own(tmp_path: Path, data: Path) -> None:
    run_dir = tmp_path / "together" / "only"
    assert train_together(run_dir, data)[0] == 0
    final = read_checkpoint(work_of(run_dir) / "checkpoint")
    (_, first), (_, second) = (final.random(rank) or pytest.fail("no random state") for rank in (0, 1))
    assert not torch.equal(first["torch"], second["torch"])


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True])
def test_another_number_of_processes_can_go_on(tmp_path: Path, data: Path, is_sharded: bool) -> None:
    parts, alone = tmp_path / "parts" / "only", tmp_path / "alone" / "only"
    stop = {"IMPLICIT_LLM_FAULT": "train.after_step:sigterm@2"}
    shared = {"shard_optimizer": is_sharded}
    assert train_together(parts, data, 2, "implicit", stop, **shared)[0] != 0
    assert train_together(parts, data, 4, "implicit", stop, micro_batch_size=1, **shared)[0] != 0
    assert saved(parts) == ["step-00000002", "step-00000004"]
    train(parts, CONFIGS["implicit"], data, micro_batch_size=4)
    train(alone, CONFIGS["implicit"], data)
    check_same_training(parts, alone)


@pytest.mark.slow
def test_a_stop_signal_to_one_process_stops_all_at_the_same_step(tmp_path: Path, data: Path) -> None:
    stopped, undisturbed = tmp_path / "stopped" / "only", tmp_path / "undisturbed" / "only"
    signal = {"IMPLICIT_LLM_FAULT": "checkpoint.after_model:sigterm@1"}
    assert train_together(stopped, data, env=signal, save_steps=2)[0] != 0
    assert (work_of(stopped) / "checkpoints" / "step-00000002").is_dir()
    assert train_together(stopped, data)[0] == 0
    assert train_together(undisturbed, data)[0] == 0
    assert outcome(stopped) == outcome(undisturbed)


def test_another_number_of_processes_than_was_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORLD_VARIABLE, "1")
    join_world("cpu")
    monkeypatch.setenv(WORLD_VARIABLE, "4")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(WrongWorld, match=r"4 processes .*, 1 train together; give the rule .*: .*SLURM_JOB_ID=7"):
        join_world("cpu")


DEADLINE_S = 400


class Launched:
    """Two processes behind a launcher, with a status file as the executor gives it."""

    def __init__(
        self, run_dir: Path, data: Path, poison: dict[str, Any] | None = None, config: str = "explicit", **runtime: Any
    ) -> None:
        self.run_dir, self.status_file = run_dir, run_dir.with_name(f"{run_dir.name}-status.json")
        order = {"config": config, "runtime": runtime, "poison": poison}
        self.process = start([], run_dir, data, order, SUBMITIT_JOB_STATUS=str(self.status_file))

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors

    @property
    def status(self) -> dict[str, Any]:
        return json.loads(self.status_file.read_text())

    def steps_reported(self) -> int:
        """The committed step that the executor knows of."""
        try:
            return int(self.status["progress"])
        except (FileNotFoundError, KeyError):
            return 0


def descendants(job: Launched) -> list[psutil.Process]:
    return psutil.Process(job.process.pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_stop_signal_to_the_launcher_reaches_all_once_and_what_was_committed_goes_on_bit_for_bit(
    tmp_path: Path, data: Path, number: signal.Signals
) -> None:
    stopped, undisturbed = tmp_path / "stopped" / "only", tmp_path / "undisturbed" / "only"
    first = Launched(stopped, data, config="long", save_steps=1)  # it would not end before the signal comes
    wait_until(lambda: first.steps_reported() >= 1, DEADLINE_S)
    first.process.send_signal(number)
    first.process.send_signal(signal.SIGTERM)  # as Slurm does after the preemption notice
    code, errors = first.end()
    assert code == 75, errors
    assert errors.count("SIGUSR2 received") == 2
    assert first.status["failure_class"] == "preempted"
    assert 1 <= first.steps_reported() < MANY_STEPS
    assert saved(stopped)

    assert Launched(stopped, data, config="long").end()[0] == 0
    assert Launched(undisturbed, data, config="long").end()[0] == 0
    assert outcome(stopped) == outcome(undisturbed)


@pytest.mark.slow
def test_a_signal_before_the_processes_are_ready_waits_for_them(tmp_path: Path, data: Path) -> None:
    job = Launched(tmp_path / "a" / "only", data, config="long")  # it would not end before the signal comes
    wait_until(lambda: len(descendants(job)) == 2, DEADLINE_S)  # its processes, which import torch now
    job.process.send_signal(signal.SIGUSR2)
    code, errors = job.end()
    assert code == 75, errors
    assert "SIGUSR2 received" in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "code", "failure", "message", "runtime"),
    [
        ("kill", 128 + signal.SIGKILL, "node_fail", "rank 1 on ", {}),
        ("hang", 1, "hang", "stacks-rank", {"hang_s": 8}),  # of the one that hangs, or of the one that waits for it
        ("loss", 2, "non_finite", "the gradient norm nan at step 4 ", {}),  # not what the other one loses by it
    ],
)
def test_one_process_that_goes_wrong_ends_all_and_the_executor_is_told_why(
    tmp_path: Path, data: Path, what: str, code: int, failure: str, message: str, runtime: dict[str, Any]
) -> None:
    job = Launched(tmp_path / "a" / "only", data, {"rank": 1, "step": 4, "what": what}, save_steps=2, **runtime)
    ended, errors = job.end()
    assert ended == code, errors
    assert job.status["failure_class"] == failure
    assert message in job.status["message"]
    if what != "hang":  # which ends without waiting for a save
        assert job.status["progress"] == 2
    else:
        stacks = (work_of(job.run_dir) / "stacks-rank1.txt").read_text()
        assert "in goes_wrong" in stacks
        assert "in train_step" not in stacks


@pytest.mark.slow
def test_no_process_outlives_a_killed_launcher(tmp_path: Path, data: Path) -> None:
    job = Launched(tmp_path / "a" / "only", data, {"rank": 1, "step": 4, "what": "hang"}, save_steps=2)
    wait_until(lambda: len(descendants(job)) == 2 and any(job.run_dir.rglob("journal.jsonl")), DEADLINE_S)
    processes = descendants(job)
    job.process.kill()
    wait_until(lambda: not any(map(is_alive, processes)), DEADLINE_S)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
