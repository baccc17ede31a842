"""What a checkpoint holds, checkpoints in their store, and when they are saved."""

import errno
import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from implicit_llm.training.operations import save_schedule
from implicit_llm.training.operations.checkpoint import (
    CheckpointStore,
    CorruptCheckpoint,
    ForeignCheckpoint,
    TrainingState,
    read_checkpoint,
    write_checkpoint,
)
from implicit_llm.training.operations.preemption import StopRequest
from implicit_llm.training.operations.save_schedule import SaveSchedule, save_interval_s
from implicit_llm.training.optimizer import build_optimizer, is_matrix
from implicit_llm.training.state import (
    StateMismatch,
    load_model,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    random_state,
    set_random_state,
)
from implicit_llm_contracts.config.training import OptimizerConfig, Runtime
from implicit_llm_contracts.runs.atomic import StorageError, temporary_name
from implicit_llm_contracts.runs.journal import Journal, read_records
from tests.limits import file_size_limit
from tests.refusals import refused
from tests.unit.training.small_runs import IMPLICIT, LLAMA, flip_last_byte, inject, make_model

IDENTITY = {"stage": "train", "fingerprint": "f" * 64, "config": {"seed": 0, "schedule": {"peak_learning_rate": 0.1}}}


def state(step: int, size: int = 4) -> TrainingState:
    tensors = {"weight": torch.full((size,), float(step))}
    moments = {"weight.exp_avg": torch.full((size,), step + 0.5), "weight.step": torch.tensor(float(step))}
    return TrainingState(
        step, IDENTITY, tensors, moments, [random_state()], {"columns": [], "window": [], "recent": []}
    )


def commit(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.commit(state(step))


def newest_step(store: CheckpointStore) -> int | None:
    return getattr(store.newest(), "global_step", None)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, IDENTITY, Journal(tmp_path / "journal.jsonl"))


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def events(tmp_path: Path) -> list[tuple[str, str]]:
    return [(event["name"], event["path"]) for event in read_records(tmp_path / "journal.jsonl")]


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path: Path) -> None:
    values, tensors = random_state()
    written = state(7)
    write_checkpoint(written, tmp_path / "step-00000007")
    found = read_checkpoint(tmp_path / "step-00000007")
    assert (found.global_step, found.state["identity"]) == (7, IDENTITY)
    torch.testing.assert_close(found.model(), written.model, rtol=0, atol=0)
    torch.testing.assert_close(found.optimizer(), written.optimizer, rtol=0, atol=0)
    assert found.random(0)[0] == json.loads(json.dumps(values))  # type: ignore[index]
    torch.testing.assert_close(found.random(0)[1], tensors, rtol=0, atol=0)  # type: ignore[index]
    assert found.random(1) is None
    assert {path.suffix for path in found.path.iterdir()} == {".json", ".safetensors"}  # nothing is pickled
    (found.path / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match="no file"):
        read_checkpoint(found.path)


def test_the_newest_committed_checkpoint_is_found_and_only_two_are_kept(store: CheckpointStore, tmp_path: Path) -> None:
    assert store.newest() is None
    commit(store, 5, 10, 15, 20)
    assert names(store) == ["step-00000015", "step-00000020"]
    assert newest_step(store) == 20
    assert read_checkpoint(tmp_path / "checkpoints" / "step-00000015").global_step == 15


def test_foreign_names_are_left_alone(store: CheckpointStore) -> None:
    commit(store, 5)
    foreign = ["step-30-old", "step-0030", "step-0030.tmp", "step-00000030.bak", "xstep-00000040", "notes"]
    for name in foreign:
        (store.directory / name).mkdir()
    (store.directory / "step-00000050").write_text("a file")
    assert newest_step(store) == 5
    commit(store, 6, 7)
    assert set(foreign) <= set(names(store))


def with_too_few_names(folder: Path) -> None:
    digests = json.loads((folder / "checkpoint.json").read_text())
    del digests["files"][0]
    (folder / "checkpoint.json").write_text(json.dumps(digests))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "checkpoint.json").unlink(),
        lambda folder: (folder / "checkpoint.json").write_text('{"format": 2, '),
        lambda folder: (folder / "checkpoint.json").write_text('{"format": 99, "files": []}'),
        with_too_few_names,
        lambda folder: folder.rename(temporary_name(folder)),  # its writer was stopped
    ],
)
@pytest.mark.parametrize("after", [6, 10])
def test_a_checkpoint_without_whole_digests_is_set_aside(
    store: CheckpointStore, tmp_path: Path, damage: Callable[[Path], None], after: int
) -> None:
    commit(store, 5, 10)
    damage(store.directory / "step-00000010")
    was_committed = (store.directory / "step-00000010").exists()
    assert newest_step(store) == 5
    assert events(tmp_path) == [("checkpoint_corrupt", "step-00000010")] * was_committed
    assert [name for name in names(store) if not name.startswith(".")] == [
        "step-00000005",
        *["step-00000010.bad"] * was_committed,
    ]
    commit(store, after)
    assert newest_step(store) == after


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"])
def test_one_flipped_byte_is_named_with_both_digests_and_the_checkpoint_set_aside(
    store: CheckpointStore, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    commit(store, 5, 10)
    good = store.directory / "step-00000010"
    flip_last_byte(good / name)
    with pytest.raises(CorruptCheckpoint, match=rf"{name}: expected sha256 \w{{16}}, found \w{{16}}"):
        read_checkpoint(good)
    assert newest_step(store) == 5
    assert names(store) == ["step-00000005", "step-00000010.bad"]
    assert events(tmp_path) == [("checkpoint_corrupt", "step-00000010")]
    assert name in caplog.text
    store.commit(state(10))
    assert "step-00000010.bad" in names(store)


def test_a_checkpoint_of_another_identity_is_refused_with_the_difference_in_one_line(store: CheckpointStore) -> None:
    store.commit(state(5))
    config = {"seed": 0, "schedule": {"peak_learning_rate": 0.2}, "batch_size": 8}
    store.identity = {**IDENTITY, "fingerprint": "e" * 64, "config": config}
    differences = "batch_size - -> 8.*schedule.peak_learning_rate 0.1 -> 0.2"
    with refused(differences, ForeignCheckpoint) as caught:
        store.newest()
    assert "seed" not in str(caught.value)
    store.identity = {**IDENTITY, "fingerprint": "e" * 64}
    with pytest.raises(ForeignCheckpoint, match="the configs are equal, the code or the inputs are not"):
        store.newest()


def test_a_disk_that_fills_up_leaves_the_old_checkpoint_and_names_the_bytes_needed(store: CheckpointStore) -> None:
    store.commit(state(5))
    with pytest.raises(StorageError, match="step-00000010"), file_size_limit(1 << 20):
        store.commit(state(10, size=1 << 20))

    refused = pytest.raises(StorageError, match=r"36 bytes needed, \d+ bytes free")
    with inject("checkpoint.after_model:enospc"), refused as caught:
        store.commit(state(10))
    assert caught.value.errno == errno.ENOSPC
    assert names(store) == ["step-00000005"]
    assert newest_step(store) == 5


def test_too_little_space_is_refused_beforehand_but_for_what_checkpoints_take_already(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100 * 2**20))
    store.require_space(30 * 2**20)
    with pytest.raises(StorageError, match=r"50\.0 MiB need 160\.0 MiB more and 100\.0 MiB are free"):
        store.require_space(50 * 2**20)
    store.commit(state(5, size=1 << 16))
    held = sum(file.stat().st_size for file in (store.directory / "step-00000005").iterdir())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=int(2.2 * held)))
    store.require_space(held)
    with pytest.raises(StorageError):
        store.require_space(held + 10)


def at_once(work: Callable[[], object]) -> Future[None]:
    """In place of a thread, so that only the clock decides."""
    work()
    done: Future[None] = Future()
    done.set_result(None)
    return done


@pytest.mark.parametrize(
    ("runtime", "saved"),
    [
        ({"save_every_s": 10.0}, [10, 20, 30]),
        ({"save_every_s": 1000.0, "save_steps": 10}, [10, 20, 30]),
        ({"save_every_s": 0.0, "save_steps": 10}, list(range(1, 32))),
    ],
)
def test_saves_are_made_at_every_interval_and_at_given_steps(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, runtime: dict[str, Any], saved: list[int]
) -> None:
    """With steps of one second each."""
    clock, found = SimpleNamespace(now=100.0), []
    monkeypatch.setattr(save_schedule, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(save_schedule, "in_background", at_once)
    with StopRequest() as stop, SaveSchedule(Runtime(**runtime), stop, range(10**6), store, Journal(None)) as schedule:
        for step in range(1, 32):
            clock.now += 1.0
            if schedule.after_step(step)[0]:
                found.append(step)
                schedule.commit(state(step))
    assert found == saved


@pytest.mark.parametrize(("steps_between_stops", "is_warned"), [(1, False), (64, True)])
def test_the_grace_covers_the_steps_until_training_can_stop(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    steps_between_stops: int, is_warned: bool,
) -> None:  # fmt: skip
    """With steps of one second each; with state passing, training can stop after every 64 steps, for example."""
    clock, runtime = SimpleNamespace(now=100.0), Runtime(save_every_s=0.0, grace_s=30.0)
    monkeypatch.setattr(save_schedule, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(save_schedule, "in_background", at_once)
    with StopRequest() as stop, SaveSchedule(runtime, stop, range(10**6), store, Journal(None)) as schedule:
        for step in range(1, 4):
            clock.now += steps_between_stops
            schedule.after_step(step)
            schedule.commit(state(step))
    assert ("a stop may wait 64.0 s for a step at which training can stop" in caplog.text) is is_warned


@pytest.mark.parametrize(
    ("wanted_s", "stall_s", "write_s", "interval_s"),
    [(10, 0, 0, 10), (10, 2, 0, 100), (10, 0.1, 30, 150), (0, 2, 30, 0)],
)
def test_slow_saves_by_the_clock_stall_a_fiftieth_of_the_time_and_write_a_fifth(
    wanted_s: float, stall_s: float, write_s: float, interval_s: float
) -> None:
    assert save_interval_s(wanted_s, stall_s, write_s) == pytest.approx(interval_s)


class SlowDisk(CheckpointStore):
    """Writes a state only once it is allowed to; `writing` counts the writes at the same time."""

    def __init__(self, work: Path) -> None:
        super().__init__(work, IDENTITY, Journal(None))
        self.may_write = threading.Event()
        self.written: list[tuple[int, float]] = []
        self.writing = 0

    def commit(self, state: TrainingState) -> None:
        self.writing += 1
        assert self.writing == 1
        assert self.may_write.wait(60)
        self.written.append((state.global_step, float(state.model["weight"][0])))
        self.writing -= 1
        super().commit(state)


@pytest.fixture
def disk(tmp_path: Path) -> SlowDisk:
    return SlowDisk(tmp_path)


def schedule_of(disk: SlowDisk, stop: StopRequest, end_step: int) -> SaveSchedule:
    return SaveSchedule(Runtime(save_every_s=0.0), stop, range(end_step), disk, Journal(None))


def test_training_goes_on_while_a_state_is_written_as_it_was(disk: SlowDisk) -> None:
    with StopRequest() as stop, schedule_of(disk, stop, end_step=9) as schedule:
        live = state(1)
        assert schedule.after_step(1) == (True, False)
        schedule.commit(live)
        live.model["weight"].fill_(99.0)  # the next update
        assert schedule.after_step(2) == (False, False)  # none is due while one is written
        assert disk.written == []
        disk.may_write.set()
        schedule.commit(state(2))
    assert disk.written[0] == (1, 1.0)


def test_the_last_state_is_on_disk_when_its_save_returns(disk: SlowDisk) -> None:
    disk.may_write.set()
    with StopRequest() as stop, schedule_of(disk, stop, end_step=2) as schedule:
        for step in (1, 2):
            schedule.after_step(step)
            schedule.commit(state(step))
        assert [step for step, _ in disk.written] == [1, 2]


@pytest.mark.parametrize(("error", "written"), [(ValueError, [(1, 1.0)]), (KeyboardInterrupt, [])])
def test_an_error_of_training_waits_for_the_write_and_a_second_ctrl_c_does_not(
    disk: SlowDisk, error: type[BaseException], written: list[tuple[int, float]]
) -> None:
    def fail_after_a_save() -> None:
        with StopRequest() as stop, schedule_of(disk, stop, end_step=9) as schedule:
            schedule.after_step(1)
            schedule.commit(state(1))
            if written:
                disk.may_write.set()
            raise error

    with pytest.raises(error):
        fail_after_a_save()
    assert disk.written == written
    disk.may_write.set()  # for the thread that is left


ADAMW = OptimizerConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)


def test_tied_weights_are_stored_once_and_stay_tied_when_loaded() -> None:
    source, target = make_model(LLAMA, tie_word_embeddings=True), make_model(LLAMA, tie_word_embeddings=True)
    assert "lm_head.weight" not in model_tensors(source)
    assert "lm_head.weight" in model_tensors(make_model(LLAMA, tie_word_embeddings=False))
    load_model(target, model_tensors(source), "here")
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    assert target.lm_head.weight is target.model.embed_tokens.weight


def test_weights_of_another_architecture_are_refused_by_name() -> None:
    with pytest.raises(StateMismatch, match=r"here: model\.embed_tokens\.weight has shape \(6, 16\).*\(7, 16\)"):
        load_model(make_model(LLAMA | {"vocab_size": 7}), model_tensors(make_model(LLAMA)), "here")
    with pytest.raises(StateMismatch, match=r"here: lacks model\.layers\.1"):
        load_model(make_model(LLAMA | {"num_hidden_layers": 2}), model_tensors(make_model(LLAMA)), "here")


def test_stored_optimizer_settings_do_not_replace_those_of_the_config() -> None:
    model = make_model(LLAMA)
    optimizer = build_optimizer(model, ADAMW)
    model(torch.tensor([[0, 1, 2, 3]])).logits.square().sum().backward()
    optimizer.step()
    restored = build_optimizer(model, OptimizerConfig(0.5, 0.6, 1e-6, 0.2, 1.0))
    load_optimizer(restored, model, optimizer_tensors(optimizer, model), "here")
    assert restored.param_groups[0]["betas"] == (0.5, 0.6)
    assert restored.param_groups[0]["weight_decay"] == 0.2


def test_optimizer_state_of_another_model_is_refused() -> None:
    model = make_model(LLAMA)
    with pytest.raises(StateMismatch, match="does not train; all phases of a curriculum need the same model"):
        load_optimizer(build_optimizer(model, ADAMW), model, {"gone.weight.exp_avg": torch.zeros(1)}, "here")
    some = {"model.norm.weight.exp_avg": torch.zeros(16)}
    with pytest.raises(StateMismatch, match="lacks lm_head"):
        load_optimizer(build_optimizer(model, ADAMW), model, some, "here")


def test_a_parameter_without_gradient_has_an_optimizer_state_that_continues_training() -> None:
    model = make_model(LLAMA, tie_word_embeddings=False)
    unused = model.lm_head.weight

    def update(optimizer: Any, uses_head: bool) -> None:
        torch.manual_seed(0)  # for dropout
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.zero_grad()
        hidden_BLD = model.model(torch.tensor([[0, 1, 2, 3]])).last_hidden_state
        (model.lm_head(hidden_BLD) if uses_head else hidden_BLD).square().sum().backward()
        optimizer.step()

    optimizer = build_optimizer(model, ADAMW)
    assert optimizer_tensors(optimizer, model) == {}
    update(optimizer, uses_head=False)
    restored = build_optimizer(model, ADAMW)
    before = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
    saved_state = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model).items()}
    load_optimizer(restored, model, saved_state, "here")
    update(optimizer, uses_head=True)
    after = unused.detach().clone()
    load_model(model, before, "here")
    update(restored, uses_head=True)
    assert torch.equal(unused, after)
    assert not torch.equal(unused, before["lm_head.weight"])


def test_only_matrices_decay() -> None:
    model = make_model(IMPLICIT)
    decayed = {name for name, parameter in model.named_parameters() if is_matrix(parameter)}
    kept = {name: parameter for name, parameter in model.named_parameters() if name not in decayed}
    assert len(decayed) == 5  # embedding, injection, in-projection, convolution, out-projection
    assert all(max(weight.shape) == weight.numel() for weight in kept.values())  # gains of shape (N, 1) as well
    assert {"dt_bias", "A_log"} <= {name.rpartition(".")[2] for name in kept}


def test_random_state_brings_back_all_generators() -> None:
    values, tensors = random_state()
    drawn = (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist())
    set_random_state(values, tensors)
    assert drawn == (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist())
