"""What the profiles call before Snakemake reads an experiment or a profile by itself, and names neither file nor key.

Each function ends the process with one line for what the user can put right.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from implicit_llm_contracts.config.fill import fill
from implicit_llm_contracts.config.values import SOME, Count, Number, Text
from implicit_llm_contracts.errors import ConfigError, UserError
from implicit_llm_contracts.hints import nearest
from implicit_llm_workflow.experiment_files.yaml_files import DEFAULT_EXPERIMENT, experiment_path, read_yaml, shown_path
from implicit_llm_workflow.rules.snakemake_driver import profile_in_use


@dataclass(frozen=True)
class HardwareClass:
    """What the block of profiles/cluster says of a kind of nodes."""

    partition: Text
    constraint: str
    venv: str
    gpus: Number
    cpus: Count
    mem_gb: Count
    setup: str
    container: str = ""


@dataclass(frozen=True)
class RuleUse:
    """Which class does the jobs of a rule, and with what; texts may be expressions of `wildcards`."""

    class_: str
    gpus: Number = 0
    nodes: int | str = 1
    processes: int | str | None = None
    runtime: int | str | None = None
    mem_mb: int | str | None = None
    threads: int | str | None = None
    micro_batch_size: int | str | None = None
    kernels: str | None = None
    gradient_checkpointing: str | None = None
    shard_optimizer: str | None = None
    cuda_graphs: str | None = None


@dataclass(frozen=True)
class OtherJobs:
    partition: Text


@dataclass(frozen=True)
class Site:
    """The block of profiles/cluster that a new site edits."""

    classes: Annotated[dict[str, HardwareClass], SOME]
    other_jobs: OtherJobs
    rules: dict[str, RuleUse]
    account: str = ""


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


def check_config_files() -> None:
    """Read the files of `--configfile` as the commands of the project read them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--configfile", "--configfiles", nargs="+", type=Path, default=[])
    with _in_one_line():
        for path in parser.parse_known_args(sys.argv[1:])[0].configfile or [experiment_path(DEFAULT_EXPERIMENT)]:
            if not path.is_file():
                raise ConfigError(
                    f"{path}: no such config file; --configfile takes every word up to the next option, so type "
                    "targets before it"
                )
            read_yaml(shown_path(path))


def check_site(block: dict[str, Any]) -> None:
    """Look at the values of the block of profiles/cluster, or of the copy of it that is in use."""
    where = f"{str(profile_in_use()).removesuffix('/config.yaml')}/config.yaml"
    with _in_one_line():
        site = fill(Site, block, where)
        for rule, use in site.rules.items():
            if use.class_ not in site.classes:
                hint = nearest(use.class_, site.classes)
                raise ConfigError(f"{where}: rules.{rule}.class: there is no class {use.class_!r}; {hint}")
