"""Define the errors that a stage reports in one line, with their exit codes and failure classes."""

import errno
import re

_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)


class UserError(Exception):
    """An error that the user can fix; its message states in one line what happened, where, and what to do next."""

    exit_code = 2
    failure_class = "user"


class ConfigError(UserError):
    """A configuration file, or a key or value in it, is wrong; the message names it."""


class InvalidValue(UserError, ValueError):
    """A configuration has a wrong value; the message begins with the key, if exactly one key is wrong."""


def refuse_if(is_wrong: object, problem: str) -> None:
    """Raise InvalidValue with the message `problem` if `is_wrong` is true; `fill` adds the place to the message."""
    if is_wrong:
        raise InvalidValue(problem)


class Preempted(Exception):
    """The stage stopped on request after it had committed its state; the next start resumes from this state."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h, after which the executor starts the same job again
    failure_class = "preempted"


_OUT_OF_MEMORY = re.compile(  # messages of torch, Triton and drivers ("out of memory"), torch's CPU allocator, cuBLAS
    r"\bout of memory\b|DefaultCPUAllocator: can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the memory of an accelerator or of the machine ran out.

    Triton and the drivers raise a RuntimeError in this case, which only its message identifies.
    """
    is_torchs = type(error).__name__ == "OutOfMemoryError"  # the name is enough, so torch is not imported
    is_said = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    return is_torchs or isinstance(error, MemoryError) or is_said


def failure_class_of(error: BaseException) -> str | None:
    """Return the class of a failure, which decides whether the job is retried: "oom", "quota", "bug" and others.

    Return None for KeyboardInterrupt and SystemExit, except for SystemExit(75), which is "preempted".
    """
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return "preempted" if getattr(error, "code", None) == Preempted.exit_code else None
    if is_out_of_memory(error):
        return "oom"
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return "quota"
    found: str | None = getattr(error, "failure_class", "bug")
    return found
