"""The inputs of an evaluation: one trained model, and test sets under any other role."""

from __future__ import annotations

from pathlib import PurePosixPath

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_contracts.runs.stage_context import Input, StageContext

MODEL_ROLE = "model"
TRAINING_STATE = frozenset({"checkpoint", "kept"})  # folders of a training phase from which a training goes on


class EvaluateInputError(UserError):
    """An input directory is not what an evaluation needs."""


def reads_of_inputs(path: PurePosixPath) -> bool:
    """Whether an evaluation reads this file: not the weights, moments and random states of a training that goes on.

    They are three times the size of the model, and may have been removed to save room.
    """
    return TRAINING_STATE.isdisjoint(path.parts)


def model_input(context: StageContext) -> Input:
    """The training phase to evaluate. Raises: EvaluateInputError."""
    if MODEL_ROLE not in context.inputs:
        raise EvaluateInputError(
            f"evaluate/{context.name}: no input `{MODEL_ROLE}`; "
            f"add --input {MODEL_ROLE}=DIR with the run directory of a training phase"
        )
    return context.inputs[MODEL_ROLE]


def data_inputs(context: StageContext) -> dict[str, Input]:
    """Every input but the model, by role. Raises: EvaluateInputError when there is none."""
    found = {role: context.inputs[role] for role in sorted(context.inputs) if role != MODEL_ROLE}
    if not found:
        raise EvaluateInputError(
            f"evaluate/{context.name}: no test data; add --input NAME=DIR with the run directory of a data set"
        )
    return found
