"""An implicit language model in 200 lines of PyTorch, to read. The library computes the same, faster.

    python examples/implicit_in_200_lines.py [--words WORDS]

A Mamba2 layer f is iterated to its fixed point z* = f(z*, x), and only converged state goes from token to token.
Equations are numbered as in "Implicit Language Models are RNNs" (Schöne et al., ICML 2025). The weights are a trained
model of this project: one layer that multiplies permutations of five things (the group S5), trained on words of 32
tokens.

Shapes: `B` words, `L` tokens, `D` model width, `I` inner width, `H` heads of width `P`, `N` state, `V` vocabulary,
`K` taps of the convolution, `C` = I + 2 N convolved channels, `E` = I + C + H outputs of the in-projection.
"""

import argparse
import itertools
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional as F

WEIGHTS = Path(__file__).parents[1] / "implicit_llm/trained/s5-state-passing-s0/model.safetensors"
I, H, P, N, K = 1024, 16, 64, 128, 4
TAU, TOL, MAX_ITER = 0.8, 0.05, 128


def load(path=WEIGHTS):
    """The model's tensors by name, ready for a gradient."""
    return {name.removeprefix("backbone."): t.requires_grad_() for name, t in load_file(path).items()}


# The layer -----------------------------------------------------------------------------------------------------------


def rms_norm(x, weight, eps=1e-5):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def weight_norm(w, name):
    """Every projection is weight-normalised: W = g v / |v|, a row at a time."""
    g, v = w[f"{name}.g"], w[f"{name}.v"]
    return g * v / v.flatten(1).norm(dim=1).view_as(g)


def inject(w, ids_BL):
    """What f knows of the input: a projection of the embedding, added to the in-projection of the layer."""
    x_BLD = rms_norm(w["embeddings.weight"][ids_BL], w["injection.norm.weight"])
    return F.linear(x_BLD, weight_norm(w, "injection.proj"), w["injection.proj.bias"])


def f(w, z_BLD, x_BLE, state=None):
    """One evaluation of f, Eqs. 6 and 7, on tokens that follow `state`. Returns: f(z, x), and the state after them.

    state: h (B, H, P, N) and the last K - 1 inputs of the convolution (B, K - 1, C), both of the token before.
    """
    m = "layers.0.mixer"
    u_BLD = rms_norm(z_BLD, w["layers.0.norm.weight"])
    projected_BLE = F.linear(u_BLD, weight_norm(w, f"{m}.in_proj")) + x_BLE
    gate_BLI, c_BLC, dt_BLH = projected_BLE.split([I, I + 2 * N, H], dim=-1)
    B, L, C = c_BLC.shape
    h_BHPN, past_BKC = state or (z_BLD.new_zeros(B, H, P, N), z_BLD.new_zeros(B, K - 1, C))

    c_BLC = torch.cat([past_BKC, c_BLC], dim=1)  # a causal convolution looks back K - 1 tokens
    past_BKC = c_BLC[:, L:]
    taps_C1K = weight_norm(w, f"{m}.conv1d")
    c_BLC = F.silu(F.conv1d(c_BLC.mT, taps_C1K, w[f"{m}.conv1d.bias"], groups=C).mT)

    v_BLI, b_BLN, r_BLN = c_BLC.split([I, N, N], dim=-1)  # values; what to write into the state, what to read from it
    v_BLHP = v_BLI.view(B, L, H, P)
    dt_BLH = F.softplus(dt_BLH + w[f"{m}.dt_bias"])
    decay_BLH = torch.exp(-dt_BLH * w[f"{m}.A_log"].exp())
    y_BLHP = []
    for t in range(L):  # Eq. 6: h_t = Lambda(z_t, x_t) h_{t-1} + u(z_t, x_t); linear in h, so a GPU scans in parallel
        u_BHPN = (dt_BLH[:, t, :, None] * v_BLHP[:, t])[..., None] * b_BLN[:, t, None, None, :]
        h_BHPN = decay_BLH[:, t, :, None, None] * h_BHPN + u_BHPN
        y_BLHP.append(h_BHPN @ r_BLN[:, t, None, :, None])
    y_BLHP = torch.stack(y_BLHP, dim=1)[..., 0] + w[f"{m}.D"][:, None] * v_BLHP
    y_BLI = rms_norm(y_BLHP.flatten(2) * F.silu(gate_BLI), w[f"{m}.norm.weight"])
    out_BLD = z_BLD + F.linear(y_BLI, weight_norm(w, f"{m}.out_proj"))  # Eq. 7, with the residual connection
    return rms_norm(out_BLD, w["norm_f.weight"]), (h_BHPN, past_BKC)


def logits(w, z_BLD):
    return z_BLD @ w["embeddings.weight"].T  # the head is tied to the embedding


# The fixed point -----------------------------------------------------------------------------------------------------


def relative_residual(z_BLD, fz_BLD):
    """|f(z) - z| / |f(z)| of each token."""
    return (fz_BLD - z_BLD).norm(dim=-1) / (fz_BLD.norm(dim=-1) + 1e-8)


@torch.no_grad()
def solve(w, x_BLE, state=None, tau=TAU, tol=TOL, max_iter=MAX_ITER):
    """Iterate z <- (1 - tau) z + tau f(z, x) until every token of a word is below `tol`: Eqs. 8 and 9 hold there.

    A token keeps the iterate at which the worst residual up to it is lowest. Returns: z (B, L, D), and the residuals
    (B, L) of all iterations.
    """
    z_BLD = torch.zeros(*x_BLE.shape[:2], w["norm_f.weight"].numel())
    best_BLD, best_BL = z_BLD.clone(), torch.full(z_BLD.shape[:2], torch.inf)
    is_open_B = torch.ones(len(z_BLD), dtype=torch.bool)
    residuals = []
    while is_open_B.any() and len(residuals) < max_iter:
        fz_BLD, _ = f(w, z_BLD, x_BLE, state)
        residuals.append(relative_residual(z_BLD, fz_BLD))
        worst_BL = residuals[-1].cummax(1).values  # the last is that of the word
        z_BLD = torch.lerp(z_BLD, fz_BLD, tau)
        better_BL = is_open_B[:, None] & (worst_BL < best_BL)
        best_BLD[better_BL], best_BL[better_BL] = z_BLD[better_BL], worst_BL[better_BL]
        is_open_B &= worst_BL[:, -1] >= tol
    return best_BLD, residuals


@torch.no_grad()
def read(w, ids_BL, block_len):
    """Solve block after block, each from the converged state of the tokens before it; one f closes a block.

    Blocks of one token are the sequential mode, which generates; one block of all tokens is the simultaneous mode.
    f is causal, so both have the same fixed point. Returns: logits (B, L, V), and how often f was evaluated.
    """
    state, outputs, evaluations = None, [], 0
    for block_BLE in inject(w, ids_BL).split(block_len, dim=1):
        z_BLD, residuals = solve(w, block_BLE, state)
        z_BLD, state = f(w, z_BLD, block_BLE, state)
        outputs.append(logits(w, z_BLD))
        evaluations += len(residuals) + 1
    return torch.cat(outputs, dim=1), evaluations


# The gradient --------------------------------------------------------------------------------------------------------


def phantom_loss(w, ids_BL, labels_BL, phantom_steps=4, max_iter=MAX_ITER):
    """The training loss: solve without gradient, undamped, then take a few damped steps that carry it (Eq. 5).

    The exact gradient would solve a linear system in I - df/dz (Eq. 4). Memory grows with these steps only.
    """
    x_BLE = inject(w, ids_BL)
    z_BLD, _ = solve(w, x_BLE, tau=1.0, max_iter=max_iter)
    for _ in range(phantom_steps):
        z_BLD = torch.lerp(z_BLD, f(w, z_BLD, x_BLE)[0], TAU)
    return F.cross_entropy(logits(w, z_BLD).flatten(0, 1), labels_BL.flatten())


def unrolled_loss(w, ids_BL, labels_BL, steps):
    """The same loss with a gradient through all iterations, as in the bounded phase of the curriculum."""
    x_BLE = inject(w, ids_BL)
    z_BLD, _ = f(w, torch.zeros(*x_BLE.shape[:2], w["norm_f.weight"].numel()), x_BLE)
    for _ in range(steps - 1):
        z_BLD = torch.lerp(z_BLD, f(w, z_BLD, x_BLE)[0], TAU)
    return F.cross_entropy(logits(w, z_BLD).flatten(0, 1), labels_BL.flatten())


# The word problem, and what the file shows ---------------------------------------------------------------------------


def words(count, length, seed=0):
    """Random permutations of five things, and the product of all up to each token, as indices; (B, L) each."""
    elements = list(itertools.permutations(range(5)))
    index = {permutation: number for number, permutation in enumerate(elements)}
    table = torch.tensor([[index[tuple(a[i] for i in b)] for b in elements] for a in elements])  # (a b)(i) = a(b(i))
    ids_BL = torch.randint(len(elements), (count, length), generator=torch.Generator().manual_seed(seed))
    products = itertools.accumulate(ids_BL.unbind(1), lambda product_B, id_B: table[product_B, id_B])
    return ids_BL, torch.stack(list(products), dim=1)


def main(count=8, length=128):
    w = load()
    ids_BL, labels_BL = words(count, length)
    for name, block_len in {"one token at a time": 1, "8 tokens at a time": 8, "the first 32 at once": 32}.items():
        end = 32 if block_len == 32 else length
        out_BLV, evaluations = read(w, ids_BL[:, :end], block_len)
        right = (out_BLV.argmax(-1) == labels_BL[:, :end]).float().mean()
        print(f"{name}: {right:.1%} of {count} x {end} answers right, {evaluations} evaluations of f one after another")

    print("\nThe fixed point of one word of 16 tokens: the residual of its tokens 1, 4, 8 and 16")
    _, residuals = solve(w, inject(w, ids_BL[:1, :16]))
    for iteration in range(0, len(residuals), 4):
        shown = "  ".join(f"{residuals[iteration][0, token - 1]:.3f}" for token in (1, 4, 8, 16))
        print(f"iteration {iteration + 1:2d}:  {shown}")

    print("\nThe gradient of the loss of 4 words of 16 tokens, against one through 40 iterations")
    batch, name = (ids_BL[:4, :16], labels_BL[:4, :16]), "layers.0.mixer.in_proj.v"
    (exact,) = torch.autograd.grad(unrolled_loss(w, *batch, steps=40), w[name])
    for steps in (1, 2, 4, 8):
        (phantom,) = torch.autograd.grad(phantom_loss(w, *batch, phantom_steps=steps), w[name])
        cosine = F.cosine_similarity(phantom.flatten(), exact.flatten(), dim=0)
        print(f"{steps} phantom steps: cosine {cosine:.3f}, size {phantom.norm() / exact.norm():.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=8, help="words of 128 tokens to read (default: %(default)s)")
    main(parser.parse_args().words)
