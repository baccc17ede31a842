"""The inputs of an evaluation: one trained model, and test sets under any other role."""

from __future__ import annotations

from implicit_llm.runs.errors import UserError
from implicit_llm.runs.stage import Input, StageContext

MODEL_ROLE = "model"


class EvaluateInputError(UserError):
    """An input directory is not what an evaluation needs."""


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
