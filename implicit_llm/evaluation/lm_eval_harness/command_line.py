"""The harness's own command line, with this project's models."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from lm_eval.__main__ import cli_evaluate

from implicit_llm.evaluation.lm_eval_harness.model import NAME

log = logging.getLogger(__name__)

SUB_COMMANDS = ("ls", "validate")
MODEL_OPTIONS = ("--model", "-M")
CONFIG_OPTIONS = ("--config", "-C")
PADDING_MODELS = ("hf", "hf-auto", "huggingface")


def main(arguments: Sequence[str]) -> None:
    """Run the harness with `arguments`, as `lm-eval` would; its output goes to stdout."""
    sys.argv = ["lm-eval", *without_padding(arguments)]
    cli_evaluate()


def without_padding(arguments: Sequence[str]) -> list[str]:
    """The arguments with the model that never pads where the harness's own would be taken, by name or by default.

    A model that is named in a file (--config) stays as it is.
    """
    words = list(arguments)
    if not words or words[0] in SUB_COMMANDS:
        return words
    named = False
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option not in MODEL_OPTIONS:
            named = named or option in CONFIG_OPTIONS
            continue
        named = True
        if not equals and index + 1 < len(words):
            value = words[index + 1]
        if value in PADDING_MODELS:
            log.info("--model %s: taken as %s, with the same arguments, whose batches hold no padding", value, NAME)
            words[index + (not equals)] = f"{option}={NAME}" if equals else NAME
    return words if named else [*words, "--model", NAME]
