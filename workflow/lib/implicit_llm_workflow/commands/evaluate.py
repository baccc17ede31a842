"""The command `evaluate`, with a sub-command for each kind of evaluation.

Their options follow from the table of kinds, `implicit_llm_contracts/config/evaluation_kinds.py`.
"""

from __future__ import annotations

import typer

from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS
from implicit_llm_contracts.runs.places import DEFAULT_DOWNLOADS
from implicit_llm_workflow.commands.evaluate_options import make_command
from implicit_llm_workflow.commands.job import Downloads, IdentityText, Job, Log, RunDir, run_job

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

for _name in EVALUATION_KINDS:
    evaluate.command(_name.replace("_", "-"))(make_command(_name))


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
