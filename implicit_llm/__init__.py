"""Implicit language models are Mamba2 and Llama models that iterate their layer stack to a fixed point z* = f(z*, x).

Importing this package registers `implicit_mamba2`, `implicit_llama3` and the baseline `lstm` with Hugging Face's Auto
classes, and lets models run from CUDA graphs (`GraphRunner`).
"""

from implicit_llm.cuda_graphs.runner import GraphRunner
from implicit_llm.models.auto import (
    list_configs,
    load_config,
    register_family,
    register_implicit_causal_lm,
    trained_model,
)
from implicit_llm.models.backbone import ImplicitModel
from implicit_llm.models.causal_lm import sequential_forward
from implicit_llm.models.configuration import ImplicitConfig
from implicit_llm.models.layer_check import check_layer
from implicit_llm.models.layers import Projection, RecurrentLayer, RMSNorm
from implicit_llm.models.llama3.model import ImplicitLlama3Config, ImplicitLlama3ForCausalLM, ImplicitLlama3Model
from implicit_llm.models.loading import from_llama, from_mamba2, to_implicit
from implicit_llm.models.mamba2.loading import load_original_mamba2
from implicit_llm.models.mamba2.model import ImplicitMamba2Config, ImplicitMamba2ForCausalLM, ImplicitMamba2Model
from implicit_llm.solver.methods import register_method
from implicit_llm.solver.residual import Progress, register_stop
from implicit_llm.solver.stats import NonFiniteState, SolverStats
from implicit_llm_contracts import __version__
from implicit_llm_contracts.config.solver import SolverConfig
from implicit_llm_data.groups import register_group

ImplicitModel.runner_class = GraphRunner
register_implicit_causal_lm()

__all__ = [
    "GraphRunner",
    "ImplicitConfig",
    "ImplicitLlama3Config",
    "ImplicitLlama3ForCausalLM",
    "ImplicitLlama3Model",
    "ImplicitMamba2Config",
    "ImplicitMamba2ForCausalLM",
    "ImplicitMamba2Model",
    "NonFiniteState",
    "Progress",
    "Projection",
    "RMSNorm",
    "RecurrentLayer",
    "SolverConfig",
    "SolverStats",
    "__version__",
    "check_layer",
    "from_llama",
    "from_mamba2",
    "list_configs",
    "load_config",
    "load_original_mamba2",
    "register_family",
    "register_group",
    "register_implicit_causal_lm",
    "register_method",
    "register_stop",
    "sequential_forward",
    "to_implicit",
    "trained_model",
]


def __dir__() -> list[str]:
    return __all__
