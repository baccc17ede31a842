"""Where a phase goes on from: its own checkpoints, one given by hand, or a state of an earlier phase."""

from __future__ import annotations

from implicit_llm.training.operations.checkpoint import Checkpoint
from implicit_llm.training.operations.checkpoint_store import (
    KEPT_DIR,
    CheckpointStore,
    NoCheckpoint,
    check_identity,
    find_checkpoint,
    step_name,
)
from implicit_llm_contracts.config.training import Runtime, TrainConfig
from implicit_llm_contracts.runs import journal as journals
from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.stage_context import Input, StageContext

DATA_ROLE, START_ROLE = "data", "start"


class TrainInputError(UserError):
    """An input directory or a runtime option is not what training needs."""


def given_input(context: StageContext, role: str) -> Input:
    """The upstream run with this role. Raises: TrainInputError."""
    if role not in context.inputs:
        raise TrainInputError(f"train/{context.name}: no input `{role}`; add --input {role}=DIR with its run directory")
    return context.inputs[role]


def find_start(
    context: StageContext, config: TrainConfig, runtime: Runtime, store: CheckpointStore
) -> Checkpoint | None:
    """The furthest of this run's own checkpoints and the one given by hand; else where an earlier phase left off."""
    own = store.newest()
    if runtime.resume is not None:
        given = find_checkpoint(runtime.resume)
        check_identity(given, store.identity, advice="leave out --resume, or give a checkpoint of this very run")
        if own is None or own.global_step < given.global_step:
            own = store.adopt(given)
    if own is not None:
        context.log.info("going on from %s, step %d", own.path.name, own.global_step)
        return own
    return _earlier_phase(context, config) if config.phase.index > 0 else None


def rewind_journal(context: StageContext, start: Checkpoint | None) -> None:
    """Steps after the checkpoint are made again, so their points must not count twice."""
    step = 0 if start is None else start.global_step
    path = context.journal.path
    if path is not None and any(point.step > step for point in journals.read(path)):
        context.journal.rewind(step)


def _earlier_phase(context: StageContext, config: TrainConfig) -> Checkpoint:
    """The state at the end of the phase that is the input `start`, or one that it kept on the way."""
    source = given_input(context, START_ROLE)
    phase = source.manifest.identity["config"]["phase"]
    wanted, end = config.phase.start_step, phase["end_step"]
    path = source.work / ("checkpoint" if wanted == end else f"{KEPT_DIR}/{step_name(wanted)}")
    kept = [int(step) for step in phase.get("keep", ())]
    if wanted != end and wanted not in kept:
        keeps = f"the states after {', '.join(map(str, kept))} and {end}" if kept else f"only the state after {end}"
        raise TrainInputError(
            f"{source.dir}: phase {phase['name']} has {keeps}, but phase {config.phase.name} starts at step {wanted}; "
            f"add {wanted} to `keep` of phase {phase['name']}, or let {config.phase.name} start at another step"
        )
    try:
        start = find_checkpoint(path)
    except NoCheckpoint as error:
        raise TrainInputError(
            f"{path}: the state after step {wanted} of phase {phase['name']} is missing or damaged; type "
            f"`rm -f {source.dir / 'manifest.json'}` and run the workflow again: it makes that state again"
        ) from error
    if start.global_step != wanted:
        raise TrainInputError(
            f"{path}: is at step {start.global_step}, but phase {config.phase.name} starts at {wanted}; type "
            f"`rm -rf {source.work}` and run the workflow again"
        )
    context.log.info("starting from %s, step %d", source.manifest.name, start.global_step)
    return start
