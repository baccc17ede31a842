"""The sub-command `lm-eval`."""

from __future__ import annotations

import typer

# Everything behind `lm-eval` belongs to the harness, options that this console knows under the same name included.
HANDED_OVER = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def lm_eval(context: typer.Context) -> None:
    """Run the Language Model Evaluation Harness with this project's models; all arguments are the harness's own.

    `--model hf` and `--model implicit` are the same here: any causal model of Hugging Face, in batches without padding,
    which would change how far an implicit model iterates. Further `--model_args`: `eval_mode`, `eval_max_iter`,
    `eval_tol`, `eval_stop`, `eval_block_len`. `pretrained` and `tokenizer` may be run directories.

    **Example**

        implicit-llm lm-eval run --help
        implicit-llm lm-eval --model hf --tasks local_cloze --include_path workflow/config/lm_eval/local \\
            --model_args eval_mode=sequential tokenizer=results/miniature/data/text-tokenizer \\
            pretrained=results/miniature/train/text-mamba2-implicit-s0/free-80
    """
    from implicit_llm.evaluation.lm_eval_harness.command_line import main

    main(context.args)
