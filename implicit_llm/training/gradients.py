"""Sum the gradients of all ranks in buckets, while the backward pass still computes other gradients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel

from implicit_llm.models.causal_lm import ImplicitForCausalLM
from implicit_llm.training.distributed import max_over_ranks

# This default of DDP uses the network's full bandwidth, and the first bucket is complete early.
BUCKET_BYTES = 25 * 2**20


class GradientReducer:
    """An object that sums the gradients of a model's parameters over ranks.

    All ranks send the same buckets in the same order, whichever bucket is complete first. A rank whose solver failed
    does so too, although its backward pass differentiates another function.
    dtype: the dtype in which gradients are sent and summed.
    is_done: whether a CUDA graph has already summed the gradients of this step.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Copy the weights and buffers of rank 0 to all ranks. The call is collective."""
        self.is_done = False
        self._dtype = dtype
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buckets = _buckets(self._parameters, _order(model, self._parameters), bucket_bytes)
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        for bucket in self._buckets:  # connect the ranks here, because NCCL must not do so while a graph is captured
            size = sum(self._parameters[position].numel() for position in bucket)
            dist.all_reduce(torch.zeros(size, dtype=dtype, device=self._parameters[0].device))

    @contextmanager
    def over_ranks(self, leaves: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Sum the gradients of `leaves` over all ranks while a backward pass in this context computes them. Collective.

        Gradients that accumulated before are included, and a missing gradient counts as zero.
        leaves: one tensor for each trained parameter, in the same order; None means the parameters themselves. With
            None and `is_done`, the call only sets `is_done` to False.
        """
        if leaves is None and self.is_done:
            self.is_done = False
            yield
            return
        leaves = self._parameters if leaves is None else leaves
        backward = _Backward([[leaves[position] for position in bucket] for bucket in self._buckets], self._dtype)
        yield
        backward.finish()

    def is_true_anywhere(self, is_true: bool) -> bool:
        """Return whether `is_true` is true on any rank. The call is collective."""
        return max_over_ranks(int(is_true)) > 0


class _Backward:
    """A backward pass whose gradients are sent bucket by bucket as soon as they are complete."""

    def __init__(self, buckets: list[list[Tensor]], dtype: torch.dtype) -> None:
        self._buckets, self._dtype = buckets, dtype
        self._num_missing = [len(bucket) for bucket in buckets]
        self._sent: list[tuple[Tensor, dist.Work]] = []
        # If several evaluations of f use a weight, its hook runs once, after their gradients have been summed.
        self._hooks = [
            leaf.register_post_accumulate_grad_hook(partial(self._complete, number))
            for number, bucket in enumerate(buckets)
            for leaf in bucket
        ]

    def finish(self) -> None:
        """Send the remaining buckets, and replace the gradients by their sums over all ranks."""
        for hook in self._hooks:
            hook.remove()
        while len(self._sent) < len(self._buckets):
            self._send()
        for bucket, (flat, work) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            sums = flat.float().split([leaf.numel() for leaf in bucket])
            for leaf, found in zip(bucket, sums, strict=True):
                leaf.grad = found.view_as(leaf).to(leaf.dtype)

    def _complete(self, number: int, leaf: Tensor) -> None:
        self._num_missing[number] -= 1
        while len(self._sent) < len(self._buckets) and self._num_missing[len(self._sent)] == 0:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in bucket]
        flat = torch.cat([gradient.flatten() for gradient in gradients]).to(self._dtype)
        for leaf in bucket:
            leaf.grad = None  # this frees the memory of the gradient
        self._sent.append((flat, dist.all_reduce(flat, async_op=True)))


def _order(model: PreTrainedModel, parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return the positions of `parameters`, roughly in the order in which a backward pass completes their gradients.

    The order is from the last layer to the first; the injection is at the end, because every layer uses it.
    """
    late: set[int] = set()
    if isinstance(model, ImplicitForCausalLM) and model.config.is_implicit:
        late = {id(parameter) for parameter in model.base.injection.parameters()}
    return sorted(range(len(parameters)), key=lambda position: (id(parameters[position]) in late, -position))


def _buckets(parameters: Sequence[nn.Parameter], order: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Split `order` into buckets of at most `bucket_bytes`; a larger parameter has a bucket of its own."""
    buckets: list[list[int]] = []
    room = 0
    for position in order:
        room -= parameters[position].nbytes
        if room < 0:
            buckets.append([])
            room = bucket_bytes - parameters[position].nbytes
        buckets[-1].append(position)
    return buckets
