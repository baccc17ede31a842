"""Tells the jobs which invocation of Snakemake they belong to, so that they can tell MLflow."""

import argparse
import getpass
import json
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from implicit_llm_jobs.provenance import git_state
from implicit_llm_jobs.tracking.tracked_run import VARIABLE, Invocation

COMMAND_CHARS = 2000


def announce(arguments: Sequence[str] = sys.argv, environment: MutableMapping[str, str] = os.environ) -> None:
    """Describe this invocation in a variable that all its jobs inherit, those on Slurm included.

    A job that a later driver takes over keeps what it has inherited. Call it in the main process only: a job that
    Snakemake starts in a process of its own reads the Snakefile too.
    """
    words = [Path(arguments[0]).name, *arguments[1:]]
    started, command = datetime.now(UTC).isoformat(timespec="seconds"), shlex.join(words)[:COMMAND_CHARS]
    about = Invocation(secrets.token_hex(8), started, command, (git_state() or {}).get("commit"), _user())
    environment[VARIABLE] = json.dumps(asdict(about))


def profile_in_use(arguments: Sequence[str] = sys.argv, environment: Mapping[str, str] = os.environ) -> str | None:
    """The profile of this call of Snakemake, which does not tell its Snakefile."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--profile", default=environment.get("SNAKEMAKE_PROFILE"))
    return parser.parse_known_args(arguments[1:])[0].profile


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # of a container without a name for its user
        return None
