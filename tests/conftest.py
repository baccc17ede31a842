"""For all tests."""

from __future__ import annotations

# A command that makes data, run in this process by its test, would otherwise leave the package without its models.
import implicit_llm  # noqa: F401
