"""The torch twins of the ops that read rows whose keys are cached before RoPE.

Shapes use H_q query heads, H_kv KV heads, G = H_q / H_kv, D head size, S rows that are voted on.
"""

from __future__ import annotations

import torch
from longread_kernels.reference import attend_causal_ref, rope_ref, score_ref
from torch import Tensor

_HIGHEST = 69.31472  # of a score over its norm, e^69.3 = 2^100; fp32 ends at 2^128


def mean_queries_ref(
    q: Tensor, num_voters: int, num_kv_heads: int, cos: Tensor, sin: Tensor
) -> Tensor:
    """The means of the queries of each part of a chunk, at one position.

    q: [T, H_q, D], T at least num_voters; cos, sin: [1, D/2] fp32. Returns
    [H_kv, num_voters * G, D] in q's dtype.
    """
    means = torch.stack([part.mean(dim=0) for part in q.float().tensor_split(num_voters)])
    voters = rope_ref(means, cos, sin).to(q.dtype)  # [N, H_q, D]
    return voters.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)


def soft_votes_ref(
    q: Tensor, k: Tensor, scale: float, first_row: int, tail: int, end: int, *, outer_norm: bool
) -> Tensor:
    """The exponential of each query's score over the query's norm, summed over the queries.

    q: [H_kv, M, D]; k: a slab [H_kv, rows, D]. Rows [first_row, tail) are voted on; norms are of
    these rows (a softmax), or where `outer_norm` of [0, first_row) and [tail, end). Returns
    [H_kv, tail - first_row] fp32.
    """
    scores = score_ref(q, k[:, first_row:tail]).mul_(scale)
    if not outer_norm:
        return torch.softmax(scores, dim=-1).sum(dim=1)
    outer = torch.cat((k[:, :first_row], k[:, tail:end]), dim=1)
    norms = torch.logsumexp(score_ref(q, outer) * scale, dim=-1, keepdim=True)
    return scores.sub_(norms).clamp_(max=_HIGHEST).exp_().sum(dim=1)


def list_rows_ref(votes: Tensor, num_chosen: int, first_row: int, end: int) -> Tensor:
    """The rows before the voted ones, `num_chosen` of these, and the rows after them, ascending.

    votes: [H_kv, S] fp32, none negative, of rows [first_row, first_row + S); num_chosen: from 1 to
    S. Returns [H_kv, first_row + num_chosen + end - first_row - S] int32.
    """
    tail = first_row + votes.shape[1]
    chosen = votes.topk(num_chosen, dim=-1, sorted=False).indices.sort(dim=-1).values + first_row
    first, last = (
        torch.arange(*span, device=votes.device).expand(votes.shape[0], -1)
        for span in ((0, first_row), (tail, end))
    )
    return torch.cat((first, chosen, last), dim=1).to(torch.int32)


def attend_listed_ref(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> Tensor:
    """T tokens, the last of each KV head's list, attend to the list and causally to each other.

    A row's place in its list is its position. q: [T, H_q, D]; k, v: slabs [H_kv, rows, D], keys
    before RoPE; rows: [H_kv, n] ascending; cos, sin: [n or more, D/2] fp32. Returns [T, H_q, D].
    """
    num_places = rows.shape[1]
    turned_k, listed_v = _gathered(k, v, rows, cos, sin)
    own = slice(num_places - q.shape[0], num_places)
    return attend_causal_ref(rope_ref(q, cos[own], sin[own]), turned_k, listed_v, scale)


def attend_placed_ref(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token, the last of each list, attends to the list.

    A row's place in its list is its position. q: [H_q, D]; k, v: slabs [H_kv, rows, D], keys before
    RoPE; rows: [sets, n] int64 ascending, then -1 in empty places, sets one of H_kv and H_q; cos,
    sin: [n or more, D/2] fp32. Returns [H_q, D] and the attention probabilities [H_q, n] fp32.
    """
    num_sets, group_size = rows.shape[0], q.shape[0] // rows.shape[0]
    turned_k, listed_v = _gathered(k, v, rows.clamp(min=0), cos, sin)
    last = ((rows >= 0).sum(dim=1) - 1).repeat_interleave(group_size)
    turned_q = rope_ref(q[:, None], cos[last], sin[last]).view(num_sets, group_size, -1)
    scores = score_ref(turned_q, turned_k) * scale
    probs = torch.softmax(scores.masked_fill((rows < 0)[:, None], float("-inf")), dim=-1)
    out = torch.matmul(probs, listed_v.float()).to(q.dtype)
    return out.view(q.shape), probs.flatten(0, 1)


def _gathered(
    k: Tensor, v: Tensor, rows: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys, turned to the places of their rows in the list, and values, [sets, n, D] both."""
    num_sets, num_places = rows.shape
    owners = torch.arange(num_sets, device=rows.device)[:, None] * k.shape[0] // num_sets
    rows = rows.long()
    turned = rope_ref(k[owners, rows].transpose(0, 1), cos[:num_places], sin[:num_places])
    return turned.transpose(0, 1).contiguous(), v[owners, rows]
