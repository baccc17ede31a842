"""Errors that tell the user in one line what is wrong."""

from typing import Any

import pytest

from implicit_llm_contracts.errors import UserError


def refused(message: str, error: type[Exception] | tuple[type[Exception], ...] = UserError) -> Any:
    """For `with`: the block raises this error, whose one line matches `message`."""
    return pytest.raises(error, match=rf"\A.*(?:{message}).*\Z")
