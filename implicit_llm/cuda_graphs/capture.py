"""Record work on a GPU as a CUDA graph, which starts thousands of small kernels by one call."""

from collections.abc import Callable
from typing import Any

import torch

_WARM_UPS = 2  # eager runs before a capture, in which kernels are compiled and memory is allocated


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype in which autocast computes, or None if it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class CaptureFailed(RuntimeError):
    """The work could not be recorded, for example because memory is short or a graph cannot contain an operation."""


class Recorder:
    """A recorder of the parts of one computation; all parts share one pool of memory for temporary tensors.

    A part has no arguments and no result: it reads and writes tensors at fixed addresses. A tensor that the part
    allocates also keeps its address as long as a reference to the tensor is stored, and each replay overwrites it.
    """

    def __init__(self, autocast: torch.dtype | None) -> None:
        self._autocast = autocast
        self._pool: Any = None

    def capture(self, part: Callable[[], None], rehearsal: Callable[[], None] | None = None) -> torch.cuda.CUDAGraph:
        """Run `part` eagerly, record it, and replay it once, so that its tensors have values; return the graph.

        rehearsal: runs eagerly in place of a collective `part`, which is then recorded but not replayed.
        The random state of the device does not change. Raises: CaptureFailed.
        """
        try:
            return self._capture(part, rehearsal)
        except RuntimeError as error:
            raise CaptureFailed((str(error).splitlines() or [type(error).__name__])[0]) from error

    def _capture(self, part: Callable[[], None], rehearsal: Callable[[], None] | None) -> torch.cuda.CUDAGraph:
        random_state = torch.cuda.get_rng_state()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # Autocast's cache is off, because weights that were cast outside of the graph would never be cast again.
        with torch.autocast("cuda", dtype=self._autocast, enabled=self._autocast is not None, cache_enabled=False):
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    (rehearsal or part)()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.empty_cache()  # the graph cannot use the memory of the warm-ups
            with torch.cuda.graph(graph, pool=self._pool):
                part()
        self._pool = graph.pool()
        if rehearsal is None:
            graph.replay()
        torch.cuda.set_rng_state(random_state)
        return graph
