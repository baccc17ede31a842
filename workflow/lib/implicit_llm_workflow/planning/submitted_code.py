"""A job that waited runs the code that its identity speaks of, or not at all."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.planning.code_digest import module_digest, stage_sources


class CodeChanged(UserError):
    """The code on disk is not the code with which the job was planned."""


def require_submitted_code(module: str, code: str, name: str) -> None:
    """Load all code that the result of the stage's module depends on, then compare its digest with the identity's.

    In this order, and with what is imported inside functions: an edit after the comparison reaches the process no more.
    Raises: CodeChanged, before anything of the job has begun.
    """
    for source in stage_sources(module):
        if source not in sys.modules:
            with suppress(Exception):  # kernels for another device, say: what cannot be loaded here is not run here
                importlib.import_module(source)
    found = module_digest(module)
    if found != code:
        raise CodeChanged(
            f"{name}: the code was changed since the job was planned (digest {code[:12]} then, {found[:12]} now); run "
            "the workflow again to plan with this code, or bring the old code back to go on from what was saved"
        )
