"""A phase that was stopped, wherever and however, ends bit for bit as if it had not been.

Phases that follow one another are one training; checkpoints that a phase keeps, and branches from them.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from implicit_llm.training import stage
from implicit_llm.training.operations.checkpoint import read_checkpoint
from implicit_llm.training.stage import TrainInputError
from implicit_llm_contracts.errors import Preempted
from implicit_llm_contracts.runs import journal
from implicit_llm_contracts.runs.atomic import StorageError
from implicit_llm_contracts.runs.manifest import Manifest
from implicit_llm_contracts.runs.stage_context import InputMissing
from tests.refusals import refused
from tests.unit.training.small_runs import (
    EXPLICIT,
    FREE,
    IMPLICIT,
    LLAMA,
    LSTM,
    STEPS,
    UNROLLED,
    Undisturbed,
    artifacts,
    events,
    flip_last_byte,
    logged,
    outcome,
    saved,
    train,
    train_config,
    train_until,
    work_of,
)

CARRIED = {"state_passing": 2, "restart_when_wrong": False}
AFTER_STEP, IN_ACCUMULATION = "train.after_step:raise@", "train.micro_step:raise@"


@pytest.mark.parametrize(
    ("config", "faults", "save_steps", "runtime"),
    [
        *((train_config(), [f"{AFTER_STEP}{step}"], 3, {}) for step in (2, 3, 7, STEPS)),
        *((train_config(LLAMA), [f"{IN_ACCUMULATION}{n}"], 1, {"micro_batch_size": 2}) for n in (1, 7, 32)),
        (train_config(phase={"solver": UNROLLED}), [f"{AFTER_STEP}4", f"{AFTER_STEP}2"], 2, {}),
        (train_config(LLAMA), [f"{AFTER_STEP}4", f"{AFTER_STEP}2"], 2, {}),
        (train_config(phase={"state_passing": 2}), [f"{IN_ACCUMULATION}12"], 2, {"micro_batch_size": 4}),
        (train_config(LSTM, phase=CARRIED), [f"{AFTER_STEP}3"], 2, {}),
    ],
)
def test_a_crash_after_any_step_or_within_one_changes_nothing(
    run_dir: Path,
    data: Path,
    undisturbed: Undisturbed,
    config: dict[str, Any],
    faults: list[str],
    save_steps: int,
    runtime: dict[str, Any],
) -> None:
    for fault in faults:
        train_until(fault, run_dir, config, data, save_steps=save_steps, **runtime)
    assert not (run_dir / "manifest.json").exists()
    train(run_dir, config, data, save_steps=save_steps, **runtime)
    assert outcome(run_dir) == undisturbed.of(config, **runtime)


def test_metrics_that_were_not_yet_logged_are_not_lost_by_a_stop_and_results_do_not_depend_on_logging(
    run_dir: Path, data: Path, undisturbed: Undisturbed
) -> None:
    config = train_config()
    train_until("train.after_step:sigterm@6", run_dir, config, data, log_every_steps=4)
    train(run_dir, config, data, log_every_steps=4)
    expected = undisturbed.of(config, log_every_steps=4)
    assert [step for step, _ in expected[1]] == [1, 4, 8]
    assert outcome(run_dir) == expected
    assert expected[0] == undisturbed.of(config)[0]


def after_step_3(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let `act()` happen once the metrics of step 3 are in the journal."""
    write = journal.Journal.metrics

    def write_and_act(self: journal.Journal, step: int, values: Any) -> None:
        write(self, step, values)
        if step == 3:
            act()

    monkeypatch.setattr(journal.Journal, "metrics", write_and_act)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_a_stop_signal_commits_the_step_and_asks_to_be_started_again(
    run_dir: Path, data: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    after_step_3(monkeypatch, lambda: os.kill(os.getpid(), number))
    with pytest.raises(Preempted, match=f"{number.name} after step 4, which is committed") as caught:
        train(run_dir, train_config(), data)
    assert caught.value.exit_code == 75
    assert saved(run_dir) == ["step-00000004"]
    assert signal.getsignal(number) == before
    monkeypatch.undo()
    train(run_dir, train_config(), data)
    assert outcome(run_dir) == undisturbed.of(train_config())


def test_a_second_ctrl_c_ends_training_at_once(
    run_dir: Path, data: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_step_3(monkeypatch, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    with pytest.raises(KeyboardInterrupt):
        train(run_dir, train_config(), data)
    assert list(work_of(run_dir).glob("checkpoints/step-*")) == []
    monkeypatch.undo()
    train(run_dir, train_config(), data)
    assert outcome(run_dir) == undisturbed.of(train_config())


@pytest.mark.parametrize("point", ["checkpoint.after_model:sigterm@1", "checkpoint.after_commit:sigterm@2"])
def test_a_stop_signal_during_a_save_lets_it_end_and_saves_the_step_under_way(
    run_dir: Path, data: Path, undisturbed: Undisturbed, point: str
) -> None:
    config = train_config()
    message = train_until(point, run_dir, config, data, save_steps=2)
    steps = [event["step"] for event in events(run_dir, "checkpoint_committed")]
    assert steps == sorted(set(steps))
    assert f"after step {int(saved(run_dir)[-1].removeprefix('step-'))}, which is committed" in message
    train(run_dir, config, data, save_steps=2)
    assert outcome(run_dir) == undisturbed.of(config)


def test_a_stop_signal_before_the_first_step_stops_without_a_step(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "apply_runtime", lambda *given: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted, match="before the first step"):
        train(run_dir, train_config(), data)
    assert logged(run_dir) == []


def test_a_finished_phase_whose_manifest_was_lost_is_published_again_without_training(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run_dir, train_config(), data)
    before = artifacts(run_dir)
    (work_of(run_dir) / "manifest.json").unlink()
    monkeypatch.setattr(stage, "_train", lambda *arguments: pytest.fail("trained again"))
    train(run_dir, train_config(), data)
    assert artifacts(run_dir) == before


def test_the_saved_model_is_that_of_the_final_checkpoint_with_the_settings_of_its_phase_and_of_the_protocol(
    undisturbed: Undisturbed,
) -> None:
    run_dir = undisturbed.run_dir(train_config())
    model = AutoModelForCausalLM.from_pretrained(work_of(run_dir) / "model")
    stored = load_file(work_of(run_dir) / "checkpoint" / "model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.named_parameters())
    assert {key: getattr(model.solver, key) for key in FREE} == FREE
    in_evaluation = {"eval_mode": "blockwise", "eval_stop": "token", "eval_block_len": 8, "eval_budget": 128}
    assert {key: getattr(model.solver, key) for key in in_evaluation} == in_evaluation
    assert model.config.use_cache
    assert Manifest.read(run_dir / "manifest.json").summary["data"]["group"] == "S3"
    assert IMPLICIT["vocab_size"] == model.config.vocab_size


@pytest.mark.parametrize("config", [train_config(), train_config(EXPLICIT)])
def test_from_pretrained_of_the_run_directory_loads_the_finished_model(
    undisturbed: Undisturbed, config: dict[str, Any]
) -> None:
    run_dir = undisturbed.run_dir(config)
    stored = load_file(work_of(run_dir) / "model" / "model.safetensors")
    auto = AutoModelForCausalLM.from_pretrained(run_dir)
    loaded = type(auto).from_pretrained(str(run_dir), dropout=0.25)
    assert loaded.config.dropout == 0.25
    for model in (auto, loaded):
        assert all(torch.equal(tensor, stored[name]) for name, tensor in model.named_parameters())


def phase(index: int, start: int, end: int, solver: dict[str, Any] = FREE) -> dict[str, Any]:
    return train_config(
        phase={"name": f"p{index}", "index": index, "start_step": start, "end_step": end, "solver": solver}
    )


def test_two_phases_with_one_solver_equal_one_phase_bit_for_bit(
    tmp_path: Path, data: Path, undisturbed: Undisturbed
) -> None:
    whole, first, second = undisturbed.run_dir(train_config()), tmp_path / "a" / "p0", tmp_path / "a" / "p1"
    train(first, phase(0, 0, 3), data, log_every_steps=2)
    train(second, phase(1, 3, STEPS), data, start=first)
    assert len(tensors(whole)) == 4
    assert tensors(second) == tensors(whole)
    assert logged(second) == [point for point in logged(whole) if point[0] > 3]


KEEP = [3, 6]


def trunk_config(keep: list[int] = KEEP, solver: dict[str, Any] = FREE) -> dict[str, Any]:
    return train_config(phase={"name": "trunk", "keep": keep, "solver": solver})


def branch_config(start: int, solver: dict[str, Any] = FREE) -> dict[str, Any]:
    return train_config(phase={"name": "branch", "index": 1, "start_step": start, "end_step": STEPS, "solver": solver})


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Run directory of an undisturbed trunk; nobody changes it."""
    run_dir = tmp_path_factory.mktemp("trunk") / "a" / "trunk"
    train(run_dir, trunk_config(), data, save_steps=2)
    return run_dir


def kept(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (work_of(run_dir) / "kept").iterdir())


def tensors(run_dir: Path) -> dict[str, str]:
    """Digests of weights, optimizer and random states at the end of a phase."""
    return {
        name: digest
        for name, digest in artifacts(run_dir).items()
        if name.endswith(".safetensors") and not name.startswith("kept/")
    }


def test_exactly_the_steps_to_keep_are_kept_and_belong_to_the_result(trunk: Path) -> None:
    assert kept(trunk) == ["step-00000003", "step-00000006"]
    assert [read_checkpoint(work_of(trunk) / "kept" / name).global_step for name in kept(trunk)] == KEEP
    assert {f"kept/step-00000003/{name}" for name in ("model.safetensors", "state.json")} <= set(artifacts(trunk))
    assert not (work_of(trunk) / "checkpoints").exists()


@pytest.mark.parametrize("keep", [[], [STEPS]])
def test_keeping_checkpoints_changes_nothing_else(tmp_path: Path, data: Path, trunk: Path, keep: list[int]) -> None:
    other = tmp_path / "a" / "trunk"
    train(other, trunk_config(keep=keep), data)
    assert (tensors(other), logged(other)) == (tensors(trunk), logged(trunk))
    assert sorted(path.name for path in work_of(other).glob("kept/*")) == [f"step-{step:08d}" for step in keep]
    assert read_checkpoint(work_of(other) / "checkpoint").global_step == STEPS


def test_a_phase_with_state_passing_keeps_checkpoints_where_all_chains_restart(
    tmp_path: Path, data: Path, undisturbed: Undisturbed
) -> None:
    config = train_config(phase={**CARRIED, "keep": [2, 6]})
    train(tmp_path / "a" / "run", config, data, save_steps=3)
    assert kept(tmp_path / "a" / "run") == ["step-00000002", "step-00000006"]
    assert outcome(tmp_path / "a" / "run")[1:] == undisturbed.of(train_config(phase=CARRIED))[1:]


@pytest.mark.parametrize(("save_steps", "saved_after"), [(1, [4, 6, 8]), (3, [4, 6, 8]), (5, [6, 8]), (9, [8])])
def test_with_state_passing_a_save_that_is_due_waits_until_all_chains_restart(
    run_dir: Path, data: Path, save_steps: int, saved_after: list[int]
) -> None:
    config = train_config(phase=CARRIED)
    train_until("train.after_step:sigterm@1", run_dir, config, data, save_steps=save_steps)
    train(run_dir, config, data, save_steps=save_steps)
    assert [event["step"] for event in events(run_dir, "checkpoint_committed")] == [2, *saved_after]


@pytest.mark.parametrize("step", KEEP)
def test_a_branch_with_the_solver_of_the_trunk_ends_like_the_trunk_bit_for_bit(
    tmp_path: Path, data: Path, trunk: Path, step: int
) -> None:
    branch = tmp_path / "a" / "branch"
    summary = train(branch, branch_config(step), data, start=trunk, log_every_steps=1).summary
    assert len(tensors(trunk)) == 4
    assert tensors(branch) == tensors(trunk)
    assert logged(branch) == [point for point in logged(trunk) if point[0] > step]
    of_trunk = Manifest.read(trunk / "manifest.json").summary
    assert summary["tokens"] == of_trunk["tokens"] == STEPS * 8 * 12
    assert summary["flops"] == of_trunk["flops"] > 0


@pytest.mark.parametrize(
    ("step", "save_steps", "goes_on_from"), [(1, 2, 0), (3, 2, 2), (5, 2, 4), (STEPS, 2, 6), (5, None, 3)]
)
def test_a_crash_after_any_step_loses_no_kept_checkpoint_and_one_is_to_go_on_from(
    tmp_path: Path, data: Path, trunk: Path, step: int, save_steps: int | None, goes_on_from: int
) -> None:
    run_dir = tmp_path / "a" / "trunk"
    train_until(f"train.after_step:raise@{step}", run_dir, trunk_config(), data, save_steps=save_steps)
    train(run_dir, trunk_config(), data, save_steps=save_steps)
    assert outcome(run_dir) == outcome(trunk)
    assert [event["step"] for event in events(run_dir, "training_started")] == [0, goes_on_from]
    assert events(run_dir, "kept_checkpoint_lost") == []


@pytest.mark.parametrize("damage", ["gone", "flipped byte"])
def test_a_lost_kept_checkpoint_is_said_and_made_again(
    tmp_path: Path, data: Path, trunk: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "a" / "trunk"
    train_until("train.after_step:sigterm@7", run_dir, trunk_config(), data, save_steps=1)
    lost = work_of(run_dir) / "kept" / "step-00000006"
    shutil.rmtree(lost) if damage == "gone" else flip_last_byte(lost / "model.safetensors")
    train(run_dir, trunk_config(), data)
    assert "the kept checkpoint of step 6, before it, was lost and is made again" in caplog.text
    assert [event["step"] for event in events(run_dir, "training_started")] == [0, 5]
    assert outcome(run_dir) == outcome(trunk)


def test_of_a_finished_phase_too_and_a_later_kept_one_stays_in_its_place(
    tmp_path: Path, data: Path, trunk: Path
) -> None:
    run_dir = tmp_path / "a" / "trunk"
    train(run_dir, trunk_config(), data)
    shutil.rmtree(work_of(run_dir) / "kept" / "step-00000003")
    inode = (work_of(run_dir) / "kept" / "step-00000006").stat().st_ino
    train(run_dir, trunk_config(), data, save_steps=1)
    assert artifacts(run_dir) == artifacts(trunk)
    assert (work_of(run_dir) / "kept" / "step-00000006").stat().st_ino == inode
    assert [event["step"] for event in events(run_dir, "training_started")] == [0, 0]


def test_a_branch_from_a_step_that_was_not_kept_or_from_nothing_is_told_what_to_do(
    tmp_path: Path, data: Path, trunk: Path
) -> None:
    message = "phase branch starts was not kept: trunk has the states after 3, 6, 8; add 5 to its `keep`"
    with refused(message, TrainInputError):
        train(tmp_path / "a" / "branch", branch_config(5), data, start=trunk)
    with pytest.raises(InputMissing, match="no input `start`"):
        train(tmp_path / "b" / "branch", branch_config(5), data)


def test_a_branch_whose_kept_checkpoint_is_gone_is_told_what_to_type(tmp_path: Path, data: Path, trunk: Path) -> None:
    copied = tmp_path / "copy" / "trunk"
    shutil.copytree(trunk, copied)
    (work_of(copied) / "kept" / "step-00000003" / "checkpoint.json").write_text("{}")
    with pytest.raises(Exception, match=r"checkpoint\.json: expected \d+ bytes, found 2; type `rm -f ") as caught:
        train(tmp_path / "a" / "branch", branch_config(3), data, start=copied)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]


def test_space_for_kept_checkpoints_is_asked_for_beforehand(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[float] = []
    for keep in ([], KEEP):
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(StorageError) as caught:
            train(tmp_path / str(len(keep)) / "trunk", trunk_config(keep=keep), data)
        needed.append(float(str(caught.value).split(" need ")[1].split()[0]))
    assert needed[1] / needed[0] == pytest.approx(5.2 / 3.2, abs=0.5)
    assert "2 of them kept" in str(caught.value)
