"""Check that a job which waited in a queue runs the code that it was planned with."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.planning.code_digest import JobCode, job_digest, job_sources, possible_codes


class CodeChanged(UserError):
    """The code on disk is not the code with which the job was planned."""


def require_submitted_code(module: str, code: str, name: str, plugins: tuple[str, ...] = ()) -> None:
    """Load all code that the stage's module can run, then check that one of its digests is the identity's.

    In this order, and with what is imported inside functions: an edit after the comparison reaches the process no more.
    Raises: CodeChanged, before anything of the job has begun.
    """
    for source in job_sources(JobCode(module, plugins=plugins)):
        if source not in sys.modules:
            with suppress(Exception):  # kernels for another device, say: what cannot be loaded here is not run here
                importlib.import_module(source)
    if code not in map(job_digest, possible_codes(module, plugins)):
        raise CodeChanged(
            f"{name}: the code was changed since the job was planned (digest {code[:12]} then); run the workflow again "
            "to plan with this code, or bring the old code back to resume from what was saved"
        )
