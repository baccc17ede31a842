"""The modes of an evaluation by hand, from options of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from implicit_llm_contracts.hints import nearest
from implicit_llm_workflow.commands.job import OptionError

DEFAULT_MODE = "blockwise"
# What a mode of this name is solved by; "published" is also the name of a stopping rule, which the job knows.
EVAL_MODES = {
    "blockwise": "blockwise",
    "simultaneous": "simultaneous",
    "sequential": "sequential",
    "published": "simultaneous",
}
STOPS = ("sequence", "token", "batch")
_FIELDS = {"max_iter": "eval_max_iter", "tol": "eval_tol", "stop": "eval_stop", "max_samples": "max_samples"}
_SWEPT = {"max-iter": ("eval_max_iter", int), "tol": ("eval_tol", float)}


def parse_modes(options: Mapping[str, Any], default: Sequence[str]) -> list[dict[str, Any]]:
    """As an experiment file has them, those of `default` if none is named; the settings given apply to every mode.

    Raises: OptionError.
    """
    names = list(options["mode"] or default)
    for name in names:
        if name not in EVAL_MODES:
            raise OptionError(f"--mode: there is no mode {name!r}; {nearest(name, EVAL_MODES)}")
    if len(set(names)) < len(names):
        raise OptionError(f"--mode: {', '.join(names)} names a mode twice; remove one")
    if options["stop"] and options["stop"] not in STOPS:
        raise OptionError(f"--stop: {options['stop']!r} is no stopping rule; {nearest(options['stop'], STOPS)}")
    if options["block_len"] and "blockwise" not in names:
        raise OptionError("--block-len: is for the mode blockwise; add --mode blockwise, or leave it out")
    shared = {field: options[key] for key, field in _FIELDS.items() if options[key]}
    modes = [{"name": name, "eval_mode": EVAL_MODES[name], **shared} for name in names]
    for mode in modes:
        if options["block_len"] and mode["name"] == "blockwise":
            mode["eval_block_len"] = options["block_len"]
    return modes


def parse_sweep(options: Iterable[str]) -> dict[str, list[Any]]:
    """{"eval_max_iter": [1, 2]} of "max-iter=1,2". Raises: OptionError."""
    found: dict[str, list[Any]] = {}
    for option in options:
        key, _, text = option.partition("=")
        if key not in _SWEPT:
            raise OptionError(f"--sweep {option}: no setting {key!r} is swept; {nearest(key, _SWEPT)}")
        field, kind = _SWEPT[key]
        try:
            found[field] = [kind(word) for word in text.split(",")]
        except ValueError as error:
            raise OptionError(f"--sweep {option}: must have the form {key}=VALUE,VALUE") from error
    return found
