"""What the profiles call before Snakemake reads an experiment or a profile by itself, and names neither file nor key.

Each function ends the process with one line for what the user can put right.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from implicit_llm_contracts.errors import ConfigError, UserError
from implicit_llm_contracts.hints import nearest
from implicit_llm_workflow.experiment_files.yaml_files import DEFAULT_EXPERIMENT, experiment_path, read_yaml, shown_path
from implicit_llm_workflow.rules.snakemake_driver import profile_in_use, profiles_in_use
from implicit_llm_workflow.rules.snakemake_internals import profile_file, read_profile
from implicit_llm_workflow.site import fill_site


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


def check_profile() -> None:
    """Check the options in the profiles of this call: Snakemake ignores some, and shows its whole usage for others."""
    for profile in profiles_in_use():
        if (path := profile_file(profile)) is None:  # none, which Snakemake knows too
            continue
        with _in_one_line():
            written = [key for key in read_yaml(path) if not key.startswith(_TEMPLATE)]
            names, taken, refusal = read_profile(profile, path)
            for key in written:
                if key not in names:
                    raise ConfigError(f"{path}: Snakemake has no option '{key}'; {nearest(key, names)}")
                if refusal is None and key not in taken:
                    raise ConfigError(f"{path}: {key}: its value would have no effect; give one of the option's kind")
            if refusal is not None:
                raise ConfigError(f"{path}: {refusal}")
            if "set-resources" in taken and any(word.split("=")[0] == "--set-resources" for word in sys.argv):
                raise ConfigError(f"{path}: --set-resources would replace all that it sets for rules; edit it instead")


_TEMPLATE = ("?", "__")  # keys of the template language begin so
# Names of the template language, beside the keys of the block.
_OTHER_NAMES = ("doc", "this", "SKIP", "check_site")


def check_site(names: dict[str, Any]) -> None:
    """Check the block of profiles/cluster, or of the copy of it that is in use; `names` is where its keys end up."""
    block = {name: value for name, value in names.items() if name not in _OTHER_NAMES and not name.startswith("_")}
    where = f"{str(profile_in_use()).removesuffix('/config.yaml')}/config.yaml"
    with _in_one_line():
        fill_site(block, where)
