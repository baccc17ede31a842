"""State space duality (SSD) of Mamba2 in plain PyTorch: a chunked scan as matrix products, for every device.

Shapes: `B` batch, `L` length, `H` heads, `P` head width, `G` groups, `N` state, `C` chunks, `Q` chunk length.
Source: Dao and Gu 2024 (Mamba2), section 6: within a chunk the scan is a masked attention, between chunks a recurrence on states.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A chunk of length Q costs Q scores and H*P*N/Q state entries per token and head; 64 balances both for N = 64 to 128 and
# keeps the decay matrices of the published batch (512 x 256 tokens) under 1 GiB.
CHUNK_LEN = 64


def ssd(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    initial_state_BHPN: Tensor | None = None,
    *,
    return_state: bool = False,
    chunk_len: int = CHUNK_LEN,
) -> tuple[Tensor, Tensor | None]:
    """Run h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t over the whole sequence.

    Args: dt is positive (after softplus), 0 where a position is padding: it then neither decays nor feeds the state. A is
        negative. Any L, also one that chunk_len does not divide. Decays are computed in fp32, products in the dtype of x.
    Returns: y of shape (B, L, H, P) in the dtype of x; the state after the last position (B, H, P, N) in fp32, or None
        unless asked for: the state products are skipped where no later position needs them.
    """
    length = x_BLHP.shape[1]
    if length <= chunk_len:
        return _ssd_chunk(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, initial_state_BHPN, return_state=return_state)
    return _ssd_chunks(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, initial_state_BHPN, return_state, chunk_len)


def _decay(dtA_BHL: Tensor) -> tuple[Tensor, Tensor]:
    """Cumulative log decay (..., L) and the lower-triangular decay matrix exp(cum_i - cum_j) for i >= j (..., L, L)."""
    length = dtA_BHL.shape[-1]
    cum = dtA_BHL.cumsum(-1)
    difference = cum.unsqueeze(-1) - cum.unsqueeze(-2)
    # Masked before exp: above the diagonal the difference is positive and would overflow, and its gradient be NaN.
    mask = torch.ones(length, length, dtype=torch.bool, device=cum.device).tril()
    return cum, difference.masked_fill(~mask, float("-inf")).exp()


def _ssd_chunk(x, dt, A, B, C, initial_state, *, return_state):
    """One chunk: attention with decays, plus what the initial state contributes."""
    dtype, heads = x.dtype, x.shape[2]
    dt_BHL = dt.float().transpose(1, 2)
    cum_BHL, decay_BHLL = _decay(dt_BHL * A.float()[:, None])
    x_BHLP = x.transpose(1, 2)
    B_BGLN, C_BGLN = B.transpose(1, 2), C.transpose(1, 2)
    scores_BGLL = C_BGLN @ B_BGLN.transpose(-1, -2)
    weights_BHLL = _to_heads(scores_BGLL, heads) * decay_BHLL
    y_BHLP = (weights_BHLL * dt_BHL.unsqueeze(-2)).to(dtype) @ x_BHLP
    if initial_state is not None:
        from_state_BHLP = _to_heads(C_BGLN, heads).float() @ initial_state.float().transpose(-1, -2)
        y_BHLP = y_BHLP + (from_state_BHLP * cum_BHL.exp().unsqueeze(-1)).to(dtype)
    state = None
    if return_state:
        state = _chunk_state(x_BHLP, dt_BHL, cum_BHL, _to_heads(B_BGLN, heads))
        if initial_state is not None:
            state = state + initial_state.float() * cum_BHL[..., -1].exp()[..., None, None]
    return y_BHLP.transpose(1, 2), state


def _chunk_state(x_HLP: Tensor, dt_HL: Tensor, cum_HL: Tensor, B_HLN: Tensor) -> Tensor:
    """What the positions of a chunk leave in the state at its end: (..., H, P, N) in fp32."""
    to_end = (cum_HL[..., -1:] - cum_HL).exp() * dt_HL
    return (x_HLP.float() * to_end.unsqueeze(-1)).transpose(-1, -2) @ B_HLN.float()


def _to_heads(t_BG: Tensor, heads: int) -> Tensor:
    """Share each group's rows among its heads: (B, G, ...) -> (B, H, ...); a view for one group."""
    groups = t_BG.shape[1]
    return t_BG.expand(-1, heads, *t_BG.shape[2:]) if groups == 1 else t_BG.repeat_interleave(heads // groups, dim=1)


def _ssd_chunks(x, dt, A, B, C, initial_state, return_state, chunk_len):
    """Many chunks: every chunk by itself, the chunk states by a short recurrence, then each state read by its next chunk."""
    batch, length, heads, width = x.shape
    pad = -length % chunk_len
    if pad:  # dt = 0 neither decays nor feeds the state, so padding at the end changes nothing
        x, dt, B, C = (torch.nn.functional.pad(t, (0, 0) * (t.ndim - 2) + (0, pad)) for t in (x, dt, B, C))
    chunks = (length + pad) // chunk_len

    def fold(t: Tensor) -> Tensor:  # (B, C*Q, ...) -> (B*C, Q, ...)
        return t.reshape(batch * chunks, chunk_len, *t.shape[2:])

    x, dt, B, C = fold(x), fold(dt), fold(B), fold(C)
    y, states = _ssd_chunk(x, dt, A, B, C, None, return_state=True)
    states_BCHPN = states.view(batch, chunks, heads, width, -1)
    cum_BCQH = (dt.float() * A.float()).cumsum(1).view(batch, chunks, chunk_len, heads)
    chunk_decay_BCH = cum_BCQH[:, :, -1].exp()
    state = torch.zeros_like(states_BCHPN[:, 0]) if initial_state is None else initial_state.float()
    before = []
    for chunk in range(chunks):
        before.append(state)
        state = state * chunk_decay_BCH[:, chunk, :, None, None] + states_BCHPN[:, chunk]
    before_BCHPN = torch.stack(before, dim=1).view(batch * chunks, heads, width, -1).to(x.dtype)
    C_HQN = _to_heads(C.transpose(1, 2), heads)
    carried = (C_HQN @ before_BCHPN.transpose(-1, -2)).float() * cum_BCQH.view(-1, chunk_len, heads).transpose(
        1, 2
    ).exp().unsqueeze(-1)
    y = (y + carried.to(x.dtype).transpose(1, 2)).reshape(batch, chunks * chunk_len, heads, width)[:, :length]
    return y, state if return_state else None
