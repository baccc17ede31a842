"""A phase that was stopped, wherever and however, ends bit for bit as if it had not been."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from implicit_llm.training import stage
from implicit_llm.training.operations.checkpoint_store import ForeignCheckpoint
from implicit_llm_contracts.runs import journal
from implicit_llm_contracts.runs.errors import Preempted
from implicit_llm_contracts.runs.faults import FaultInjected
from implicit_llm_contracts.runs.manifest import Manifest
from tests.unit.training.small_runs import (
    FREE,
    IMPLICIT,
    LLAMA,
    STEPS,
    UNROLLED,
    Inject,
    Undisturbed,
    artifacts,
    events,
    logged,
    outcome,
    saved,
    train,
    train_config,
    work_of,
)

AFTER_STEP, IN_ACCUMULATION = "train.after_step:raise@", "train.micro_step:raise@"


@pytest.mark.parametrize(
    ("config", "faults", "save_steps", "runtime"),
    [
        *((train_config(), [f"{AFTER_STEP}{step}"], 3, {}) for step in (2, 3, 7, STEPS)),
        *((train_config(LLAMA), [f"{IN_ACCUMULATION}{n}"], 1, {"micro_batch_size": 2}) for n in (1, 7, 32)),
        (train_config(phase={"solver": UNROLLED}), [f"{AFTER_STEP}4", f"{AFTER_STEP}2"], 2, {}),
        (train_config(LLAMA), [f"{AFTER_STEP}4", f"{AFTER_STEP}2"], 2, {}),
    ],
)
def test_a_crash_after_any_step_or_within_one_changes_nothing(
    run_dir: Path,
    data: Path,
    inject: Inject,
    undisturbed: Undisturbed,
    config: dict[str, Any],
    faults: list[str],
    save_steps: int,
    runtime: dict[str, Any],
) -> None:
    for fault in faults:
        with inject(fault), pytest.raises(FaultInjected):
            train(run_dir, config, data, save_steps=save_steps, **runtime)
    assert not (run_dir / "manifest.json").exists()
    train(run_dir, config, data, save_steps=save_steps, **runtime)
    assert outcome(run_dir) == undisturbed.of(config, **runtime)


def test_metrics_that_were_not_yet_logged_are_not_lost_by_a_stop_and_results_do_not_depend_on_logging(
    run_dir: Path, data: Path, inject: Inject, undisturbed: Undisturbed
) -> None:
    config = train_config()
    with inject("train.after_step:sigterm@6"), pytest.raises(Preempted):
        train(run_dir, config, data, log_every_steps=4)
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
    run_dir: Path, data: Path, inject: Inject, undisturbed: Undisturbed, point: str
) -> None:
    config = train_config()
    with inject(point), pytest.raises(Preempted, match=r"after step \d, which is committed") as caught:
        train(run_dir, config, data, save_steps=2)
    steps = [event["step"] for event in events(run_dir, "checkpoint_committed")]
    assert steps == sorted(set(steps))
    assert f"after step {int(saved(run_dir)[-1].removeprefix('step-'))}," in str(caught.value)
    train(run_dir, config, data, save_steps=2)
    assert outcome(run_dir) == undisturbed.of(config)


def test_a_stop_signal_before_the_first_step_stops_without_a_step(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "require_world", lambda: os.kill(os.getpid(), signal.SIGTERM))
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


def test_an_explicit_resume_of_a_finished_phase_only_publishes_it_and_of_another_identity_is_refused(
    tmp_path: Path, run_dir: Path, data: Path, undisturbed: Undisturbed
) -> None:
    finished = undisturbed.run_dir(train_config())
    train(run_dir, train_config(), data, resume=finished)
    assert outcome(run_dir) == (artifacts(finished), [])
    with pytest.raises(ForeignCheckpoint, match="seed 3 there, 4 here; leave out --resume"):
        train(tmp_path / "new" / "only", train_config(seed=4), data, resume=finished)


def test_accumulation_changes_the_result_by_rounding_only(undisturbed: Undisturbed) -> None:
    config = train_config({**LLAMA, "attention_dropout": 0.0})
    run_dirs = undisturbed.run_dir(config), undisturbed.run_dir(config, micro_batch_size=2)
    whole, parts = (load_file(work_of(run_dir) / "checkpoint" / "model.safetensors") for run_dir in run_dirs)
    assert all(torch.allclose(whole[name], parts[name], atol=1e-4) for name in whole)
    losses = [[values["loss"] for _, values in logged(run_dir)] for run_dir in run_dirs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_saved_model_is_that_of_the_final_checkpoint(undisturbed: Undisturbed) -> None:
    run_dir = undisturbed.run_dir(train_config())
    model = AutoModelForCausalLM.from_pretrained(work_of(run_dir) / "model")
    stored = load_file(work_of(run_dir) / "checkpoint" / "model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.named_parameters())
    assert model.solver.max_iter == FREE["max_iter"]
    assert model.config.use_cache
    assert Manifest.read(run_dir / "manifest.json").summary["data"]["group"] == "S3"
    assert IMPLICIT["vocab_size"] == model.config.vocab_size
