"""The kernels of a prefill by selection beside their torch twins, on random rows."""

from __future__ import annotations

import torch
from longread_kernels import dispatch as ops
from longread_kernels import reference_gathered as twins
from torch import Tensor

from longread.errors import LongreadError
from longread.model import Decoder
from longread.past_window import Reading

_TOLERANCE = 0.01  # relative RMS, of two-byte floats


@torch.inference_mode()
def check_kernels(
    decoder: Decoder, reading: Reading | None = None, num_rows: int = 8192
) -> dict[str, float]:
    """Each op's distance from its twin in float32, relative RMS; {} where the twins themselves run.

    num_rows: before the chunk. Raises LongreadError over 1 %.
    """
    reading = reading or Reading()
    first, local, num_chosen = reading.sink_size, reading.window_size, reading.budget
    end = num_rows + reading.chunk_tokens
    config, device = decoder.config, decoder.device
    num_kv_heads, head_dim = config.num_key_value_heads, config.head_dim
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        values = torch.empty(shape, device=device, dtype=decoder.dtype)
        return values.normal_(generator=generator)

    q = random(reading.chunk_tokens, config.num_attention_heads, head_dim)
    if not ops.on_triton(q):
        return {}
    k, v = random(2, num_kv_heads, end, head_dim)
    cos, sin = decoder.network.rope_rows(0, num_rows)
    edge, scale = (cos[local : local + 1], sin[local : local + 1]), head_dim**-0.5
    voters = ops.mean_queries(q, reading.num_voters, num_kv_heads, *edge)
    spans = (first, num_rows - local, num_rows)
    votes, outer_votes = (
        ops.soft_votes(voters, k, scale, *spans, outer_norm=outer) for outer in (False, True)
    )
    rows = ops.list_rows(votes, num_chosen, first, end)
    best = twins.list_rows_ref(votes, num_chosen, first, end)
    chosen, best = (
        votes.gather(1, listed[:, first : first + num_chosen].long() - first)
        for listed in (rows, best)
    )
    wide_q, wide_k, wide_v = q.float(), k.float(), v.float()
    one, one_shares = ops.attend_placed(q[-1], k, v, rows, cos, sin, scale)
    expected_one, expected_shares = twins.attend_placed_ref(
        wide_q[-1], wide_k, wide_v, rows, cos, sin, scale
    )
    pairs = {
        "mean queries": (
            voters,
            twins.mean_queries_ref(wide_q, reading.num_voters, num_kv_heads, *edge),
        ),
        "votes": (votes, twins.soft_votes_ref(voters, k, scale, *spans, outer_norm=False)),
        "votes with an outer norm": (
            outer_votes,
            twins.soft_votes_ref(voters, k, scale, *spans, outer_norm=True),
        ),
        "chosen votes": (chosen.sort(dim=1).values, best.sort(dim=1).values),
        "attention of a chunk": (
            ops.attend_listed(q, k, v, rows, cos, sin, scale),
            twins.attend_listed_ref(wide_q, wide_k, wide_v, rows, cos, sin, scale),
        ),
        "attention of a token": (one, expected_one),
        "shares of a token": (one_shares, expected_shares),
    }
    found = {}
    for name, (ours, reference) in pairs.items():
        difference = float((ours.float() - reference).norm() / reference.norm())
        if not difference <= _TOLERANCE:
            raise LongreadError(
                f"{name}: the kernel differs from torch by {difference:.2%} relative RMS: "
                "nothing is timed"
            )
        found[name] = difference
    return found
