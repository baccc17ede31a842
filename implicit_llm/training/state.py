"""Convert weights, optimizer state and random state of a training process to named tensors and values, and back."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from implicit_llm.training.distributed import gather_on_main, max_over_ranks
from implicit_llm.training.optimizer import local_part
from implicit_llm_contracts.errors import UserError

_SAME_MODEL = "all phases of a curriculum need the same model"


class StateMismatch(UserError):
    """A checkpoint does not fit the model or the optimizer into which it is loaded."""


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, without copying them; tied ones occur once."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


def load_model(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy `tensors` into the model.

    Raises: StateMismatch, whose message starts with `where`, if the names or a shape differ.
    """
    live = model_tensors(model)
    _check_names(live.keys(), tensors.keys(), where)
    for name, tensor in live.items():
        if tensor.shape != tensors[name].shape:
            raise StateMismatch(
                f"{where}: {name} has shape {tuple(tensors[name].shape)}, the model {tuple(tensor.shape)}; "
                + _SAME_MODEL
            )
        tensor.copy_(tensors[name])


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state under the names "<parameter>.<key>"; it is empty before the first update.

    AdamW has no state for a parameter that never had a gradient; here this parameter has zeros, which mean the same.
    If the optimizer is sharded, the call is collective and returns all tensors on rank 0 only, with those of other
    ranks in host memory.
    """
    local = local_part(optimizer)
    names, state = _names_in_order(local, model), local.state_dict()["state"]
    is_updated = bool(state) if local is optimizer else max_over_ranks(bool(state)) > 0
    for number, parameter in enumerate(_parameters(local)):
        if is_updated and number not in state:
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            state[number] = {"step": torch.zeros(()), **moments}
    own = {f"{names[number]}.{key}": value for number, values in state.items() for key, value in values.items()}
    return own if local is optimizer else gather_on_main(own, next(model.parameters()).device)


def load_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], where: str
) -> None:
    """Load what `optimizer_tensors` returned, but keep the settings of `optimizer`, which come from the config.

    Without tensors, nothing changes. Raises: StateMismatch if the names differ.
    """
    if not tensors:
        return
    local = local_part(optimizer)
    state: dict[str, dict[str, Tensor]] = {}
    for flat_name, tensor in tensors.items():
        name, _, key = flat_name.rpartition(".")
        state.setdefault(name, {})[key] = tensor
    _check_names(_names_in_order(optimizer, model), state, where, "train")
    own = {number: state[name] for number, name in enumerate(_names_in_order(local, model))}
    # load_state_dict casts each tensor to the device and dtype that this optimizer uses for it.
    local.load_state_dict({"state": own, "param_groups": local.state_dict()["param_groups"]})


def random_state() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the state of all random generators: Python's and numpy's as JSON values, torch's as uint8 tensors."""
    numpy = np.random.get_state(legacy=False)
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    values = {"python": random.getstate(), "numpy": numpy}
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()  # a process trains on the current device only
    return values, tensors


def set_random_state(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Restore the state of all random generators, as `random_state` returned it."""
    version, numbers, gauss = values["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(values["numpy"])
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def _names_in_order(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Return the names of the parameters, in the order in which the optimizer's state numbers the parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in _parameters(optimizer)]


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_names(wanted: Iterable[str], found: Iterable[str], where: str, what: str = "have") -> None:
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unknown:
        parts = [f"lacks {missing[0]}"] if missing else []
        parts += [f"holds {unknown[0]}, which this model does not {what}"] if unknown else []
        raise StateMismatch(f"{where}: {' and '.join(parts)}; {_SAME_MODEL}")
