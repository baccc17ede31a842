"""Provide the lm-eval harness with our language models, and run the harness's own command line with them.

The model class extends HFLM: it sets the solver, counts the solver's cost, and prevents padding from affecting results.

HFLM pads the requests of a batch on the right and does not mask the padding. Later tokens cannot change the exact
fixed point of earlier ones, but they contribute to the residual by which a sequence or block stops. The number of
iterations would then depend on the other requests of the batch, and so would every result, within the tolerance. Here a
batch of log-likelihoods has only requests of one task and one length, so a result depends on its request alone, unless
the stopping rule is that of a batch.
Prompts for generation are padded on the left. Their mask prevents the padding from changing the results.

Shapes: `B` batch, `L` length, `V` vocabulary.
"""

import argparse
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import implicit_llm  # noqa: F401  (registers the implicit models with the Auto classes)
from implicit_llm.device import choose_device
from implicit_llm.evaluation.answers import EvaluationBatchSize, SolverTally, check_tokens
from implicit_llm.evaluation.frame import EvaluateInputError, model_directory
from implicit_llm.kernels.selection import select_kernels_for
from implicit_llm_contracts.config.evaluation import ModeConfig
from implicit_llm_contracts.config.solver import AS_TRAINED, solver_of
from implicit_llm_contracts.config.text import END_OF_TEXT
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.runs.fetched_files import TOKENIZER_FILE
from implicit_llm_contracts.runs.logs import wants_bar
from implicit_llm_contracts.runs.manifest import MANIFEST, Manifest
from implicit_llm_contracts.runs.stage_context import Input

log = logging.getLogger(__name__)

NAME = "implicit"
SOLVER_SETTINGS = ("eval_mode", "eval_max_iter", "eval_tol", "eval_stop", "eval_block_len")
# For requests of 200 tokens and a vocabulary of 50,000, the fp32 logits and their log_softmax need 1.3 GB each.
DEFAULT_BATCH_SIZE = 32
Answer = tuple[float, bool]


class SolverSettingError(UserError):
    """A setting was given that the model or its task cannot use."""


class StaleAnswers(UserError):
    """A cache would return the results of another model."""


@register_model(NAME)
class ImplicitLM(HFLM):
    """A causal model of Hugging Face for the harness, which selects it by `--model implicit`.

    Args: `pretrained`: a model, a folder or a name; a folder may be the run directory of a training phase or an import.
        `tokenizer`: a tokenizer, its folder or file, or the run directory of a data set's tokenizer; None means the one
        in the folder of the model. `eval_*`: changes to the solver of an implicit model, as in an evaluation's `modes`.
        `batch_size`: the number of requests per forward pass; None and "auto" mean `max_batch_size`, or
        else DEFAULT_BATCH_SIZE. It is halved when log-likelihoods run out of memory, unless results depend on it. It is
        doubled again after the requests of several lengths have fitted (see `EvaluationBatchSize`).
        `kernels`: a KernelChoice for a model that is loaded here, such as auto. Other options are those of HFLM.
    If `pretrained` is a model, its solver is changed in place.
    Raises: SolverSettingError or InvalidValue for a setting of the solver, TokenizerMissing, KernelsUnavailable,
        EvaluateInputError for a run directory without a model.
    """

    def __init__(
        self,
        pretrained: Any,
        tokenizer: Any = None,
        *,
        kernels: Any = "auto",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        settings = {key: options.pop(key) for key in SOLVER_SETTINGS if key in options}
        for key, value in settings.items():
            if value is None:
                raise SolverSettingError(f"{key}: None changes nothing; give a value, or leave it out")
        is_auto = batch_size is None or str(batch_size).startswith("auto")
        size = (max_batch_size or DEFAULT_BATCH_SIZE) if is_auto else int(batch_size)  # type: ignore[arg-type]
        self.batches = EvaluationBatchSize(size)
        if isinstance(pretrained, str):
            pretrained = str(model_folder(Path(pretrained)))
            select_kernels_for(options.setdefault("device", choose_device("auto")), kernels)
        elif kernels != "auto":
            raise SolverSettingError(
                "kernels: only for a model that is loaded here; select them before, or leave it out"
            )
        if tokenizer is None or isinstance(tokenizer, str):
            name = pretrained if isinstance(pretrained, str) else pretrained.name_or_path
            tokenizer = load_tokenizer(tokenizer, name)
        super().__init__(
            pretrained, tokenizer=tokenizer, batch_size=size, **{"backend": "causal", "dtype": "float32"} | options
        )
        if self.prefix_token_id is None:
            raise TokenizerMissing(
                f"{NAME}: the tokenizer names no token that begins or ends a text, which is needed here; set its "
                "eos_token, or name the run directory of a data set's tokenizer as tokenizer=DIR in --model_args"
            )
        solver = solver_of(self.model)
        if solver is not None:
            mode = ModeConfig(NAME, **{"eval_mode": solver.eval_mode} | settings)
            self.model.config.solver = mode.solver(solver)  # a peft model would not forward `self.model.solver`
            self.batches.is_fixed = mode.coupled_batch_size(solver) is not None
        elif settings:
            raise SolverSettingError(f"{min(settings)}: the model is explicit and has no solver; leave it out")
        self.where = NAME
        self.cost = RequestCost()

    @property
    def batch_size(self) -> int:
        """The largest number of requests in a forward pass."""
        return self.batches.size

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Raise StaleAnswers, because lm-eval's cache identifies a result by the request alone, not by the model."""
        raise StaleAnswers(
            "--use_cache: lm-eval finds an answer by its request alone, so another model, or this one with other "
            "solver settings, would get the answers of the first; leave it out"
        )

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Answer]:
        """Return HFLM's results, but evaluate task by task, so that a task's results do not depend on other tasks."""
        ask = partial(super().loglikelihood, disable_tqdm=disable_tqdm or not wants_bar())
        return _in_groups(requests, lambda request: str(request.task_name), ask)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Answer]:
        """Return the results of requests (key, context, continuation); evaluate them by length, the longest first.

        Raises: UnknownToken, EvaluationOutOfMemory.
        """
        highest = max((token for _, *parts in requests for part in parts for token in part), default=-1)
        check_tokens(self.model, highest, f"{self.where}: tokenizer")

        def shortness(request: tuple[Any, list[int], list[int]]) -> int:
            return -min(len(request[1]) + len(request[2]), self.max_length + 1)  # longer requests are cut on the left

        with tqdm(total=len(requests), desc=self.where, unit="request", disable=disable_tqdm) as bar:
            return _in_groups(requests, shortness, partial(self._answers, bar=bar))

    def _answers(self, requests: list[tuple[Any, list[int], list[int]]], bar: tqdm) -> list[Answer]:
        """Evaluate requests of one length; all results are NaN if one diverged. Raises: EvaluationOutOfMemory."""
        cost = self.cost.solver
        while True:
            self.cost.solver = replace(cost)  # so that a repeated batch counts once
            try:
                answers = super()._loglikelihood_tokens(requests, disable_tqdm=True)
                self.batches.grow(self.where)
                break
            except FloatingPointError as error:
                log.warning("%s: %s", self.where, error)
                answers = [(math.nan, False)] * len(requests)
                break
            except RuntimeError as error:
                self.batches.halve(error, self.where)
        self.cost.num_nonfinite += sum(not math.isfinite(logprob) for logprob, _ in answers)
        self.cost.num_requests += len(answers)
        bar.update(len(answers))
        return answers

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate as in HFLM.

        Raises: TokenizerMissing if the tokenizer names no token that ends a text; SolverSettingError
            in the mode AS_TRAINED.
        """
        solver = solver_of(self.model)
        if solver is not None and solver.eval_mode == AS_TRAINED:
            raise SolverSettingError(f"{self.where}: {AS_TRAINED} leaves no state to generate text from; use blockwise")
        if self.eot_token_id is None:
            raise TokenizerMissing(
                f"{self.where}: the tokenizer names no token that ends a text, which is needed here; set its eos_token"
            )
        return super().generate_until(requests, disable_tqdm)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
        """Generate as in HFLM, but end a text at its end-of-text token even if the model's configuration names none.

        HFLM removes this token when it decodes a text, and only then cuts the text at the strings in `stop`. The text
        would therefore continue after the token until the longest text of its batch ends. If the model diverges, the
        texts of the batch are empty and count as not finite.
        """
        if self.model.generation_config.eos_token_id is None:
            settings["eos_token_id"] = self.eot_token_id
        self.cost.num_requests += len(context)
        try:
            return super()._model_generate(context, max_length, stop, **settings)
        except FloatingPointError as error:
            log.warning("%s: %s", self.where, error)
            self.cost.num_nonfinite += len(context)
            return context

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Return the logits (B, L, V) of unpadded token ids (B, L), and count the cost; ignore the other arguments."""
        precision = self.mixed_precision_dtype
        with (
            torch.inference_mode(),
            torch.autocast(self.device.type, dtype=precision, enabled=precision is not None),
        ):
            out = self.model(inps)
        self.cost.solver.add(getattr(out, "solver_stats", None), (inps.shape[0], inps.shape[1]))
        return out.logits


@dataclass
class RequestCost:
    """The number of evaluated requests, how many had no finite result, and the solver's work.

    The work is that of forward passes that did not diverge. That of generation is not counted.
    """

    num_requests: int = 0
    num_nonfinite: int = 0
    solver: SolverTally = field(default_factory=SolverTally)


def _in_groups(
    requests: Sequence[Any], key: Callable[[Any], Any], answer: Callable[[list[Any]], list[Answer]]
) -> list[Answer]:
    """Evaluate requests with equal keys together, in the order of keys; return the results in the order of requests."""
    order = sorted(range(len(requests)), key=lambda index: key(requests[index]))
    answers: dict[int, Answer] = {}
    for _, group in groupby(order, key=lambda index: key(requests[index])):
        indices = list(group)
        answers |= zip(indices, answer([requests[index] for index in indices]), strict=True)
    return [answers[index] for index in range(len(requests))]


OWN_CONFIG = "tokenizer_config.json"


class TokenizerMissing(UserError):
    """No tokenizer was found, or the tokenizer names no token that ends a text."""


def model_folder(path: Path) -> Path:
    """Return the model folder of a run directory, and any other `path` unchanged.

    Raises: EvaluateInputError for a run directory without a model, or a missing folder that is no name on the hub.
    """
    if len(path.parts) > 2 and not path.is_dir():  # a name on the hub has at most two parts
        raise EvaluateInputError(f"pretrained: there is no folder {path}; give a run directory or a model")
    if not (path / MANIFEST).is_file():
        return path
    return model_directory(Input(path, Manifest.read(path / MANIFEST)))


def load_tokenizer(given: str | Path | None, model: str | Path) -> Any:
    """Load the tokenizer `given`, or that of the model if `given` is None.

    given: the run directory of a tokenizer, a folder, a file or a name on the hub. A file, or the tokenizer.json of a
        folder without tokenizer_config.json, must have the token END_OF_TEXT.
    Raises: TokenizerMissing.
    """
    path = Path(given or model)
    if (path / MANIFEST).is_file():
        run = Input(path, Manifest.read(path / MANIFEST))
        return _from_file(run.work / TOKENIZER_FILE, run.manifest.summary.get("end_of_text_id"))
    file = path if path.is_file() else path / TOKENIZER_FILE
    if file.is_file() and not (path / OWN_CONFIG).is_file():
        return _from_file(file, END_OF_TEXT)
    try:
        return AutoTokenizer.from_pretrained(str(path) if path.is_dir() else str(given or model))
    except (OSError, ValueError, KeyError) as error:
        raise TokenizerMissing(
            f"{path}: no tokenizer there; name one, for a model trained here the run directory of its data set's "
            "tokenizer, such as results/miniature/data/text-tokenizer: with `evaluate lm-eval` as --data DIR, with "
            "`lm-eval` as tokenizer=DIR in --model_args"
        ) from error


def _from_file(path: Path, end_of_text: str | int | None) -> Any:
    """Load a tokenizer.json, with `end_of_text` (a token or its id) as its eos_token. Raises: TokenizerMissing."""
    if not path.is_file():
        raise TokenizerMissing(f"{path}: is not there; give the run directory of a data set's tokenizer")
    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # tokenizers raises nothing more precise
        raise TokenizerMissing(f"{path}: is no tokenizer that `tokenizers` reads ({error}); give another") from error
    token: Any = tokenizer.convert_ids_to_tokens(end_of_text) if isinstance(end_of_text, int) else end_of_text
    if token is None or token not in tokenizer.get_vocab():
        raise TokenizerMissing(
            f"{path}: has no token {token or END_OF_TEXT}, which stands before a text without context; add a "
            f"{OWN_CONFIG} that names its eos_token"
        )
    tokenizer.eos_token = token
    return tokenizer


SUB_COMMANDS = ("ls", "validate")
PADDING_MODELS = ("hf", "hf-auto", "huggingface")


def main(arguments: Sequence[str]) -> None:
    """Run the command `lm-eval` with sys.argv set to `without_padding(arguments)`; it prints to stdout."""
    sys.argv = ["lm-eval", *without_padding(arguments)]
    cli_evaluate()


def without_padding(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--model implicit` added if they name the harness's own model, which pads, or no model.

    Nothing is added if there are no arguments, if the first one is one of SUB_COMMANDS, or if there is a --config
    without --model, because the file of --config may name the model.
    """
    words = list(arguments)
    if not words or words[0] in SUB_COMMANDS:
        return words
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", "-M")
    parser.add_argument("--config", "-C")
    named, _ = parser.parse_known_args(words)
    if named.model in PADDING_MODELS:
        log.info("--model %s: taken as %s, with the same arguments, whose batches hold no padding", named.model, NAME)
    elif named.model is not None or named.config is not None:
        return words
    return [*words, "--model", NAME]  # the last --model counts
