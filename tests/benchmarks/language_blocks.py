"""What the evaluation of a language model costs and answers by the length of its blocks, and how far it stops short.

    python -m tests.benchmarks.language_blocks --models FOLDER ... --data FOLDER \\
        --out results/benchmarks/language-blocks-h100.json

A model is the folder `model` that a training job writes, the data are those of the job `data/text-test`. 16 rows of
2,048 tokens are read in bf16. Each token of a block converges at the model's tolerance, in at most 64 evaluations of f;
a last row has blocks of 256 whose residual over all tokens must be below it.
A second table solves 4 rows in fp32, in blocks of 256, at decreasing tolerances and compares each with the last: the
mean over tokens of the relative distance of the states, and the loss.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import implicit_llm  # noqa: F401  (registers the models)
from implicit_llm.evaluation.kinds.perplexity import TextRows
from tests.benchmarks.evaluation_blocks import PROTOCOL
from tests.measuring import DEVICE, keep, options_of, show

LENGTH, ROWS, FEW_ROWS, CAP = 2048, 16, 4, 64
BLOCKS = (1, 8, 32, 64, 256, LENGTH)
TOLERANCES = (0.05, 0.02, 0.01, 0.001, 0.0001)
MOST = 2000  # evaluations of f, for the small tolerances


def main() -> None:
    folder = {"type": Path, "required": True}
    options = options_of(__doc__, {"--models": folder | {"nargs": "+"}, "--data": folder})
    rows = TextRows(options.data, LENGTH).fetch(np.arange(ROWS))
    ids_BL, labels_BL = (torch.as_tensor(rows[key].astype(np.int64), device=DEVICE) for key in ("input_ids", "labels"))
    found: list[dict[str, Any]] = []
    for folder in options.models:
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        model.to(DEVICE).eval()
        for name, part in (("blocks", by_block), ("distance", by_tolerance)):
            new = [{"table": name, "model": name_of(folder)} | row for row in part(model, ids_BL, labels_BL)]
            found += new
            keep(options.out, found)
            show(new, name)


def name_of(folder: Path) -> str:
    """The experiment, run and phase of a folder EXPERIMENT/train/RUN-sSEED/PHASE/work/FINGERPRINT/model."""
    experiment, _, run, phase = folder.absolute().parts[-7:-3]
    return f"{experiment}/{run}/{phase}"


@torch.inference_mode()
def by_block(model: Any, ids_BL: Tensor, labels_BL: Tensor) -> list[dict[str, Any]]:
    found, trained = [], model.solver
    for block_len, stop in [*((block_len, "token") for block_len in BLOCKS), (256, "sequence")]:
        protocol = PROTOCOL | {"eval_stop": stop}
        model.solver = replace(trained, **protocol, eval_block_len=block_len, eval_max_iter=CAP)
        with torch.autocast(ids_BL.device.type, torch.bfloat16):
            model(ids_BL[:, : 2 * min(block_len, LENGTH // 2)])  # captures graphs
            start_s = time.perf_counter()
            out = model(ids_BL)
            loss = loss_of(out, labels_BL)  # waits for the device
            took_s = time.perf_counter() - start_s
        evaluations = float(out.solver_stats.f_evaluations.mean())
        found.append(
            {
                "block_len": block_len,
                "stop": stop,
                "tokens": ids_BL.numel(),
                "loss": loss,
                "f_evaluations_per_token": evaluations,
                "serial_steps_per_token": evaluations / block_len,
                "unconverged_share": float(out.solver_stats.unconverged_tokens.sum() / ids_BL.numel()),
                "seconds": took_s,
            }
        )
    model.solver = trained
    return found


@torch.inference_mode()
def by_tolerance(model: Any, ids_BL: Tensor, labels_BL: Tensor) -> list[dict[str, Any]]:
    found, trained, states = [], model.solver, []
    ids_BL, labels_BL = ids_BL[:FEW_ROWS], labels_BL[:FEW_ROWS]
    blocks = replace(trained, **PROTOCOL, eval_block_len=256, eval_max_iter=MOST)
    for solver in [replace(trained, eval_mode="as_trained"), *(replace(blocks, tol=tol) for tol in TOLERANCES)]:
        model.solver = solver
        out = model(ids_BL)
        states.append(out.last_hidden_state.float())
        found.append(
            {
                "tol": None if solver.eval_mode == "as_trained" else solver.tol,
                "tokens": ids_BL.numel(),
                "loss": loss_of(out, labels_BL),
                "f_evaluations_per_token": float(out.solver_stats.f_evaluations.mean()),
                "unconverged_share": float(out.solver_stats.unconverged_tokens.sum() / ids_BL.numel()),
            }
        )
    for row, state_BLD in zip(found, states, strict=True):
        row["distance"] = float(((state_BLD - states[-1]).norm(dim=-1) / states[-1].norm(dim=-1)).mean())
    model.solver = trained
    return found


def loss_of(out: Any, labels_BL: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(out.logits.float().flatten(0, 1), labels_BL.flatten()))


if __name__ == "__main__":
    main()
