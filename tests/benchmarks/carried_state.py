"""Find which part of the carried state holds the product, and whether a code of the product can replace it.

    python -m tests.benchmarks.carried_state --out results/benchmarks/carried-state-cpu.json

Sequences are solved in blocks of 8 by the protocol. A Mamba2 layer carries its SSM state and the last three inputs of
its convolution from block to block. First, parts of these are set to zero after every block. Then, for S5, everything
is set to zero except the last input of the convolution, which is replaced by a code: the mean input, plus the effect
of the product so far, plus the effect of the last token. The product is the one whose code is nearest to the input.
The effects are means over 64 other sequences of 1,024 tokens without their first block; product and token are
independent there. `scatter` is how far an input is from the code of its product, divided by the distance between this
code and the nearest other one. If it is below one half, the nearest product is correct. The script takes half an hour
on one core.

Shapes: `B` sequences, `L` tokens, `N` all states, `C` products, `V` tokens, `W` width of the input.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import implicit_llm
from implicit_llm.models.cache import ConvergedStateCache
from tests.benchmarks.series_gradient import words
from tests.measuring import keep, options_of, show

BLOCK = 8
S5 = ("s5-state-passing-s0", "S5", "none")
A5 = ("a5-monoid-published-s0", "A5", "aperiodic")
PARTS = ((*S5, 1.0, 512), (*A5, 0.1, 256), (*A5, 0.5, 256))  # model, group, monoid, share of hard tokens, length
CODED = ((64, 4096), (16, 16384))  # sequences, tokens
POSITIONS = (32, 512, 4096, 16384)
Carried = tuple[Tensor, Tensor]  # SSM state (B, heads, head width, state size), inputs of the convolution (B, 3, W)
Change = Callable[[Carried, Tensor], Carried]  # is also given the last token (B)


def last_input_alone(carried: Carried) -> Carried:
    state, inputs_B3W = carried
    return torch.zeros_like(state), torch.cat([torch.zeros_like(inputs_B3W[:, :-1]), inputs_B3W[:, -1:]], 1)


CHANGES: dict[str, Change] = {
    "nothing": lambda carried, token_B: carried,
    "SSM state": lambda carried, token_B: (torch.zeros_like(carried[0]), carried[1]),
    "convolution": lambda carried, token_B: (carried[0], torch.zeros_like(carried[1])),
    "convolution, except the last input": lambda carried, token_B: (carried[0], last_input_alone(carried)[1]),
    "all except the last input": lambda carried, token_B: last_input_alone(carried),
}


def main() -> None:
    options = options_of(__doc__)
    torch.set_num_threads(1)
    parts = []
    for name, group, monoid, share, length in PARTS:
        for zeroed, change in CHANGES.items():
            data = words(group, monoid, share, length, 64)
            about = {"model": name, "hard_fraction": share, "length": length, "zeroed": zeroed}
            parts.append({**about, **exact_matches(load(name), data, change)})
            keep(options.out, parts)
    show(parts, "parts set to zero after every block")
    model, coded = load(S5[0]), []
    code = Code.fitted(model)
    for count, length in CODED:
        data = words(*S5[1:], 1.0, length, count)
        for is_coded in (False, True):
            scatter = Scatter(code, data[1])
            change = code.apply if is_coded else scatter.measure
            about = {"model": S5[0], "length": length, "is_coded": is_coded}
            coded.append({**about, **exact_matches(model, data, change), "scatter": scatter.found})
            keep(options.out, parts, coded=coded, unexplained_share=code.unexplained_share)
    show(coded, "the last input replaced by the code of the nearest product")


def load(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(implicit_llm.trained_model(name)).eval()


@torch.inference_mode()
def blocks(model: Any, ids_BL: Tensor, change: Change) -> Iterator[tuple[int, Tensor]]:
    """Solve block after block, each from the changed state of the one before; yield the end and the predictions."""
    cache = ConvergedStateCache()
    for end in range(BLOCK, ids_BL.shape[1] + 1, BLOCK):
        out = model(ids_BL[:, end - BLOCK : end], past_key_values=cache, use_cache=True)
        assert cache.prefix is not None
        state, inputs_B3W = cache.prefix.layers[0]
        cache.prefix = replace(cache.prefix, layers=(change((state, inputs_B3W), ids_BL[:, end - 1]),))
        yield end, out.logits.argmax(-1)


def exact_matches(model: Any, data: list[Tensor], change: Change) -> dict[str, Any]:
    """Return the number of exact matches and the share of correct tokens."""
    start_s = time.process_time()
    ids_BL, labels_BL = data
    predictions_BL = torch.cat([found for _, found in blocks(model, ids_BL, change)], 1)
    is_right_BL = predictions_BL == labels_BL
    return {
        "sequences": len(ids_BL),
        "exact_matches": int(is_right_BL.all(1).sum()),
        "token_accuracy": float(is_right_BL.float().mean()),
        "seconds": time.process_time() - start_s,
    }


@dataclass(frozen=True)
class Code:
    """The last input of the convolution as a sum: (W), (C, W), (V, W)."""

    mean_W: Tensor
    of_product_CW: Tensor
    of_token_VW: Tensor
    unexplained_share: float

    @classmethod
    def fitted(cls, model: Any) -> "Code":
        ids_BL, labels_BL = words(*S5[1:], 1.0, 1024, 64, "train")
        kept: list[Tensor] = []

        def keep_input(carried: Carried, token_B: Tensor) -> Carried:
            kept.append(carried[1][:, -1].clone())
            return carried

        ends = torch.tensor([end for end, _ in blocks(model, ids_BL, keep_input)])[1:] - 1
        inputs_NW, product_N, token_N = torch.cat(kept[1:]), labels_BL[:, ends].T.flatten(), ids_BL[:, ends].T.flatten()
        centred_NW = inputs_NW - inputs_NW.mean(0)
        of_product_CW, of_token_VW = means(centred_NW, product_N), means(centred_NW, token_N)
        rest_NW = centred_NW - of_product_CW[product_N] - of_token_VW[token_N]
        share = float(rest_NW.square().sum() / centred_NW.square().sum())
        return cls(inputs_NW.mean(0), of_product_CW, of_token_VW, share)

    def distances(self, carried: Carried, token_B: Tensor) -> Tensor:
        """Return the distance of the input, less the effect of its token, from the effect of each product, (B, C)."""
        return torch.cdist(carried[1][:, -1] - self.mean_W - self.of_token_VW[token_B], self.of_product_CW)

    def apply(self, carried: Carried, token_B: Tensor) -> Carried:
        """Replace all that is carried by the code of the nearest product and the last token."""
        state, inputs_B3W = last_input_alone(carried)
        product_B = self.distances(carried, token_B).argmin(1)
        inputs_B3W[:, -1] = self.mean_W + self.of_product_CW[product_B] + self.of_token_VW[token_B]
        return state, inputs_B3W


def means(values_NW: Tensor, group_N: Tensor) -> Tensor:
    """Return the mean of each group; these means are the effects of both kinds of groups, because both are random."""
    groups = int(group_N.max()) + 1
    sums = values_NW.new_zeros(groups, values_NW.shape[1]).index_add_(0, group_N, values_NW)
    return sums / torch.bincount(group_N, minlength=groups)[:, None]


class Scatter:
    """A record of the scatter at some positions of a run, which changes nothing."""

    def __init__(self, code: Code, labels_BL: Tensor) -> None:
        self.found: list[dict[str, float]] = []
        self._code, self._labels_BL, self._end = code, labels_BL, 0
        self._apart_C = torch.cdist(code.of_product_CW, code.of_product_CW).fill_diagonal_(torch.inf).amin(1)

    def measure(self, carried: Carried, token_B: Tensor) -> Carried:
        self._end += BLOCK
        if self._end in POSITIONS:
            product_B, distance_BC = self._labels_BL[:, self._end - 1], self._code.distances(carried, token_B)
            scatter_B = distance_BC.gather(1, product_B[:, None])[:, 0] / self._apart_C[product_B]
            share = float((distance_BC.argmin(1) == product_B).float().mean())
            self.found.append({"position": self._end, "median": float(scatter_B.median()), "nearest_is_right": share})
        return carried


if __name__ == "__main__":
    main()
