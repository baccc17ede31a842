"""Where the workflow's files lie that stages read by default: the report's templates, the local tasks."""

from __future__ import annotations

from pathlib import Path

_BESIDE = Path(__file__).resolve().parents[2]


def workflow_dir() -> Path:
    """The folder `workflow` of the checkout; of installed packages, the one that the workflow's package carries."""
    checkout = _BESIDE / "workflow"
    return checkout if checkout.is_dir() else _BESIDE / "implicit_llm_workflow" / "project" / "workflow"
