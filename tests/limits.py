"""Limits of time and of size."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def wait_until(is_so: Callable[[], Any], seconds: float = 120.0) -> Any:
    """What `is_so` returns once it is true; fails when it takes too long."""
    end = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < end, f"not so within {seconds:g} s"
        time.sleep(0.05)
    return found


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """What a disk quota does, for this process."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
