"""Recording work on a GPU as a CUDA graph: thousands of small kernels that are then started by one call."""

from collections.abc import Callable
from typing import Any

import torch

_WARM_UPS = 2  # eager runs before a capture, in which kernels compile and allocators settle


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return what autocast computes in; None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class CaptureFailed(RuntimeError):
    """Work could not be recorded: not enough memory, or something in it that graphs cannot hold."""


class Recorder:
    """Captures parts of one computation, which share the memory of what lives only within a part.

    A part takes nothing and returns nothing: it reads and writes tensors that stay where they are. What it allocates
    and keeps a reference to stays as well, and is written anew by each replay.
    """

    def __init__(self, autocast: torch.dtype | None) -> None:
        self._autocast = autocast
        self._pool: Any = None

    def capture(self, part: Callable[[], None], rehearsal: Callable[[], None] | None = None) -> torch.cuda.CUDAGraph:
        """Run `part` eagerly, record it, and replay it once, so that what it writes holds values.

        rehearsal: runs instead of a part that other processes take part in; that part is only recorded.
        The random state of the device stays as it was. Raises: CaptureFailed.
        """
        try:
            return self._capture(part, rehearsal)
        except RuntimeError as error:
            raise CaptureFailed((str(error).splitlines() or [type(error).__name__])[0]) from error

    def _capture(self, part: Callable[[], None], rehearsal: Callable[[], None] | None) -> torch.cuda.CUDAGraph:
        random_state = torch.cuda.get_rng_state()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # Without autocast's cache: weights that it cast outside of the graph would never be cast again.
        with torch.autocast("cuda", dtype=self._autocast, enabled=self._autocast is not None, cache_enabled=False):
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    (rehearsal or part)()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.empty_cache()  # the warm-ups' memory cannot be used by the graph
            with torch.cuda.graph(graph, pool=self._pool):
                part()
        self._pool = graph.pool()
        if rehearsal is None:
            graph.replay()
        torch.cuda.set_rng_state(random_state)
        return graph
