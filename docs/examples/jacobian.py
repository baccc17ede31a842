"""Theorem 1 as a picture: how the state of one random Mamba2 layer depends on the state before it.

    python docs/examples/jacobian.py [jacobian.svg]

Left the explicit layer, whose transition is diagonal; right the implicit one, whose transition is not. One layer, fp64,
d_model 64, one state entry per channel, as in the paper's own check. Takes some seconds on one CPU core.
"""

import sys
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm
from transformers import AutoModel

import implicit_llm
from implicit_llm.analysis.jacobian import state_jacobian, step_after


def random_layer(kind: str) -> torch.nn.Module:
    """Return one Mamba2 layer with d_model 64, d_state 1, expand 1, in fp64."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "expand": 1, "head_dim": 64, "state_size": 1, "vocab_size": 60}
    model = AutoModel.from_config(implicit_llm.load_config(f"mamba2-state-tracking-{kind}", **size)).double().eval()
    if kind == "implicit":
        model.solver = replace(model.solver, tol=1e-12, eval_mode="sequential", eval_max_iter=2000)
    return model


def main(target: str) -> None:
    tokens = torch.tensor([3, 14, 15, 9, 26, 5])
    jacobians = {kind: state_jacobian(step_after(random_layer(kind), tokens)) for kind in ("explicit", "implicit")}
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for axis, (kind, jacobian) in zip(axes, jacobians.items(), strict=True):
        image = axis.imshow(jacobian.dense().abs().clamp_min(1e-8), norm=LogNorm(1e-6, 1), cmap="viridis")
        axis.set_title(f"{kind}: {jacobian.off_diagonal_share():.0e} of the norm off the diagonal")
        axis.set_xlabel("state before the token")
    axes[0].set_ylabel("state after the token")
    figure.colorbar(image, ax=axes, label="absolute value of the Jacobian's entries")
    figure.savefig(target)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "jacobian.svg")
