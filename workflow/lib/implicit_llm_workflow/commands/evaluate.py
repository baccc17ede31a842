"""The command `evaluate`, with a sub-command for each kind of evaluation.

A new kind is a function here with its options, and a line with the data it reads and the numbers it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from implicit_llm_contracts.runs.places import DEFAULT_DOWNLOADS
from implicit_llm_workflow.commands.evaluate_by_hand import TOKENIZER
from implicit_llm_workflow.commands.evaluate_options import EvaluateKind, make_command
from implicit_llm_workflow.commands.job import Downloads, IdentityText, Job, Log, OptionError, RunDir, run_job
from implicit_llm_workflow.experiment_files.evaluations import (
    CATBABI,
    DUALITY,
    JACOBIAN,
    LM_EVAL,
    PERPLEXITY,
    WORD_PROBLEM,
)
from implicit_llm_workflow.experiment_files.lm_eval_settings import lm_eval_settings, suite_names

ROWS, STORIES, STREAMS = ("word_problem",), ("catbabi",), ("token_stream",)  # kinds of data
SOLVER_COLUMNS = {"f_evaluations_per_token": "f-evaluations per token", "unconverged_share": "unconverged"}

# Everything behind `harness` belongs to it, options that this console knows under the same name included.
HANDED_OVER = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

evaluate = typer.Typer(
    name="evaluate",
    help="Evaluate a model: one sub-command for each kind of evaluation.\n\n"
    "By hand it takes any model: a run directory, or a checkpoint of transformers, of the published layout, or of the "
    "original Mamba2 release. The result gets a run directory of its own, so that the same call finds it there.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

MaxTokens = Annotated[
    int, typer.Option(min=0, help="Tokens of each test set at most, the first ones; 0: all.", metavar="N")
]
Lengths = Annotated[
    str, typer.Option(help="Lengths at which the test set is cut, such as 2048,4096; else its own.", metavar="L,L")
]
Precision = Annotated[str, typer.Option(help="fp32 or bf16 (autocast); losses are fp32 always.", metavar="NAME")]
Settings = dict[str, Any]


def word_problem() -> Settings:
    """Accuracy on word problems: by position, on the last ten tokens, of whole sequences; in every mode.

    **Example**

        implicit-llm evaluate word-problem --model results/demo/train/a5-implicit-s1/free
            --data results/demo/data/a5-test-L64-h0.5 --mode blockwise --mode sequential --max-iter 64 --block-len 8
    """
    return {}


def catbabi(
    protocols: Annotated[
        str,
        typer.Option(help="windowed, carried or both: whether the state is carried from row to row.", metavar="P,P"),
    ] = "windowed",
    carried_max_tokens: Annotated[
        int,
        typer.Option(min=0, help="Words at most in the protocol carried, one window at a time; 0: all.", metavar="N"),
    ] = 0,
) -> Settings:
    """Accuracy at the questions of CatbAbI, in all and for each task, and of every word; in every mode.

    **Example**

        implicit-llm evaluate catbabi --model results/miniature/train/babi-implicit-s0/free
            --data results/miniature/data/babi-test --tol 0.03 --protocols windowed,carried
    """
    return _known({"protocols": _words(protocols), "carried_max_tokens": carried_max_tokens})


def perplexity(lengths: Lengths = "", max_tokens: MaxTokens = 0, precision: Precision = "fp32") -> Settings:
    """Perplexity on held-out text, at each length, in every mode.

    The text must have been encoded with the tokens that the model was trained with.

    **Example**

        implicit-llm evaluate perplexity --model models/pythia-160m --data results/paper/data/pile-test \\
            --lengths 2048,4096 --max-tokens 1000000
    """
    settings = _known({"max_tokens": max_tokens, "precision": precision})
    return {**settings, "lengths": _numbers(lengths, "lengths") or None}


def lm_eval(
    tasks: Annotated[str, typer.Option(help="Tasks of the harness, or a suite such as paper.", metavar="T,T")] = "",
    task_path: Annotated[
        str,
        typer.Option(
            help="Folder of tasks in the harness's YAML format, or its name in workflow/config/lm_eval/.", metavar="DIR"
        ),
    ] = "",
    num_fewshot: Annotated[int, typer.Option(min=0, help="Examples before a question.", metavar="N")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Documents of each task, the first ones; 0: all.", metavar="N")] = 0,
    precision: Precision = "fp32",
) -> Settings:
    """Downstream tasks by the Language Model Evaluation Harness, in every mode.

    The tokenizer is the model's own, or that of `--data DIR`, the run directory of a tokenizer.

    **Example**

        implicit-llm evaluate lm-eval --model results/miniature/train/text-mamba2-implicit-s0/free-80 \\
            --data results/miniature/data/text-tokenizer --tasks local_cloze --task-path local --limit 20
    """
    names = _words(tasks)
    settings = _known({"task_path": task_path, "num_fewshot": num_fewshot, "limit": limit, "precision": precision})
    if names:
        settings["tasks"] = names[0] if len(names) == 1 and names[0] in suite_names() else names
    return lm_eval_settings(settings, "evaluate lm-eval")


def duality(
    lengths: Lengths = "",
    max_tokens: MaxTokens = 0,
    trace_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens on which convergence is followed; 0: 16384.", metavar="N")
    ] = 0,
    precision: Precision = "fp32",
) -> Settings:
    """Whether the modes of solving agree on the same tokens, and how fast the simultaneous iteration converges.

    **Example**

        implicit-llm evaluate duality --model results/miniature/train/text-mamba2-implicit-s0/free-80
            --data results/miniature/data/text-test --max-tokens 16384 --max-iter 64
    """
    settings = {"lengths": _numbers(lengths, "lengths"), "max_tokens": max_tokens, "trace_tokens": trace_tokens}
    return _known({**settings, "precision": precision})


def jacobian(
    positions: Annotated[
        str, typer.Option(help="Tokens of a row, counted from 1; by default 16, spread evenly.", metavar="P,P")
    ] = "",
    num_sequences: Annotated[int, typer.Option(min=0, help="Rows of the test set; 0 means 9.", metavar="N")] = 0,
    layer: Annotated[int, typer.Option(min=0, help="The layer whose state it is, from 0.", metavar="N")] = 0,
    checked_rows: Annotated[
        int, typer.Option(min=0, help="Rows of the Jacobian to compare with autograd; 0 means 4.", metavar="N")
    ] = 0,
) -> Settings:
    """The Jacobian of the state of a Mamba2 model (Theorem 1): diagonal for an explicit layer, not at a fixed point.

    **Example**

        implicit-llm evaluate jacobian --model results/demo/train/a5-implicit-s1/free
            --data results/demo/data/a5-test-L16-h0.5
    """
    settings = {"positions": _numbers(positions, "positions"), "num_sequences": num_sequences, "layer": layer}
    return _known({**settings, "checked_rows": checked_rows})


KINDS: tuple[tuple[EvaluateKind, Callable[..., Settings]], ...] = (
    (
        EvaluateKind(
            WORD_PROBLEM, ROWS, {"accuracy_last10": "last ten", "accuracy_sequence": "sequences", **SOLVER_COLUMNS}
        ),
        word_problem,
    ),
    (
        EvaluateKind(
            CATBABI,
            STORIES,
            {"protocol": "protocol", "accuracy": "questions", "lm_accuracy": "words", **SOLVER_COLUMNS},
        ),
        catbabi,
    ),
    (
        EvaluateKind(
            PERPLEXITY,
            STREAMS,
            {"perplexity": "perplexity", "loss": "loss", "num_tokens": "tokens", **SOLVER_COLUMNS},
        ),
        perplexity,
    ),
    (EvaluateKind(LM_EVAL, (TOKENIZER,), {"metrics": "metrics", **SOLVER_COLUMNS}, needs_data=False), lm_eval),
    (
        EvaluateKind(
            DUALITY,
            (*ROWS, *STORIES, *STREAMS),
            {"against": "against", "token_agreement": "agreement", "logit_distance_mean": "logit distance"},
            default_modes=("simultaneous", "blockwise", "sequential"),
        ),
        duality,
    ),
    (
        EvaluateKind(
            JACOBIAN,
            (*ROWS, *STORIES, *STREAMS),
            {
                "setting": "of",
                "position": "token",
                "off_diagonal_share": "off the diagonal",
                "f_radius": "radius of df/dz",
            },
        ),
        jacobian,
    ),
)

for _kind, _settings_of in KINDS:
    evaluate.command(_kind.command)(make_command(_kind, _settings_of))


def import_model(
    run_dir: RunDir, identity: IdentityText, log: Log = None, downloads: Downloads = DEFAULT_DOWNLOADS
) -> None:
    """Import a model that was trained elsewhere, so that jobs of the workflow evaluate it like one of ours.

    It reads the format of transformers (safetensors), the published layout, and the original Mamba2 release. By hand
    you need no import: each `evaluate` command takes such a model as its --model.

    **Example**

        implicit-llm explain --identity checkpoint/pythia-70m --config mine.yaml > id.json
        implicit-llm evaluate import --run-dir results/mine/checkpoint/pythia-70m --identity @id.json
    """
    run_job(Job("checkpoint", run_dir, identity, None, log, {"downloads": downloads}))


def harness(context: typer.Context) -> None:
    """Run the Language Model Evaluation Harness with this project's models; all arguments are the harness's own.

    `--model hf` and `--model implicit` are the same here: any causal model of Hugging Face, in batches without padding,
    which would change how far an implicit model iterates. Further `--model_args`: `eval_mode`, `eval_max_iter`,
    `eval_tol`, `eval_stop`, `eval_block_len`. `pretrained` and `tokenizer` may be run directories.

    **Example**

        implicit-llm evaluate harness run --help
        implicit-llm evaluate harness --model hf --tasks local_cloze --include_path workflow/config/lm_eval/local \\
            --model_args eval_mode=sequential tokenizer=results/miniature/data/text-tokenizer \\
            pretrained=results/miniature/train/text-mamba2-implicit-s0/free-80
    """
    from implicit_llm.evaluation.lm_eval_harness.command_line import main

    main(context.args)


evaluate.command("import")(import_model)
evaluate.command("harness", context_settings=HANDED_OVER)(harness)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError as error:
        raise OptionError(f"--{option} {text}: must be integers, divided by commas") from error


def _known(settings: Settings) -> Settings:
    """Drop unset options so that the job's defaults apply."""
    return {key: value for key, value in settings.items() if value not in (0, "", [], None)}
