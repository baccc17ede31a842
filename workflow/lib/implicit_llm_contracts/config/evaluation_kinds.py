"""Define the table of the kinds of evaluation, which experiment files, rules, commands and the report use.

A new kind needs an entry here, a dataclass of its settings, and a module `implicit_llm/evaluation/kinds/<kind>.py`,
whose function `run` is the body of its jobs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from implicit_llm_contracts.config.evaluation import (
    CatbabiEvaluation,
    DualityConfig,
    EvaluateConfig,
    JacobianConfig,
    LmEvalConfig,
    PerplexityConfig,
)
from implicit_llm_contracts.config.registry import Registry
from implicit_llm_contracts.config.tasks import CATBABI, LANGUAGE_MODEL, WORD_PROBLEM

PERPLEXITY, LM_EVAL, DUALITY, JACOBIAN = "perplexity", "lm_eval", "duality", "jacobian"

_LENGTHS = "Lengths at which the test stream is cut; by default those of the data."
_MAX_TOKENS = "Tokens of each test set, the first ones, at most."
_PRECISION = "Precision of the model, fp32 (the default) or bf16 by autocast; losses are fp32 always."
# Help texts of the options of `implicit-llm evaluate` that set a field of every --mode; --block-len is for blockwise.
MODE_SETTINGS = {
    "eval_max_iter": "f-evaluations allowed for one block, at least 2. All except the last are damped by the model's "
    "tau. By default as saved.",
    "eval_tol": "Relative residual below which a token has converged; by default as saved.",
    "eval_block_len": "Tokens of a block, in the mode blockwise; by default as saved.",
    "eval_stop": "The criterion by which a block ends. With token, each of its tokens must have converged. With "
    "sequence, the residual over all of them counts. Batch is the released code's criterion. By default as saved.",
    "max_samples": "Sequences of each data set, the first ones, at most.",
}
_COSTS = {"f_evaluations_per_token": "f-evaluations per token", "unconverged_share": "unconverged"}


@dataclass(frozen=True)
class EvaluationKind:
    """The properties of a kind of evaluation that other parts of the project need.

    `config`: the dataclass of its settings. `data`: the tasks whose models this kind evaluates in an experiment.
    `reads`: the kinds of data jobs whose data sets `implicit-llm evaluate` accepts, for any model. `settings`: help
    texts by key; MODE_SETTINGS has those of modes. `metrics`: the numbers of a record, in the order of the report.
    `columns`: the fields of a record and their headings in the table that the command prints. `parts`: the key that
    selects the parts of the data to evaluate; without this key, all parts are evaluated. `lengths`: the lengths of a
    text's split that an experiment evaluates by default. `refused`: the runtime settings that the job refuses, because
    they would have no effect.
    """

    config: type
    data: tuple[str, ...]
    reads: tuple[str, ...]
    summary: str
    example: str
    metrics: tuple[str, ...]
    columns: Mapping[str, str]
    settings: Mapping[str, str] = field(default_factory=dict)
    parts: str = "lengths"
    lengths: Literal["all", "shortest"] | None = None
    default_modes: tuple[str, ...] = ("blockwise",)
    refused: tuple[str, ...] = ()

    @property
    def has_modes(self) -> bool:
        return "modes" in self.fields

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `config` by name."""
        return {item.name: item for item in fields(self.config)}

    @property
    def is_large(self) -> bool:
        """Whether the kind is for language models alone, which fill a GPU together with their logits."""
        return self.data == (LANGUAGE_MODEL,)


_BUILTIN = {
    WORD_PROBLEM: EvaluationKind(
        EvaluateConfig,
        data=(WORD_PROBLEM,),
        reads=("word_problem",),
        summary="Measure accuracy on word problems: by position, on the last ten tokens, and of whole sequences.",
        example="--model results/demo/train/a5-implicit-s1/free --data results/demo/data/a5-test-L64-h0.5 "
        "--mode blockwise --mode sequential --max-iter 64 --block-len 8",
        metrics=("accuracy_last10", "accuracy_sequence", "accuracy_token", "chance_last10"),
        columns={"accuracy_last10": "last ten", "accuracy_sequence": "sequences", **_COSTS},
        settings={
            "lengths": "Lengths of the word problems to take; by default all of the data.",
            "precision": _PRECISION,
        },
    ),
    CATBABI: EvaluationKind(
        CatbabiEvaluation,
        data=(CATBABI,),
        reads=("catbabi",),
        summary="Measure accuracy on the questions of CatbAbI, in all and for each task, and on every word.",
        example="--model results/miniature/train/babi-implicit-s0/free --data results/miniature/data/babi-test "
        "--tol 0.03 --protocols windowed,carried",
        metrics=("accuracy", "lm_accuracy", "lm_perplexity"),
        columns={"protocol": "protocol", "accuracy": "questions", "lm_accuracy": "words", **_COSTS},
        settings={
            "protocols": "How CatbAbI is read. windowed, the default, reads every row from an empty state; carried "
            "reads the stories as one row, with the state carried over, as published.",
            "carried_max_tokens": "Words read in the protocol carried, at most; it reads one window at a time.",
        },
        parts="protocols",
    ),
    PERPLEXITY: EvaluationKind(
        PerplexityConfig,
        data=(LANGUAGE_MODEL,),
        reads=("token_stream",),
        summary="Measure perplexity on held-out text, at each length.\n\n"
        "The text must have been encoded with the tokens that the model was trained with.",
        example="--model models/pythia-160m --data results/paper/data/pile-test --lengths 2048,4096 "
        "--max-tokens 1000000",
        metrics=("perplexity", "perplexity_within_documents", "loss"),
        columns={"perplexity": "perplexity", "loss": "loss", "num_tokens": "tokens", **_COSTS},
        settings={"lengths": _LENGTHS, "max_tokens": _MAX_TOKENS, "precision": _PRECISION},
        lengths="all",
    ),
    LM_EVAL: EvaluationKind(
        LmEvalConfig,
        data=(LANGUAGE_MODEL,),
        reads=("tokenizer",),
        summary="Run downstream tasks by the Language Model Evaluation Harness.\n\n"
        "The tokenizer is the model's own, or that of `--data DIR`, the run directory of a tokenizer.",
        example="--model results/miniature/train/text-mamba2-implicit-s0/free-80 "
        "--data results/miniature/data/text-tokenizer --tasks local_cloze --task-path local --limit 20",
        metrics=(),
        columns={"metrics": "metrics", **_COSTS},
        settings={
            "tasks": "Tasks of the harness, or the name of a suite, such as paper.",
            "task_path": "A folder with tasks in the harness's YAML format, by path or by its name in "
            "workflow/config/lm_eval/.",
            "num_fewshot": "Examples before a question; by default 0.",
            "limit": "Documents of each task, the first ones, at most.",
            "precision": _PRECISION,
            "bootstrap_draws": "Draws behind the standard error of a task's perplexity; 0 gives none, the default is "
            "100000.",
        },
        parts="tasks",
    ),
    DUALITY: EvaluationKind(
        DualityConfig,
        data=(LANGUAGE_MODEL,),
        reads=("word_problem", "catbabi", "token_stream"),
        summary="Compare the modes of solving on the same tokens, and trace how fast the simultaneous iteration "
        "converges.",
        example="--model results/miniature/train/text-mamba2-implicit-s0/free-80 "
        "--data results/miniature/data/text-test --max-tokens 16384 --max-iter 64",
        metrics=("token_agreement", "kl", "logit_distance_mean", "logit_distance_max"),
        columns={"against": "against", "token_agreement": "agreement", "logit_distance_mean": "logit distance"},
        settings={
            "lengths": "Lengths at which the test stream is cut; by default the shortest of the data.",
            "max_tokens": _MAX_TOKENS,
            "trace_tokens": "Tokens on which the convergence by iteration is followed; by default 16384.",
            "precision": _PRECISION,
        },
        lengths="shortest",
        default_modes=("simultaneous", "blockwise", "sequential"),
    ),
    JACOBIAN: EvaluationKind(
        JacobianConfig,
        data=(WORD_PROBLEM, CATBABI, LANGUAGE_MODEL),
        reads=("word_problem", "catbabi", "token_stream"),
        refused=("batch_size", "kernels"),
        summary="Compute the Jacobian of the state of a Mamba2 model (Theorem 1): diagonal for an explicit layer, not "
        "at a fixed point.",
        example="--model results/demo/train/a5-implicit-s1/free --data results/demo/data/a5-test-L16-h0.5",
        metrics=("off_diagonal_share", "transition_radius", "f_radius", "relative_difference"),
        columns={
            "setting": "of",
            "position": "token",
            "off_diagonal_share": "off the diagonal",
            "f_radius": "radius of df/dz",
        },
        settings={
            "positions": "Tokens of a test row, counted from 1, at which the Jacobian is taken; by default 16, evenly "
            "from the second token to the last or the 256th.",
            "num_sequences": "Rows of the test set at which it is taken; by default 9.",
            "layer": "The layer whose state it is, from 0; by default 0.",
            "checked_rows": "Rows of the Jacobian that are compared with autograd through the iteration at the last "
            "position, a solve each; by default 4.",
        },
    ),
}
EVALUATION_KINDS: Registry[EvaluationKind] = Registry("kind of evaluation", _BUILTIN)
