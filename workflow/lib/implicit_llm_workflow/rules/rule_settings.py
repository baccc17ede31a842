"""What a profile or the command line sets for rules, of which Snakemake checks neither names nor values."""

import ast
import re
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin, get_type_hints

from implicit_llm_contracts.config.training import Runtime
from implicit_llm_contracts.errors import ConfigError
from implicit_llm_contracts.hints import nearest
from implicit_llm_workflow.rules.snakemake_internals import executor_in_use, settings_of_rules
from implicit_llm_workflow.rules.snakemake_rules import HARDWARE
from snakemake_executor_plugin_submitit.request import NUMBERS, SNAKEMAKES, UNDERSTOOD

_READ = re.compile(r"\bresources\.(\w+)")
_EXECUTORS = ("local", "touch", "dryrun", "submitit")  # those of other plugins may read further resources
_OPTIONS = get_type_hints(Runtime)  # our rules pass them on by their names
_NUMBERS = NUMBERS | {"threads", "processes_per_node", "batch_size", "disk_mb"}
_WORD = re.compile(r"(['\"]?)([A-Za-z_][\w.-]*|)\1")  # no number and no expression


def check_rule_settings(workflow: Any, profile: str | None) -> None:
    """Raises: ConfigError for a rule that is not there, a resource that nothing reads, or a value that is not taken."""
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
    """What may be given for a resource, if this value may not; expressions are left to Snakemake, job by job."""
    text, hint = str(value), _OPTIONS.get(name)
    with suppress(ValueError, SyntaxError):  # of an expression or a word
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
