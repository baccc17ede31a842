"""Errors that a stage reports in one line, with the exit code of the process."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right: what happened, where, and what to do next, in one line."""

    exit_code = 2


class Preempted(Exception):
    """The stage stopped on request after committing its state; started again it goes on from there."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: the executor starts the same job again
