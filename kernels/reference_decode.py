"""The torch twin of every op of the decode step on the GPU; same signatures, and it may sync."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from longread_kernels.reference import rms_norm_ref, rope_append_ref
from longread_kernels.tables import NORM_ROWS, STRIPE, IndexLayer, Kept, Query, StandIns
from torch import Tensor


def matvec_ref(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> None:
    """out = weight . norm(x) + bias, through SwiGLU where `gated`, plus the residual."""
    if norm is not None:
        x = rms_norm_ref(x, norm, eps)
    result = F.linear(x, weight, bias)
    if gated:
        gate, up = result.chunk(2, dim=-1)
        result = F.silu(gate) * up
    if residual is not None:
        result = result + residual
    out.copy_(result)


def append_token_ref(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    kept: Kept,
    k: Tensor,
    v: Tensor,
    query: Query,
    index: IndexLayer | None,
    *,
    voted: bool,
) -> None:
    """Norm and rotate one token's heads, write its K, V and index row, and code its queries."""
    row = int(kept.state.view(3)[0])
    q = rope_append_ref(heads[None], cos[row : row + 1], sin[row : row + 1], norms, eps, k, v, row)[
        0
    ]
    query.q.copy_(q)
    if voted:
        query.norm.copy_(vote_norms_ref(q, k, kept))
    if index is None or index.is_exact:
        return
    assert index.q_basis is not None and index.q_offset is not None
    assert index.k_basis is not None and index.k_mean is not None
    grouped = q.reshape(k.shape[0], -1, k.shape[2]).to(index.q_basis.dtype)
    values = torch.matmul(grouped, index.q_basis).flatten(0, 1)
    largest = 127.0 if index.rows.dtype == torch.int8 else 448.0
    scale = values.abs().amax(dim=1).clamp(min=1e-12) / largest
    query.codes.copy_(_rounded(values / scale[:, None], index.rows.dtype))
    query.scale.copy_(scale)
    query.offset.copy_(torch.matmul(grouped, index.q_offset[..., None]).flatten())
    new_k = k[:, row].to(index.q_basis.dtype) - index.k_mean
    values = torch.matmul(new_k[:, None], index.k_basis)[:, 0]
    index.rows[:, row] = _rounded(values.clamp(-largest, largest), index.rows.dtype)


def vote_norms_ref(q: Tensor, k: Tensor, kept: Kept) -> Tensor:
    """The log-sum-exp of each head's scores on the sinks and the newest rows but the token's own.

    q: [H_q, D]; k: [H_kv, capacity, D]; returns [H_q], 0 where there are no such rows.
    """
    row = int(kept.state.view(3)[0])
    sinks = range(min(kept.sink_size, row + 1, NORM_ROWS))
    always = kept_rows_ref(kept).tolist()
    tail = row + 1 - next(n for n in range(len(always) + 1) if row - n not in always)
    window = range(max(tail, len(sinks)), row)
    newest = window[max(len(window) - (NORM_ROWS - len(sinks)), 0) :]
    rows = torch.tensor([*sinks, *newest], dtype=torch.int64, device=q.device)
    if not rows.shape[0]:
        return q.new_zeros(q.shape[0])
    grouped = q.reshape(k.shape[0], -1, q.shape[1])
    scores = torch.matmul(grouped, k[:, rows].transpose(1, 2)) * q.shape[1] ** -0.5
    return torch.logsumexp(scores, dim=2).flatten()


def votes_ref(query: Query, index: IndexLayer, num_rows: int, *, summed: bool) -> Tensor:
    """The vote of each row for each KV head, [H_kv, num_rows], as natural logarithms."""
    num_kv_heads = index.rows.shape[0]
    rows = index.rows[:, :num_rows].double()
    codes = query.codes.double().reshape(num_kv_heads, -1, rows.shape[2])
    scores = torch.matmul(codes, rows.transpose(1, 2))
    scores *= query.scale.double().reshape(num_kv_heads, -1, 1)
    scores += (query.offset - query.norm).double().reshape(num_kv_heads, -1, 1)  # [H_kv, G, S]
    return torch.logsumexp(scores, dim=1) if summed else scores.amax(dim=1)


def choose_rows_ref(
    query: Query,
    index: IndexLayer,
    kept: Kept,
    votes: Tensor,
    chosen: Tensor,
    *,
    summed: bool,
    unread: Tensor | None = None,
) -> None:
    """Write the rows with the best votes that are not kept anyway, share by share."""
    num_rows, budget, num_shares = int(kept.state.view(3)[0]) + 1, chosen.shape[1], votes.shape[1]
    ranking = votes_ref(query, index, num_rows, summed=summed)
    ranking[:, kept_rows_ref(kept)] = -torch.inf
    owner = torch.arange(num_rows, device=ranking.device) // STRIPE % num_shares
    chosen.fill_(-1)
    for share in range(num_shares):
        rows = (owner == share).nonzero().flatten()
        first, last = budget * share // num_shares, budget * (share + 1) // num_shares
        for head in range(ranking.shape[0]):
            best, order = ranking[head, rows].sort(descending=True)
            taken = rows[order[best > -torch.inf][: last - first]]
            chosen[head, first : first + taken.shape[0]] = taken.to(torch.int32)
            if unread is not None:
                unread[head, share] = best[taken.shape[0] :].exp().sum()


def kept_rows_ref(kept: Kept) -> Tensor:
    """The rows that every step reads, in the order in which attention lists them."""
    last, question, question_end = kept.state.view(3).tolist()
    num_rows = last + 1
    window = max(num_rows - kept.window_size, 0)
    ranges = (
        range(min(kept.sink_size, num_rows)),
        range(question, question_end),
        range(window, num_rows),
    )
    rows = sorted({row for part in ranges for row in part})
    return torch.tensor(rows, dtype=torch.int64, device=kept.state.device)


def attend_token_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Kept,
    chosen: Tensor | None,
    scale: float,
    out: Tensor,
    parts: Tensor,
    part_stats: Tensor,
    *,
    log_sum: Tensor,
    logits: Tensor | None = None,
    stand_ins: StandIns | None = None,
) -> None:
    """Softmax attention of one token over the kept rows, the chosen ones and stand-ins."""
    num_kv_heads = k.shape[0]
    for head, rows in enumerate(_attended_rows(kept, chosen, num_kv_heads)):
        group = slice(head * q.shape[0] // num_kv_heads, (head + 1) * q.shape[0] // num_kv_heads)
        values = v[head, rows].float()
        scores = torch.matmul(q[group].float(), k[head, rows].float().T) * scale
        if logits is not None:
            logits[group, : rows.shape[0]] = scores / torch.tensor(2.0).log()
        if stand_ins is not None:
            added = stand_in_weights_ref(q, stand_ins, scale)[group]
            scores = torch.cat((scores, added[:, None].float()), dim=1)
            values = torch.cat((values, stand_ins.v[:, head].float()))
        out[group] = torch.matmul(torch.softmax(scores, dim=1), values).to(q.dtype)
        log_sum[group] = torch.logsumexp(scores, dim=1) / torch.tensor(2.0).log()


def stand_in_weights_ref(q: Tensor, stand_ins: StandIns, scale: float) -> Tensor:
    """The logarithm of what each head's stand-in counts, of one branch, [H_q]."""
    grouped = q.view(stand_ins.k.shape[1], -1, q.shape[1]).to(stand_ins.k.dtype)  # [H_kv, G, D]
    by_key = torch.einsum("hgd,hd->hg", grouped, stand_ins.k[0]) * scale
    by_key += stand_ins.log_weight[0][:, None]
    votes = stand_ins.unread.sum(dim=1) / grouped.shape[1]
    by_votes = stand_ins.norm.view_as(by_key) + votes.log()[:, None]
    return torch.logaddexp(by_key, by_votes).flatten()


def add_mass_ref(
    logits: Tensor,
    log_sum: Tensor,
    kept: Kept,
    chosen: Tensor | None,
    mass: Tensor,
    selected: Tensor,
) -> None:
    """Add each row's attention probability and count it, for each query head of its KV head."""
    num_kv_heads, num_counted = mass.shape
    probs = torch.exp2(logits - log_sum[:, None]).reshape(num_kv_heads, -1, logits.shape[1])
    for head, rows in enumerate(_attended_rows(kept, chosen, num_kv_heads)):
        counted = rows < num_counted
        mass[head, rows[counted]] += probs[head, :, : rows.shape[0]].sum(dim=0)[counted]
        selected[head, rows[counted]] += probs.shape[1]


def _attended_rows(kept: Kept, chosen: Tensor | None, num_kv_heads: int) -> list[Tensor]:
    if chosen is None:
        rows = torch.arange(int(kept.state.view(3)[0]) + 1, device=kept.state.device)
        return [rows] * num_kv_heads
    always = kept_rows_ref(kept)
    return [
        torch.cat((always, chosen[head][chosen[head] >= 0].long())) for head in range(num_kv_heads)
    ]


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.round().to(dtype) if dtype == torch.int8 else values.float().to(dtype)
