"""Small models of both families that contract, so that a fixed point exists and is unique."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import implicit_llm

SMALL = {
    "mamba2": {"hidden_size": 16, "expand": 2, "head_dim": 8, "state_size": 8, "vocab_size": 23},
    "llama3": {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 23},
}


@pytest.fixture(params=list(SMALL))
def family(request: pytest.FixtureRequest) -> str:
    """Each of both, where a test does not choose."""
    return request.param


@pytest.fixture
def make_model():
    """make_model(family, kind="implicit", num_hidden_layers=1, **solver): a small model in evaluation mode."""

    def make(family: str, kind: str = "implicit", num_hidden_layers: int = 1, dtype=torch.float64, **solver):
        torch.manual_seed(0)
        config = implicit_llm.load_config(f"{family}-130m-{kind}", num_hidden_layers=num_hidden_layers, **SMALL[family])
        model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
        if kind != "explicit":
            model.solver = replace(model.solver, **solver)
            # Small norms before the layers and at the end: f depends weakly on z and contracts.
            with torch.no_grad():
                for name, parameter in model.base.named_parameters():
                    if "norm" in name and "mixer" not in name and "injection" not in name:
                        parameter.fill_(0.1)
        return model

    return make
