"""For all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# A command that makes data, run in this process by its test, would otherwise leave the package without its models.
import implicit_llm  # noqa: F401
from implicit_llm_contracts.runs import faults


@pytest.fixture(autouse=True)
def _fault_points_count_from_zero() -> None:
    """A test that forks hands its count of passages on, and with it those of the tests before."""
    faults.reset()


@pytest.fixture(autouse=True)
def _environment_as_found() -> Iterator[None]:
    """Commands that a test runs in this process set variables for theirs, such as the tracking server."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
