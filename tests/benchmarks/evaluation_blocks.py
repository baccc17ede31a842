"""What an evaluation costs and answers by the length of its blocks, for the trained models of the package.

    export IMPLICIT_LLM_DATA=FOLDER   # has the archive of bAbI
    python -m tests.benchmarks.evaluation_blocks --out results/benchmarks/evaluation-blocks-cpu.json

Each token of a block converges, at tolerance 0.05 (CatbAbI: 0.03), in at most 128 evaluations of f (CatbAbI: 200), or
twice the block's length where that is more. A last row has blocks of 32 whose residual over all tokens must be below
the tolerance, as most of the models were saved at first. A5 x monoid is read at its trained length, S5 at sixteen
times its own. Seconds are those of the process, on one core. It takes half an hour.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import implicit_llm
from tests.benchmarks.series_gradient import stories, words
from tests.measuring import keep, options_of, show

BLOCKS = (1, 8, 32, 64, 256)
PROTOCOL = {"eval_mode": "blockwise", "eval_stop": "token"}


def main() -> None:
    options = options_of(__doc__, {"--models": {"nargs": "+", "default": [*TASKS], "choices": [*TASKS]}})
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for name in options.models:
        model = AutoModelForCausalLM.from_pretrained(implicit_llm.trained_model(name)).eval()
        data, cap = TASKS[name]
        ids_BL, labels_BL = data()
        measure(model, ids_BL[:2, :16], labels_BL[:2, :16])  # the first call is slower
        for solver in solvers(model.solver, cap, ids_BL.shape[1]):
            model.solver = solver
            found.append({"model": name, **measure(model, ids_BL, labels_BL)})
            keep(options.out, found)
        show([row for row in found if row["model"] == name], name)


TASKS: dict[str, Any] = {
    "a5-monoid-published-s0": (lambda: words("A5", "aperiodic", 0.1, 256, 128), 128),
    "a5-monoid-released-s0": (lambda: words("A5", "aperiodic", 0.1, 256, 128), 128),
    "s5-state-passing-s0": (lambda: words("S5", "none", 1.0, 512, 8), 128),
    "catbabi-implicit-s0": (lambda: [t.reshape(-1, 200) for t in stories(400, 64)], 200),
}


def solvers(saved: implicit_llm.SolverConfig, cap: int, length: int) -> Iterator[implicit_llm.SolverConfig]:
    """The settings of each row: blocks up to the whole sequence by token, then blocks of 32 by their mean residual."""
    for block_len in sorted({min(block_len, length) for block_len in (*BLOCKS, length)}):
        yield replace(saved, **PROTOCOL, eval_block_len=block_len, eval_max_iter=max(cap, 2 * block_len))
    yield replace(saved, **PROTOCOL | {"eval_stop": "sequence"}, eval_block_len=32, eval_max_iter=cap)


@torch.inference_mode()
def measure(model: Any, ids_BL: Tensor, labels_BL: Tensor) -> dict[str, Any]:
    """Return accuracy over all tokens and the last ten, exact matches, and the work for them."""
    start_s = time.process_time()  # other work on the machine hardly changes it
    out = model(ids_BL)
    busy_s = time.process_time() - start_s
    solver, (batch, length) = model.solver, ids_BL.shape
    is_scored_BL = labels_BL >= 0
    is_right_BL = (out.logits.argmax(-1) == labels_BL) | ~is_scored_BL
    evaluations = float(out.solver_stats.f_evaluations.mean())
    return {
        "stop": solver.eval_stop,
        "block_len": solver.eval_block_len,
        "max_iter": solver.eval_max_iter,
        "sequences": batch,
        "length": length,
        "accuracy": float(is_right_BL[is_scored_BL].float().mean()),
        "accuracy_last10": float(is_right_BL[:, -10:][is_scored_BL[:, -10:]].float().mean()),
        "right_throughout": int(is_right_BL.all(1).sum()),
        "f_evaluations_per_token": evaluations,
        "serial_steps_per_token": evaluations * -(-length // solver.eval_block_len) / length,
        "share_at_cap": float(out.solver_stats.unconverged_tokens.sum() / ids_BL.numel()),
        "seconds": busy_s,
    }


if __name__ == "__main__":
    main()
