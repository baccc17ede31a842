"""All ranks hold the same weights; when one of them does not, by a fault of its memory, training must not go on."""

from __future__ import annotations

import torch
from torch import nn

from implicit_llm.training.distributed import gather_objects, world_size
from implicit_llm_contracts.runs.errors import UserError


class ReplicasDiffer(UserError):
    """The weights of the ranks are not the same any more."""

    failure_class = "node_fail"


def require_equal_replicas(model: nn.Module, name: str, step: int) -> None:
    """Compare a checksum of the weights over all ranks, before a commit of `step`. Collective.

    Raises: ReplicasDiffer on every rank.
    """
    if world_size() == 1:
        return
    sums = gather_objects(weights_checksum(model))
    others = [str(rank) for rank, found in enumerate(sums) if found != sums[0]]
    if others:
        raise ReplicasDiffer(
            f"train/{name}: after step {step} the weights of rank {', '.join(others)} are not those of rank 0; the "
            "last checkpoint is from before it: start again, and leave out the node if it happens twice"
        )


def weights_checksum(model: nn.Module) -> int:
    """Sum of the bits of all parameters as integers; any single change of a weight changes it."""
    sums = [
        parameter.detach().contiguous().view(torch.int32).sum(dtype=torch.int64) for parameter in model.parameters()
    ]
    return int(torch.stack(sums).sum().item())
