"""What a card says of any causal model, by its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = {"implicit_mamba2": "Mamba2", "implicit_llama3": "Llama"}
# In this order; whichever of them a configuration has.
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "expand",
    "head_dim",
    "state_size",
    "n_groups",
    "conv_kernel",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
    "vocab_size",
    "tie_word_embeddings",
    "weight_norm",
)


@dataclass(frozen=True)
class ModelFacts:
    """family: Mamba2, Llama, or the model type that Hugging Face knows; solver: None for an explicit model."""

    model_type: str
    family: str
    num_parameters: int
    sizes: Mapping[str, Any]
    solver: Mapping[str, Any] | None

    @classmethod
    def of(cls, model: Any) -> ModelFacts:
        fields = model.config.to_dict()
        kind = str(model.config.model_type)
        sizes = {key: fields[key] for key in SIZES if fields.get(key) is not None}
        solver = getattr(model, "solver", None)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        return cls(kind, FAMILIES.get(kind, kind), num_parameters, sizes, None if solver is None else solver.to_dict())

    @property
    def is_ours(self) -> bool:
        """Whether it takes `import implicit_llm` to load it."""
        return self.model_type in FAMILIES

    @property
    def variant(self) -> str:
        return "explicit" if self.solver is None else "implicit"

    @property
    def tags(self) -> list[str]:
        """Of the head; the arXiv tag makes the hub show the paper."""
        own = ["implicit-llm", self.variant, "arxiv:2502.07827"] if self.is_ours else []
        return [self.family.lower(), *own]


def solver_words(solver: Mapping[str, Any] | None) -> str:
    """How a phase finds its fixed point, in one sentence, by the settings of the model's solver."""
    if solver is None:
        return "explicit: no iterations"
    if solver["mode"] == "unrolled":
        return f"unrolled: {solver['num_unroll']} iterations, all differentiated, damped by {solver['tau']:g}"
    what = {"sequence": "of each sequence", "token": "of each token", "batch": "of the worst sequence"}[solver["stop"]]
    return (
        f"({solver['max_iter']}+{solver['phantom_steps']}): up to {solver['max_iter']} iterations "
        f"({solver['method']}) until the relative residual {what} is below {solver['tol']:g}, then "
        f"{solver['phantom_steps']} phantom-gradient steps with tau {solver['tau']:g}"
    )
