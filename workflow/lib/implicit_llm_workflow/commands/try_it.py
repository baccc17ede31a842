"""Define the command `try`: evaluate a trained model of the package on sequences longer than those of its training.

Shapes: `B` sequences, `L` tokens.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from implicit_llm_workflow.text import plain_table

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

MODEL = "s5-state-passing-s0"
KEPT = "accuracy_by_position.json"  # in the folder of the model
GROUP, CHANCE, WIDTH = "S5", 1 / 120, 80
INTRODUCTION = """
[bold]Task[/bold]   Multiply random permutations of five things, one a token. After each
       token: which of the 120 is the product so far? (The group S5.)
[bold]Model[/bold]  One implicit Mamba2 layer, {size} parameters: z* = f(z*, x).
       Trained on pieces of {trained} tokens, each from the state of the last one.
[bold]Test[/bold]   {words} new sequences of {length} tokens: {times:.3g} times a piece.
"""
NOTES = """
{right} of {words} sequences are right at every token. A token took {evaluations:.1f} evaluations of f.

[dim]The weights are those of seed 0, kept by rule and not for their result. Seeds 0
to 4 have {seeds} % at the last ten of 512 tokens.
Explicit rows are stored results of 3 seeds, trained without state passing or
dropout for a quarter of the steps. An LSTM with state passing can do this too.[/dim]
"""


def try_it(
    length: Annotated[
        int, typer.Option(min=32, max=8192, help="Tokens in a sequence; it was trained on 32.", metavar="N")
    ] = 512,
    words: Annotated[int, typer.Option(min=1, max=256, help="Sequences to evaluate.", metavar="N")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Draws other sequences.", metavar="N")] = 0,
) -> None:
    """See an implicit model at work, in less than a minute on a CPU.

    One implicit layer, trained on sequences of 32 permutations, is evaluated on 512. After each token it names the
    product of all so far. The command prints its accuracy beside that of explicit models.

    **Example**

        implicit-llm try
        implicit-llm try --length 2048 --words 4 --seed 1
    """
    console, started = Console(highlight=False, width=WIDTH), time.monotonic()
    with console.status("loading PyTorch and the model: a few seconds"):
        import torch

        torch.set_num_threads(1)  # the tensors are so small that further threads only wait for each other
        model, ids_BL, labels_BL = model_and_sequences(length, words, seed)
    status = f"evaluating {words} sequences of {length:,} tokens, 8 at a time"
    with console.status(status), torch.inference_mode():
        out = model(ids_BL)
    is_right_BL = (out.logits.argmax(-1) == labels_BL).numpy()
    kept = json.loads((Path(model.name_or_path) / KEPT).read_text(encoding="utf-8"))
    show(console, is_right_BL, float(out.solver_stats.f_evaluations.mean()), kept)
    console.print(f"{time.monotonic() - started:.0f} s on this CPU.")
    console.print(f"Next: [bold]{next_command()}[/bold]")


def next_command() -> str:
    """Return a command that trains such models here, or that sets up a folder in which they can be trained."""
    example = "examples/train_word_problem.py"
    if Path(example).is_file():
        return f"python {example}"
    return "implicit-llm run demo" if Path("Snakefile").is_file() else "implicit-llm init my-study"


def model_and_sequences(length: int, words: int, seed: int) -> tuple[Any, Tensor, Tensor]:
    """Return the model of the package, new sequences of tokens `ids_BL` and their labels `labels_BL`."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    import implicit_llm
    from implicit_llm_contracts.config.word_problem import WordProblemConfig
    from implicit_llm_data.stages.word_problem import generate

    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(implicit_llm.trained_model(MODEL)).eval()
    data = WordProblemConfig(GROUP, "none", 1.0, length, words, "test", seed, words)
    ids_BL, labels_BL = (torch.from_numpy(array.astype("int64")) for array in generate(data, 0))
    return model, ids_BL, labels_BL


def show(console: Console, is_right_BL: np.ndarray, f_evaluations: float, kept: list[dict[str, Any]]) -> None:
    """Print the task, and the accuracy of the model beside stored results; `f_evaluations`: the mean per token."""
    words, length = is_right_BL.shape
    trained = int(kept[0]["train_length"])
    about = {"words": words, "length": f"{length:,}", "trained": trained, "times": length / trained}
    console.print(INTRODUCTION.format(size=millions(kept[0]), **about))
    console.print(accuracy_table(is_right_BL, kept))
    seeds = ", ".join(f"{10 * sum(accuracy_L[-10:]):.1f}" for accuracy_L in kept[0]["accuracy_per_position"])
    right = int(is_right_BL.all(1).sum())
    console.print(NOTES.format(right=right, evaluations=f_evaluations, seeds=seeds, **about))


def accuracy_table(is_right_BL: np.ndarray, kept: list[dict[str, Any]]) -> Table:
    """Return a table with a row for each model and for guessing, and a column for each of at most eight positions.

    `kept`: the stored results of the implicit model, then those of the explicit models; the table reverses the latter.
    """
    import numpy as np

    length = is_right_BL.shape[1]
    positions = sorted({*(2**power for power in range(2, 14) if 2**power < length), length})[-8:]
    right = ["size", *map(str, positions)]
    implicit, *explicit = kept
    rows = [["implicit, 1 layer, now", millions(implicit), *percent_at(positions, is_right_BL.mean(0))]]
    for run in reversed(explicit):
        cells = percent_at(positions, np.mean(run["accuracy_per_position"], axis=0))
        rows.append([f"explicit, layers: {run['num_layers']}", millions(run), *cells])
    rows.append(["guessing", "", *percent_at(positions, np.full(length, CHANCE))])
    table = plain_table("percent right at token", *right, rows=rows, right=right, header_style="dim")
    table.rows[0].style = "bold green"
    return table


def percent_at(positions: list[int], accuracy_L: np.ndarray) -> list[str]:
    """Return the accuracy in percent at these positions, which count from 1; a dash beyond the last position."""
    return [f"{100 * accuracy_L[at - 1]:.0f}" if at <= len(accuracy_L) else "-" for at in positions]


def millions(run: dict[str, Any]) -> str:
    return f"{run['num_parameters'] / 1e6:.1f}M"
