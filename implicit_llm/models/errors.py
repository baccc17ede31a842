"""Define the errors of the model library."""

from implicit_llm_contracts.errors import UserError


class ModelConfigError(UserError, ValueError):
    """A configuration, weights or a user's layer do not define a valid model; the message names what is wrong."""


class LostGradient(ValueError):
    """The layer stack is computed in a way that gives some of its weights no gradient."""


REENTRANT = (
    "activation checkpointing with use_reentrant=True loses the gradients of an implicit model's weights; pass "
    "use_reentrant=False (gradient_checkpointing_kwargs, CheckpointImpl.NO_REENTRANT)"
)
PACKED = (
    "packed documents would read one another; pad them with an attention_mask instead (DataCollatorWithPadding, "
    "packing=False, padding_free=False)"
)
