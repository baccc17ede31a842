"""Errors that a stage reports in one line, with the exit code of the process and the class of the failure."""

import errno

_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)


class UserError(Exception):
    """Something the user can put right: what happened, where, and what to do next, in one line."""

    exit_code = 2
    failure_class = "user"


class ConfigError(UserError):
    """A configuration file, or a key or value in it, is wrong; the message names it."""


class InvalidValue(UserError, ValueError):
    """A value of a configuration is out of range; the message begins with its key."""


def refuse_if(is_wrong: object, problem: str) -> None:
    """Check a configuration that validates itself. Raises: InvalidValue, whose place `fill` adds."""
    if is_wrong:
        raise InvalidValue(problem)


class Preempted(Exception):
    """The stage stopped on request after committing its state; started again it goes on from there."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: the executor starts the same job again
    failure_class = "preempted"


def failure_class_of(error: BaseException) -> str | None:
    """The class of a failure, by which it is decided whether to start again; None when it is not known."""
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return "preempted" if getattr(error, "code", None) == Preempted.exit_code else None
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported
        return "oom"
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return "quota"
    found: str | None = getattr(error, "failure_class", "bug")
    return found
