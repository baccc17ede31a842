"""Collect the uses of Snakemake that have no documented interface; other modules only query the rules of a workflow.

All names that these functions use are public, except for argparse's list of options. A Snakefile cannot see the
requested targets, so the command line is parsed once more. tests/workflow/test_snakemake_internals.py fails if a
release of Snakemake breaks one of these functions.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

# Options with which Snakemake does something other than making results.
_OTHER_CALLS = (
    "archive", "cleanup_metadata", "cleanup_shadow", "conda_cleanup_envs", "conda_create_envs_only",
    "container_cleanup_images", "containerize", "d3dag", "dag", "delete_all_output", "delete_temp_output",
    "detailed_summary", "filegraph", "generate_unit_tests", "lint", "list_changes", "list_conda_envs",
    "list_input_changes", "list_params_changes", "list_rules", "list_target_rules", "list_untracked",
    "print_compilation", "report", "reporter", "rulegraph", "summary", "unlock",
)  # fmt: skip


def command_line() -> argparse.Namespace:
    """Return the arguments after `snakemake` as its own parser reads them, without the profiles."""
    from snakemake.cli import get_argument_parser

    return get_argument_parser().parse_known_args(sys.argv[1:])[0]


def profile_in_use() -> str | None:
    """Return the profile of this call of Snakemake or of its environment, the last one of several; None without one."""
    return (command_line().profile or [None])[-1]


def profile_file(profile: str) -> Path | None:
    """Return the file of a profile that is given by its folder or its name; None if Snakemake finds no such profile."""
    from snakemake.cli import get_profile_dir

    found = get_profile_dir(profile)
    return None if found is None else found[1]


def read_profile(profile: str, path: Path) -> tuple[set[str], set[str], str | None]:
    """Return the names of all options, the names of the options that this profile sets, and Snakemake's error or None.

    With an error, the second set is empty. `profile` is the name as given in the call, `path` its file. Code that the
    profile itself calls may end the process.
    """
    from snakemake.cli import get_argument_parser
    from snakemake.profiles import ProfileConfigFileParser

    parser = get_argument_parser([profile])
    words = {word for action in parser._actions for word in action.option_strings}
    names = {word.removeprefix("--") for word in words if word.startswith("--")}
    try:
        with path.open(encoding="utf-8") as stream:
            taken = set(ProfileConfigFileParser().parse(stream))
    except Exception as error:  # the parser of profiles documents no type
        return names, set(), " ".join(str(error).split())
    refusal = _refusal(parser, [])
    return names, taken if refusal is None else set(), refusal


def _refusal(parser: argparse.ArgumentParser, words: list[str]) -> str | None:
    """Return Snakemake's error about these arguments and the profiles of its parser, in one line; None without one."""
    said = StringIO()
    try:
        with redirect_stderr(said):
            parser.parse_args(words)
    except SystemExit:
        if not said.getvalue():
            raise
        return said.getvalue().strip().splitlines()[-1].partition("error: ")[2]
    except Exception as error:  # each option has its own parser, which may raise any type
        return " ".join(str(error).split())
    return None


def refused_options(words: list[str]) -> str | None:
    """Return why Snakemake does not accept these options, with their forms such as NAME=INT; None if it does.

    `--help` and `--version` print their text and end the process.
    """
    from snakemake.cli import get_argument_parser

    parser = get_argument_parser()
    if (reason := _refusal(parser, words)) is None:
        return None
    typed = {word.partition("=")[0] for word in words}
    forms = [f"{action.option_strings[0]} {action.metavar}" for action in parser._actions
             if typed & set(action.option_strings) and "=" in str(action.metavar)]  # fmt: skip
    return f"{reason}; type {' or '.join(forms)}" if forms else f"{reason}; `snakemake --help` lists its options"


def is_config(word: str) -> bool:
    """Return whether Snakemake accepts `word` as one of `--config`."""
    from snakemake.cli import parse_config

    try:
        parse_config([word])
    except ValueError:
        return False
    return True


def does_run_jobs(workflow: Any, call: argparse.Namespace) -> bool:
    """Return whether this call of Snakemake runs jobs instead of only inspecting them."""
    is_other = any(getattr(call, name, None) for name in _OTHER_CALLS)
    return not (workflow.output_settings.dryrun or (is_other and not getattr(call, "report_after_run", False)))


def forced_outputs(workflow: Any, call: argparse.Namespace, outputs: set[str]) -> set[str]:
    """Return those of `outputs` that `-R`, `-f` and `-F` force, by rule or by file."""
    words = {*call.forcerun, *(call.targets if call.force else ())}
    if call.forceall or not words:
        return outputs if call.forceall else set()
    rules = [workflow.get_rule(word) for word in words if workflow.is_rule(word)]
    files = {os.path.normpath(word) for word in words}
    return {path for path in outputs if path in files or any(rule.is_producer(path) for rule in rules)}


def outputs_to_make(workflow: Any) -> set[str]:
    """Return the outputs of the jobs that will run; call it after Snakemake has chosen these jobs."""
    return {str(path) for job in workflow.dag.needrun_jobs() for path in job.output}


def resource_of(workflow: Any, rule: str, name: str) -> str | None:
    """Return a text resource of a rule as the profile in use sets it, without quotes; None if it is not set."""
    found = workflow.get_rule(rule).resources.get(name)
    return str(getattr(found, "raw", found) or "").strip("'\"") or None


def give_config_file(workflow: Any, path: Path) -> None:
    """Let all jobs that start later read this config file instead of the config files of this call."""
    workflow.config_settings.configfiles = [path.resolve()]


def settings_of_rules(workflow: Any) -> Iterator[tuple[str, str | None, str, Any]]:
    """Yield option, rule (None for all rules), resource and value, as written, of all settings for rules.

    The settings are those of the profile and of the command line.
    """
    settings = workflow.resource_settings
    for rule, found in settings.overwrite_threads.items():
        yield "set-threads", rule, "threads", _as_written(found)
    for rule, resources in settings.overwrite_resources.items():
        for name, found in resources.items():
            yield "set-resources", rule, name, _as_written(found)
    defaults = settings.default_resources or {}
    if hasattr(defaults, "args"):  # in older releases of Snakemake
        defaults = dict(word.split("=", 1) for word in defaults.args)
    for name, found in defaults.items():
        if (value := _as_written(found)) is not None:  # Snakemake's own defaults can be None
            yield "default-resources", None, name, value


def _as_written(found: Any) -> Any:
    return getattr(found, "raw", getattr(found, "orig_arg", found))


def starts_jobs_here(call: argparse.Namespace) -> bool:
    """Return whether the jobs of this call run on this machine."""
    return executor_in_use() == "local" and not call.touch


def executor_in_use() -> str:
    """Return the executor of this call, as the command line and its profiles select it."""
    from snakemake.cli import parse_args

    with redirect_stderr(StringIO()):  # parse_args prints the profiles again
        return parse_args(sys.argv[1:])[1].executor or "local"
