"""The harness's own command line, with this project's models."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lm_eval._cli import HarnessCLI
from lm_eval.utils import setup_logging

from implicit_llm.evaluation.lm_eval_harness.model import NAME

PADDING_MODELS = ("hf", "hf-auto", "huggingface")


def main(arguments: Sequence[str]) -> None:
    """Run the harness with `arguments`, as `lm-eval` would; its output goes to stdout.

    Where its own class for models of Hugging Face is named, or taken by default, the model that never pads takes its
    place. A model that is named in a file (--config) stays as it is.
    """
    sys.argv = ["lm-eval", *arguments]
    setup_logging()
    harness = HarnessCLI()
    given = harness.parse_args()
    if given.command == "run" and (given.model in PADDING_MODELS or not (given.model or given.config)):
        given.model = NAME
    harness.execute(given)
