"""Compute the chunked scan of SSD and its explicit gradient; `models.mamba2.ssd` runs them on slices of the batch.

Shapes: `B` batch, `L` length, `H` heads, `P` head width, `G` groups, `N` state, `C` chunks, `Q` chunk length,
`F` = B * C, `K` = H / G * P (the heads of one group side by side).
Source: Dao and Gu 2024 (Mamba2), section 6. Within a chunk the scan is a masked attention; between chunks it is a
recurrence on states.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# The size of the decay matrices computed at once, if one sequence does not need more: enough to fill a GPU, but small
# beside a model's activations.
SLICE_BYTES = 256 * 2**20


class ScanWeights(NamedTuple):
    """The effective parameters of a Mamba2 mixer's convolution and scan; A is negative."""

    conv_CK: Tensor
    conv_bias_C: Tensor
    dt_bias_H: Tensor
    A_H: Tensor
    D_H: Tensor


@dataclass(frozen=True)
class Layout:
    """The division of sequences into `chunks` chunks of `chunk_len` positions; `slice_len` sequences run at once.

    length: the length of the sequences before they are padded at the end to whole chunks.
    """

    length: int
    chunks: int
    chunk_len: int
    slice_len: int


def make_layout(length: int, heads: int, chunk_len: int) -> Layout:
    """Return a layout with chunks of equal length, at most `chunk_len` rounded up to a multiple of 8."""
    chunks = -(-length // chunk_len)
    if chunks == 1:
        chunk_len = length
    else:  # equal chunks need the least padding, and a multiple of 8 suits the matrix units of GPUs
        chunk_len = -(-length // (8 * chunks)) * 8
        chunks = -(-length // chunk_len)
    return Layout(length, chunks, chunk_len, max(1, SLICE_BYTES // (4 * heads * chunks * chunk_len**2)))


@dataclass(frozen=True)
class Chunks:
    """A slice of the batch cut into chunks, with its decays and scores; forward and backward pass start from it."""

    layout: Layout
    x_FQHP: Tensor
    dt_FQH: Tensor
    A_H: Tensor
    B_FGQN: Tensor
    C_FGQN: Tensor
    initial_BHPN: Tensor | None
    u_FQHP: Tensor  # dt x
    cum_FQH: Tensor  # log decay from the start of the chunk up to and including a position
    decay_FHQQ: Tensor  # exp(cum_i - cum_j), 1 above the diagonal
    scores_FHQQ: Tensor  # C_i B_j, 0 above the diagonal; one matrix for all heads if there is one group

    def side_by_side(self, t_FQHP: Tensor) -> Tensor:
        """Reshape (F, Q, H, P) to (F, G, Q, K), so that the heads of a group share one matrix product.

        With one group the result is a view.
        """
        return t_FQHP.unflatten(2, (self.B_FGQN.shape[1], -1)).flatten(3).transpose(1, 2)

    def by_head(self, t_FGQK: Tensor) -> Tensor:
        return t_FGQK.transpose(1, 2).reshape(self.x_FQHP.shape)

    def state_rows(self, t_FHPN: Tensor) -> Tensor:
        """Reshape (F, H, P, N) to (F, G, K, N), in the dtype of x."""
        return t_FHPN.to(self.x_FQHP.dtype).flatten(1, 2).unflatten(1, (self.B_FGQN.shape[1], -1))

    def uncut(self, t_FQ: Tensor) -> Tensor:
        """Reshape (F, Q, ...) to (B, L, ...), without the padding."""
        rows = self.layout.chunks * self.layout.chunk_len
        return t_FQ.reshape(-1, rows, *t_FQ.shape[2:])[:, : self.layout.length]

    def decay_to_end(self) -> Tensor:
        return (self.cum_FQH[:, -1:] - self.cum_FQH).exp()


def cut(layout: Layout, A: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, initial: Tensor | None) -> Chunks:
    """Cut a slice of the batch into chunks; B and C must have the dtype of x."""
    x, dt, B, C = (_fold(t, layout) for t in (x, dt, B, C))
    accurate = torch.promote_types(x.dtype, torch.float32)
    dt, A = dt.to(accurate), A.to(accurate)
    cum_FQH = (dt * A).cumsum(1)
    cum_FHQ = cum_FQH.transpose(1, 2).contiguous()
    # We clamp before exp, because above the diagonal the difference is positive and could overflow.
    decay_FHQQ = (cum_FHQ.unsqueeze(-1) - cum_FHQ.unsqueeze(-2)).clamp_(max=0).exp_()
    B, C = B.transpose(1, 2), C.transpose(1, 2)
    scores_FHQQ = (C @ B.mT).tril_()
    heads, groups = x.shape[2], B.shape[1]
    if groups not in (1, heads):
        scores_FHQQ = scores_FHQQ.repeat_interleave(heads // groups, dim=1)
    u_FQHP = (x * dt.unsqueeze(-1)).to(x.dtype)
    return Chunks(layout, x, dt, A, B, C, initial, u_FQHP, cum_FQH, decay_FHQQ, scores_FHQQ)


def scan(c: Chunks, *, return_state: bool) -> tuple[Tensor, Tensor | None]:
    """Return y (B, L, H, P), and with `return_state` the state after the last position (B, H, P, N), else None."""
    weights_FHQQ = (c.decay_FHQQ * c.scores_FHQQ).to(c.x_FQHP.dtype)
    y_FQHP = (weights_FHQQ @ c.u_FQHP.transpose(1, 2)).transpose(1, 2)
    before_FHPN, last_BHPN = _states(c, return_last=return_state)
    if before_FHPN is not None:
        carried_FQHP = c.by_head(c.C_FGQN @ c.state_rows(before_FHPN).mT)
        y_FQHP = torch.addcmul(y_FQHP, carried_FQHP, c.cum_FQH.exp().unsqueeze(-1)).to(y_FQHP.dtype)
    return c.uncut(y_FQHP), last_BHPN


def _states(c: Chunks, *, return_last: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the states before the chunks (F, H, P, N), and with `return_last` the state after the last chunk.

    Without `return_last`, the second value is None. For one chunk from an empty state, the first value is None.
    """
    initial = None if c.initial_BHPN is None else c.initial_BHPN.to(c.dt_FQH.dtype)
    if c.layout.chunks == 1 and not return_last:
        return initial, None
    v_FQHP = (c.u_FQHP * c.decay_to_end().unsqueeze(-1)).to(c.u_FQHP.dtype)
    added_FGKN = c.side_by_side(v_FQHP).mT @ c.B_FGQN
    added_BCHPN = added_FGKN.reshape(-1, c.layout.chunks, *v_FQHP.shape[2:], added_FGKN.shape[-1])
    decay_BCH11 = c.cum_FQH[:, -1].exp().unflatten(0, (-1, c.layout.chunks))[..., None, None]
    state_BHPN = torch.zeros_like(added_BCHPN[:, 0], dtype=c.dt_FQH.dtype) if initial is None else initial
    before = []
    for chunk in range(c.layout.chunks):
        before.append(state_BHPN)
        if return_last or chunk + 1 < c.layout.chunks:
            state_BHPN = torch.addcmul(added_BCHPN[:, chunk], state_BHPN, decay_BCH11[:, chunk])
    if c.layout.chunks == 1:
        return initial, state_BHPN
    return torch.stack(before, dim=1).flatten(0, 1), state_BHPN if return_last else None


def _fold(t_BL: Tensor, layout: Layout) -> Tensor:
    pad = layout.chunks * layout.chunk_len - layout.length
    if pad:  # dt = 0 neither decays nor feeds the state, so padding at the end does not change it
        t_BL = F.pad(t_BL, (0, 0) * (t_BL.ndim - 2) + (0, pad))
    return t_BL.reshape(-1, layout.chunk_len, *t_BL.shape[2:])


@dataclass
class _Gradient:
    """The gradients so far, to which further terms are added.

    Matrix products are in the dtype of x, and other terms in the dtype of the decays.
    """

    u_FQHP: Tensor
    cum_FQH: Tensor
    B_FGQN: Tensor
    C_FGQN: Tensor
    initial_BHPN: Tensor | None = None


def scan_gradient(c: Chunks, dy_BLHP: Tensor, dstate_BHPN: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, dt, A, B, C and the initial state, given those of y and of the last state."""
    dy_FQHP = _fold(dy_BLHP, c.layout)
    grad = _gradient_within_chunks(c, dy_FQHP)
    if c.layout.chunks > 1 or c.initial_BHPN is not None or dstate_BHPN is not None:
        _add_gradient_between_chunks(grad, c, dy_FQHP, dstate_BHPN)
    ddtA_FQH = grad.cum_FQH.flip(1).cumsum(1).flip(1)
    dA_H = (ddtA_FQH * c.dt_FQH).sum((0, 1))
    ddt_FQH = ddtA_FQH * c.A_H + (grad.u_FQHP * c.x_FQHP).sum(-1, dtype=c.dt_FQH.dtype)
    dx_FQHP = (grad.u_FQHP * c.dt_FQH.unsqueeze(-1)).to(c.x_FQHP.dtype)
    dB, dC = grad.B_FGQN.transpose(1, 2), grad.C_FGQN.transpose(1, 2)
    dx, ddt, dB, dC = (c.uncut(t) for t in (dx_FQHP, ddt_FQH, dB, dC))
    return dx, ddt, dA_H, dB, dC, grad.initial_BHPN


def _gradient_within_chunks(c: Chunks, dy_FQHP: Tensor) -> _Gradient:
    """Return the gradients of u, cum, B and C from y = (decay * scores) u."""
    dtype, groups = c.x_FQHP.dtype, c.B_FGQN.shape[1]
    dy_FHQP, u_FHQP = dy_FQHP.transpose(1, 2), c.u_FQHP.transpose(1, 2)
    weights_FHQQ = (c.decay_FHQQ * c.scores_FHQQ).to(dtype)
    du_FQHP = (weights_FHQQ.mT @ dy_FHQP).transpose(1, 2)
    dscores_FHQQ = c.decay_FHQQ * (dy_FHQP @ u_FHQP.mT)
    dscores_FGQQ = dscores_FHQQ.unflatten(1, (groups, -1)).sum(2).tril_().to(dtype)
    # Row and column sums come from the same matrix, so that their rounding cancels in the later cumulative sum.
    dlog_FHQQ = dscores_FHQQ.mul_(c.scores_FHQQ)
    dcum_FQH = (dlog_FHQQ.sum(-1) - dlog_FHQQ.sum(-2)).transpose(1, 2)
    return _Gradient(du_FQHP, dcum_FQH, dscores_FGQQ.mT @ c.C_FGQN, dscores_FGQQ @ c.B_FGQN)


def _add_gradient_between_chunks(grad: _Gradient, c: Chunks, dy_FQHP: Tensor, dstate_BHPN: Tensor | None) -> None:
    """Add to `grad` the gradients that flow through the states before and after the chunks."""
    before_FHPN, _ = _states(c, return_last=False)
    dbefore_FHPN = None
    if before_FHPN is not None:  # y += exp(cum) C before
        dcarried_FQHP = dy_FQHP * c.cum_FQH.exp().unsqueeze(-1)
        rows_FGKN = c.state_rows(before_FHPN)
        dcarried_FGQK = c.side_by_side(dcarried_FQHP.to(dy_FQHP.dtype))
        grad.C_FGQN = grad.C_FGQN + dcarried_FGQK @ rows_FGKN
        dbefore_FHPN = (dcarried_FGQK.mT @ c.C_FGQN).reshape(before_FHPN.shape)
        grad.cum_FQH = grad.cum_FQH + (dcarried_FQHP * c.by_head(c.C_FGQN @ rows_FGKN.mT)).sum(-1)
    dadded_FHPN, dlog_decay_FH = _gradient_of_states(grad, c, before_FHPN, dbefore_FHPN, dstate_BHPN)
    if dadded_FHPN is None:
        return
    # added = (u exp(cum_end - cum))^T B
    to_end_FQH1 = c.decay_to_end().unsqueeze(-1)
    rows_FGKN = c.state_rows(dadded_FHPN)
    du_FQHP = c.by_head(c.B_FGQN @ rows_FGKN.mT) * to_end_FQH1
    grad.B_FGQN = grad.B_FGQN + c.side_by_side((c.u_FQHP * to_end_FQH1).to(c.u_FQHP.dtype)) @ rows_FGKN
    grad.u_FQHP = grad.u_FQHP + du_FQHP
    dto_end_FQH = (du_FQHP * c.u_FQHP).sum(-1)
    grad.cum_FQH = grad.cum_FQH - dto_end_FQH
    grad.cum_FQH[:, -1] += dto_end_FQH.sum(1) + dlog_decay_FH


def _gradient_of_states(
    grad: _Gradient,
    c: Chunks,
    before_FHPN: Tensor | None,
    dbefore_FHPN: Tensor | None,
    dstate_BHPN: Tensor | None,
) -> tuple[Tensor | None, Tensor | float]:
    """Differentiate the recurrence `state <- decay * state + added` from the last chunk to the first.

    Set `grad.initial_BHPN`, the gradient of the initial state, if there are states before the chunks.

    Returns: the gradients of each chunk's `added` (None if zero) and of its log decay (F, H), or 0.0.
    """
    if before_FHPN is None:  # one chunk from an empty state
        return dstate_BHPN, 0.0
    assert dbefore_FHPN is not None
    if c.layout.chunks == 1 and dstate_BHPN is None:
        grad.initial_BHPN = dbefore_FHPN
        return None, 0.0
    by_chunk = (-1, c.layout.chunks)
    before_BCHPN, dbefore_BCHPN = before_FHPN.unflatten(0, by_chunk), dbefore_FHPN.unflatten(0, by_chunk)
    decay_BCH11 = c.cum_FQH[:, -1].exp().unflatten(0, by_chunk)[..., None, None]
    dstate = torch.zeros_like(before_BCHPN[:, 0]) if dstate_BHPN is None else dstate_BHPN
    dadded, dlog_decay = [], []
    for chunk in reversed(range(c.layout.chunks)):
        dadded.append(dstate)
        kept = dstate * decay_BCH11[:, chunk]
        dlog_decay.append((kept * before_BCHPN[:, chunk]).sum((-1, -2)))
        dstate = kept + dbefore_BCHPN[:, chunk]
    grad.initial_BHPN = dstate
    return torch.stack(dadded[::-1], dim=1).flatten(0, 1), torch.stack(dlog_decay[::-1], dim=1).flatten(0, 1)
