"""Check that a layer which a user registered meets the assumptions of the solver, of padding and of generation.

Shapes: `B` batch, `L` length, `D` model.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from implicit_llm.models.backbone import StackMap
from implicit_llm.models.configuration import ImplicitConfig
from implicit_llm.models.errors import ModelConfigError
from implicit_llm.models.layers import RecurrentLayer
from implicit_llm.models.stack import Prefix
from implicit_llm_contracts.config.flops import FAMILIES

BATCH, LENGTH, SPLIT = 2, 12, 7
TOLERANCE = 1e-4  # relative to the largest output, in fp32; the error of a wrong layer is about as large as its output


def check_layer(config: ImplicitConfig) -> None:
    """Check that a layer of `config` is causal, continues from its state, and ignores padding and other sequences.

    A layer of a user's family must also treat a state of zeros as no state, because state passing starts its chains
    from zeros. The output must be finite, and the output of an implicit model's layer must depend on the injection. The
    check runs one layer with random weights on random input; the caller's random state and `config` do not change.
    Raises: ModelConfigError, whose message describes what the layer does wrong; UnknownName if the family is not
        registered.
    """
    family = FAMILIES[config.model_type]
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.vocab_size, config.dropout = 1, 2, 0.0
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = family[1](config).float().eval()
        for parameter in model.parameters():  # a layer that starts at zero would hide its faults
            parameter += 0.1 * torch.randn_like(parameter)
        z_BLD, x_BLD, other_BLD = torch.randn(3, BATCH, LENGTH, config.hidden_size)

    @torch.no_grad()
    def apply(z_BLD: Tensor, x_BLD: Tensor, prefix: Prefix | None = None, valid_BL: Tensor | None = None) -> Any:
        return StackMap(model, model.stack_input(x_BLD, valid_BL, None, prefix)).close(z_BLD)

    name = model.layer_class.__name__
    whole_BLD, _ = apply(z_BLD, x_BLD)
    if not bool(whole_BLD.isfinite().all()):
        raise ModelConfigError(f"{name}: the output for random input is not finite")

    def compare(found_BLD: Tensor, expected_BLD: Tensor, wrong: str) -> None:
        difference = float((found_BLD - expected_BLD).abs().max() / whole_BLD.abs().max())
        if not difference <= TOLERANCE:
            raise ModelConfigError(f"{name}: {wrong} (by {difference:.1e} of the largest output)")

    if config.is_implicit and torch.equal(apply(z_BLD, other_BLD)[0], whole_BLD):
        raise ModelConfigError(f"{name}: the input does not change its output; add injection_BLE in mix")

    later_z_BLD, later_x_BLD = (torch.cat([t[:, :SPLIT], other_BLD[:, SPLIT:]], dim=1) for t in (z_BLD, x_BLD))
    first_BLD = whole_BLD[:, :SPLIT]
    compare(apply(later_z_BLD, later_x_BLD)[0][:, :SPLIT], first_BLD, "later tokens change its output; make mix causal")
    compare(apply(z_BLD[1:], x_BLD[1:])[0], whole_BLD[1:], "other sequences of the batch change its output")

    parts: list[Tensor] = []
    prefix: Any = None
    for z_BWD, x_BWD in zip(z_BLD.split(SPLIT - 2, 1), x_BLD.split(SPLIT - 2, 1), strict=True):
        part_BWD, prefix = apply(z_BWD, x_BWD, prefix)
        parts.append(part_BWD)
    compare(
        torch.cat(parts, dim=1), whole_BLD, "a sequence in parts has another output; let mix continue from its state"
    )

    if issubclass(model.layer_class, RecurrentLayer):
        zeros = Prefix(prefix.map(torch.zeros_like).layers, 0)
        compare(apply(z_BLD, x_BLD, zeros)[0], whole_BLD, "no state differs from zeros; let mix start from zeros")

    valid_BL = torch.arange(LENGTH).expand(BATCH, -1) < torch.tensor([[LENGTH], [SPLIT]])
    masked_BLD, after = apply(z_BLD.masked_fill(~valid_BL[..., None], 0.0), later_x_BLD, None, valid_BL)
    compare(masked_BLD[1, :SPLIT], whole_BLD[1, :SPLIT], "padding changes the output of the tokens before it")
    row = torch.tensor([1])
    continued_BLD, _ = apply(z_BLD[1:, SPLIT:], x_BLD[1:, SPLIT:], after.select(row))
    compare(continued_BLD, whole_BLD[1:, SPLIT:], "padding changes its state; keep the state where valid_BL is False")
