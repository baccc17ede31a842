"""Check config files and profiles for mistakes that Snakemake ignores, or reports without file and key.

Code in the profiles calls the functions that need no rules, before Snakemake itself reads an experiment or a profile.
After a mistake that the user can fix, these functions print one line and end the process.
"""

import ast
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from implicit_llm_contracts.config.training import Runtime
from implicit_llm_contracts.errors import ConfigError, UserError
from implicit_llm_contracts.hints import nearest
from implicit_llm_workflow.experiment_files.yaml_files import DEFAULT_EXPERIMENT, experiment_path, read_yaml, shown_path
from implicit_llm_workflow.rules.snakemake_internals import (
    command_line,
    executor_in_use,
    is_config,
    profile_file,
    profile_in_use,
    read_profile,
    settings_of_rules,
)
from implicit_llm_workflow.rules.snakemake_rules import HARDWARE
from implicit_llm_workflow.site import fill_site
from snakemake_executor_plugin_submitit.request import NUMBERS, SNAKEMAKES, UNDERSTOOD

_READ = re.compile(r"\bresources\.(\w+)")
_EXECUTORS = ("local", "touch", "dryrun", "submitit")  # executors of other plugins may read further resources
_OPTIONS = get_type_hints(Runtime)  # our rules pass resources with these names to `implicit-llm train`
_NUMBERS = NUMBERS | {"threads", "processes_per_node", "batch_size", "disk_mb"}
_WORD = re.compile(r"(['\"]?)([A-Za-z_][\w.-]*|)\1")  # neither a number nor an expression


@contextmanager
def errors_in_one_line(say: Callable[[str], object]) -> Iterator[None]:
    """End the process after a UserError or an interrupt, with one line by `say`; Snakemake would print a traceback."""
    try:
        yield
    except UserError as error:
        say(f"error: {' '.join(str(error).split())}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        say("interrupted before the first job")
        sys.exit(128 + signal.SIGINT)


def check_config_files() -> None:
    """Read the files of `--configfile`, or else the default experiment, to report errors in one line.

    A word of `--config` that is no KEY=VALUE is refused too, for which Snakemake would print a traceback.
    """
    with errors_in_one_line(_say):
        for word in command_line().config or ():
            if not is_config(word):
                raise ConfigError(
                    f"command line: --config: {word} is no KEY=VALUE with a key of two letters or more; type --config "
                    "KEY=VALUE, or --configfile FILE for an experiment, with targets before it"
                )
        for path in command_line().configfile or [experiment_path(DEFAULT_EXPERIMENT)]:
            if not path.is_file():
                raise ConfigError(
                    f"{path}: no such config file; --configfile takes every word up to the next option, so type "
                    "targets before it"
                )
            read_yaml(shown_path(path))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def check_profile() -> None:
    """Check the options in the profiles of this call; Snakemake ignores some mistakes or only prints its usage."""
    with errors_in_one_line(_say):
        for profile in command_line().profile or ():
            if (path := profile_file(profile)) is not None:  # otherwise Snakemake reports the missing file
                _check_options(profile, path)


def _check_options(profile: str, path: Path) -> None:
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


_TEMPLATE = ("?", "__")  # prefixes of the keys of YTE, the template language of profiles
# The variables of a profile that are no keys of its block: those of YTE, and the function that the profile imports.
_OTHER_NAMES = ("doc", "this", "SKIP", "check_site")


def check_site(names: dict[str, Any]) -> None:
    """Check the block `__variables__` of the profile in use, which is profiles/cluster or a copy of it.

    `names`: the variables of the profile, which include the keys of the block. A mistake ends the process.
    """
    block = {name: value for name, value in names.items() if name not in _OTHER_NAMES and not name.startswith("_")}
    where = f"{str(profile_in_use()).removesuffix('/config.yaml')}/config.yaml"
    with errors_in_one_line(_say):
        fill_site(block, where)


def check_rule_settings(workflow: Any, profile: str | None) -> None:
    """Check the settings for rules in the profile and on the command line.

    Raises: ConfigError for an unknown rule, a resource that nothing reads, or a value that is not allowed.
    """
    where = profile or "command line"
    rules = {rule.name for rule in workflow.rules}
    asked = {name for rule in workflow.rules for name in rule.resources} | UNDERSTOOD
    read = {name for rule in workflow.rules for name in _READ.findall(str(rule.shellcmd))}
    known = {HARDWARE, "threads", *read, *UNDERSTOOD, *workflow.global_resources}
    for option, rule, name, value in settings_of_rules(workflow):
        at = f"{where}: {option}" if rule is None else f"{where}: {option}.{rule}"
        if rule is not None and rule not in rules:
            raise ConfigError(f"{where}: {option}: there is no rule {rule!r}; {nearest(rule, rules)}")
        if name not in known | SNAKEMAKES and executor_in_use() in _EXECUTORS:
            raise ConfigError(f"{at}: nothing reads the resource {name!r}; {nearest(name, known)}")
        if allowed := not_taken(name, value):
            at = at if name == "threads" else f"{at}.{name}"
            raise ConfigError(f"{at}: {value!s:.60} is not allowed; give {allowed}")
    for name in workflow.global_resources:
        if name not in asked | SNAKEMAKES:
            raise ConfigError(f"{where}: resources: no rule asks for {name!r}; {nearest(name, asked)}")


def not_taken(name: str, value: Any) -> str | None:
    """Return a text about the allowed values of resource `name` if `value` is not allowed, else None.

    Expressions are accepted here, because Snakemake checks them.
    """
    text, hint = str(value), _OPTIONS.get(name)
    with suppress(ValueError, SyntaxError):  # an expression or a plain text raises them
        if not isinstance(ast.literal_eval(text), str | int | float):
            return "one number or text"
    word = _WORD.fullmatch(text)
    choices = ("on", "off") if hint is bool else get_args(hint) if get_origin(hint) is Literal else ()
    if choices:
        is_taken = word is None or word[2] in choices
        return None if is_taken else f"one of {', '.join(map(repr, choices))}, in quotes"
    least = 1 if name == "threads" else 0
    is_wrong = word is not None if isinstance(value, str) else isinstance(value, int) and value < least
    return f"a whole number of at least {least}" if is_wrong and (hint or name in _NUMBERS) else None
