"""The command `try`: a trained model that comes with the package, on sequences far longer than in its training.

Shapes: `B` sequences, `L` tokens, `D` model, `K` iterations of the solver.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from implicit_llm_workflow.commands.options import OptionError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor

    from implicit_llm_report.figures.first_look import Trial

MODEL = "s5-state-passing-s0"
KEPT = "accuracy_by_position.json"  # in the folder of the model
GROUP, CHANCE, WIDTH = "S5", 1 / 120, 80
SUFFIXES = (".svg", ".png", ".pdf")
INTRODUCTION = """
[bold]Task[/bold]   Multiply random permutations of five things, one a token. After each
       token: which of the 120 is the product so far? (The group S5.)
[bold]Model[/bold]  One implicit Mamba2 layer, {size} parameters: z* = f(z*, x).
       Trained on sequences of {trained} tokens, each from the state of the last one.
[bold]Test[/bold]   {words} new sequences of {length} tokens: {times:.3g} times as long.
"""
NOTES = """
{right} of {words} sequences are right at every token. A token took {evaluations:.1f} evaluations of f.

[dim]The weights are those of seed 0, kept by rule and not for their result. Seeds 0
to 4 have {seeds} % at the last ten of 512 tokens.
Explicit rows are kept results: 3 seeds, trained for a quarter of the steps.[/dim]
"""


def try_it(
    length: Annotated[
        int, typer.Option(min=32, max=8192, help="Tokens in a sequence; it was trained on 32.", metavar="N")
    ] = 512,
    words: Annotated[int, typer.Option(min=1, max=256, help="Sequences to evaluate.", metavar="N")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Draws other sequences.", metavar="N")] = 0,
    picture: Annotated[Path, typer.Option(help="File for the figure: .svg, .png or .pdf.", metavar="FILE")] = Path(
        "implicit-llm-try.svg"
    ),
) -> None:
    """See an implicit model at work, in less than a minute on a CPU.

    One implicit layer, trained on sequences of 32 permutations, is evaluated on 512. After each token it names the
    product of all so far. The command prints its accuracy beside that of explicit models, and draws accuracy and
    residuals.

    **Example**

        implicit-llm try
        implicit-llm try --length 2048 --words 4 --seed 1
    """
    from rich.console import Console

    if picture.suffix not in SUFFIXES or not picture.absolute().parent.is_dir():
        raise OptionError(
            f"--picture {picture}: give a file that ends in {', '.join(SUFFIXES)}, in a folder that exists"
        )
    console, started = Console(highlight=False, width=WIDTH), time.monotonic()
    trial = run_trial(console, length, words, seed)
    show(console, trial)
    from implicit_llm_report.figures.first_look import write_picture

    write_picture(picture, trial)
    console.print(f"{time.monotonic() - started:.0f} s on this CPU. Picture: [bold]{picture}[/bold]", soft_wrap=True)
    console.print(f"Next: [bold]{next_command()}[/bold]")


def next_command() -> str:
    """Return the next command, which trains such models: in a checkout, in a folder of experiments, or a new one."""
    example = "examples/train_word_problem.py"
    if Path(example).is_file():
        return f"python {example}"
    return "implicit-llm run demo" if Path("Snakefile").is_file() else "implicit-llm init my-study"


def run_trial(console: Console, length: int, words: int, seed: int) -> Trial:
    """Load the model, evaluate it, and watch the solver on the first tokens of the first sequence."""
    with console.status("loading PyTorch and the model: a few seconds"):
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        import implicit_llm
        from implicit_llm_contracts.config.word_problem import WordProblemConfig
        from implicit_llm_data.stages.word_problem import generate
        from implicit_llm_report.figures.first_look import Trial

        torch.set_num_threads(1)  # the tensors are small: on a busy machine more threads only wait for one another
        transformers_logging.disable_progress_bar()
        folder = implicit_llm.trained_model(MODEL)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        data = WordProblemConfig(GROUP, "none", 1.0, length, words, "test", seed, words)
        ids_BL, labels_BL = (torch.from_numpy(array.astype("int64")) for array in generate(data, 0))
    kept = json.loads((folder / KEPT).read_text(encoding="utf-8"))
    with (
        console.status(f"evaluating {words} sequences of {length:,} tokens, 8 at a time"),
        torch.inference_mode(),
    ):
        out = model(ids_BL)
        is_right_BL = out.logits.argmax(-1) == labels_BL
        trained = kept[0]["train_length"]
        watched = watch(model, ids_BL[:1, :trained], labels_BL[:1, :trained])
    evaluations = float(out.solver_stats.f_evaluations.mean())
    return Trial(is_right_BL.numpy(), evaluations, kept, trained, *watched, model.solver.tol)


def watch(model: Any, ids_1L: Tensor, labels_1L: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Solve the tokens as one block; return residuals and right answers, (K, L).

    A hook on the last norm sees f(z) of every iteration.
    """
    import torch

    outputs: list[Tensor] = []
    hook = model.base.norm_f.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    model.solver = {"eval_block_len": ids_1L.shape[1]}
    model(ids_1L)
    hook.remove()
    f_KLD = torch.cat(outputs[:-1])  # the last evaluation closes the block
    z_KLD = torch.zeros_like(f_KLD)
    for k in range(1, len(f_KLD)):
        z_KLD[k] = torch.lerp(z_KLD[k - 1], f_KLD[k - 1], model.solver.tau)
    residual_KL = (f_KLD - z_KLD).norm(dim=-1) / f_KLD.norm(dim=-1)
    is_right_KL = model.get_output_embeddings()(f_KLD).argmax(-1) == labels_1L
    return residual_KL.numpy(), is_right_KL.numpy()


def show(console: Console, trial: Trial) -> None:
    """Print what was asked of the model, and its accuracy beside the kept numbers."""
    words, length = trial.is_right_BL.shape
    implicit, trained = trial.kept[0], trial.train_length
    about = {"words": words, "length": f"{length:,}", "trained": trained, "times": length / trained}
    console.print(INTRODUCTION.format(size=millions(implicit), **about))
    console.print(accuracy_table(trial))
    seeds = ", ".join(f"{10 * sum(accuracy_L[-10:]):.1f}" for accuracy_L in implicit["accuracy_per_position"])
    right = int(trial.is_right_BL.all(1).sum())
    console.print(NOTES.format(right=right, evaluations=trial.f_evaluations, seeds=seeds, **about))


def accuracy_table(trial: Trial) -> Table:
    """A row for each model, a column for some of the tokens."""
    import numpy as np

    from implicit_llm_workflow.text import plain_table

    length = trial.is_right_BL.shape[1]
    positions = sorted({*(2**power for power in range(2, 14) if 2**power < length), length})[-8:]
    right = ["size", *map(str, positions)]
    table = plain_table("percent right at token", *right, right=right, header_style="dim")
    implicit, *explicit = trial.kept
    cells = percent_at(positions, trial.is_right_BL.mean(0))
    table.add_row("implicit, 1 layer, now", millions(implicit), *cells, style="bold green")
    for run in reversed(explicit):
        cells = percent_at(positions, np.mean(run["accuracy_per_position"], axis=0))
        table.add_row(f"explicit, layers: {run['num_layers']}", millions(run), *cells)
    table.add_row("guessing", "", *percent_at(positions, np.full(length, CHANCE)))
    return table


def percent_at(positions: list[int], accuracy_L: np.ndarray) -> list[str]:
    """Accuracy at these tokens in percent, counted from 1; a dash beyond the last one."""
    return [f"{100 * accuracy_L[at - 1]:.0f}" if at <= len(accuracy_L) else "-" for at in positions]


def millions(run: dict[str, Any]) -> str:
    return f"{run['num_parameters'] / 1e6:.1f}M"
