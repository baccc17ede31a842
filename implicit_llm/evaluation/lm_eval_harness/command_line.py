"""The harness's own command line, with this project's models."""

import argparse
import logging
import sys
from collections.abc import Sequence

from lm_eval.__main__ import cli_evaluate

from implicit_llm.evaluation.lm_eval_harness.model import NAME

log = logging.getLogger(__name__)

SUB_COMMANDS = ("ls", "validate")
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
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", "-M")
    parser.add_argument("--config", "-C")
    named, _ = parser.parse_known_args(words)
    if named.model is None:
        return words if named.config is not None else [*words, "--model", NAME]
    if named.model not in PADDING_MODELS:
        return words
    log.info("--model %s: taken as %s, with the same arguments, whose batches hold no padding", named.model, NAME)
    return [*words, "--model", NAME]  # the last one counts
