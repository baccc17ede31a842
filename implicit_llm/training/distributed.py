"""Synchronise the processes of one job; a single process exchanges nothing. All must call the collective functions."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.launched import WORLD_VARIABLE

JOIN_TIMEOUT = timedelta(seconds=300)  # how long a process waits for the last one, which must import torch first


class WrongWorld(UserError):
    """The number of processes is not the requested one, they did not join in time, or some have no GPU."""

    failure_class = "env"


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process among those that train together."""
    return dist.get_rank() if world_size() > 1 else 0


def is_main() -> bool:
    """Return whether this process writes the results."""
    return rank() == 0


def join_world(device_type: str) -> torch.device:
    """Join the process group if the launcher or torchrun started several processes; return the device of this process.

    Gloo exchanges numbers in host memory; with NCCL, the host would wait for all work of its GPU each time.
    Raises: WrongWorld if the processes do not join in time, if their number is not the requested one, or if a node
        has more processes than visible GPUs.
    """
    has_gpu = device_type == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device(device_type)
    if has_gpu:
        processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if processes > gpus:
            raise WrongWorld(
                f"{processes} processes on this node and {gpus} visible GPUs; ask Slurm for a GPU each (resource "
                f"'gpus' of the rule): {_shown_variables()}"
            )
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        try:
            store, number, size = next(dist.rendezvous("env://", timeout=JOIN_TIMEOUT))
        except dist.DistError as error:
            raise WrongWorld(
                f"the processes did not come together ({type(error).__name__}); see that all nodes can reach "
                f"{os.environ.get('MASTER_ADDR')}: {_shown_variables()}"
            ) from error
        backend, device_id = ("cpu:gloo,cuda:nccl", device) if has_gpu else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=number, world_size=size, device_id=device_id)
    wanted = int(os.environ.get(WORLD_VARIABLE, world_size()))
    if wanted != world_size():
        raise WrongWorld(
            f"{wanted} processes were asked for, {world_size()} train together; give the rule the nodes and gpus of "
            f"the allocation: {_shown_variables()}"
        )
    return device


def _shown_variables() -> str:
    names = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    found = [name for name in sorted(os.environ) if name.startswith("SLURM_") or name in names]
    return " ".join(f"{name}={os.environ[name]}" for name in found)


def _reduced(tensor: Tensor, op: Any) -> Tensor:
    if world_size() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor, op=op)
    return tensor


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """Return the mean of the tensors of all ranks. Collective."""
    return _reduced(tensor, dist.ReduceOp.SUM) / world_size()


def max_tensor_over_ranks(tensor: Tensor) -> Tensor:
    """Return the elementwise maximum of the tensors of all ranks, on the device of `tensor`. Collective."""
    return _reduced(tensor, dist.ReduceOp.MAX)


def total_over_ranks(number: int) -> int:
    """Return the sum of the numbers of all ranks. Collective."""
    return int(_reduced(torch.tensor(number), dist.ReduceOp.SUM))


def max_over_ranks(number: int) -> int:
    """Return the largest number of all ranks, so that all follow the request of one at the same step. Collective."""
    return int(max_tensor_over_ranks(torch.tensor(number)))


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks in the order of the ranks. Collective."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_on_main(own: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of all ranks by name on rank 0; any other rank gets only its own tensors. Collective.

    Tensors are sent one at a time through `device`; rank 0 stores those of other ranks in host memory.
    """
    found = dict(own)
    layouts = gather_objects({name: (tensor.shape, tensor.dtype) for name, tensor in own.items()})
    for owner, layout in enumerate(layouts[1:], start=1):
        for name, (shape, dtype) in layout.items():
            if rank() == owner:
                dist.send(own[name].to(device), 0)
            elif is_main():
                received = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(received, owner)
                found[name] = received.cpu()
    return found


def wait_for_all() -> None:
    """Wait until every rank has called this function. Collective."""
    if world_size() > 1:
        dist.barrier()


class ReplicasDiffer(UserError):
    """The weights of the ranks differ."""

    failure_class = "node_fail"


def require_equal_replicas(model: nn.Module, name: str, step: int) -> None:
    """Compare a checksum of the weights over all ranks before `step` is committed. Collective.

    Raises: ReplicasDiffer on every rank if the checksums differ.
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
    """Return the sum of all fp32 weights, each read as a 32-bit integer; a change of one weight changes the sum."""
    sums = [
        parameter.detach().contiguous().view(torch.int32).sum(dtype=torch.int64) for parameter in model.parameters()
    ]
    return int(torch.stack(sums).sum().item())
