"""A question over the rows that a policy has left, through the kernel that a GPU runs."""

from __future__ import annotations

import pytest
import torch
from longread_kernels import prefill, reference
from triton_case import DEVICE, DTYPE, assert_near, random, wide

from longread.attention import causal_attention
from longread.cache import KVCache

NUM_KV_HEADS, HEAD_DIM = 2, 16


@pytest.mark.parametrize("group_size", (1, 3, 4, 7))
@pytest.mark.parametrize("num_rows", (1, 63, 64, 65, 300))
def test_heads_read_what_each_has_left(
    num_rows: int, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens = 5
    end = num_rows + num_tokens
    monkeypatch.setattr("longread.attention.ops.attend_causal", prefill.attend_causal)
    cache = KVCache(1, NUM_KV_HEADS, HEAD_DIM, end, device=DEVICE, dtype=DTYPE)
    cache.k[0], cache.v[0] = random(2, NUM_KV_HEADS, end, HEAD_DIM)
    q = random(num_tokens, NUM_KV_HEADS * group_size, HEAD_DIM, seed=1)
    left = torch.full((NUM_KV_HEADS, num_rows), -1, device=DEVICE)
    left[0, ::3] = torch.arange(0, num_rows, 3, device=DEVICE)
    left[1, : num_rows // 2] = torch.arange(num_rows // 2, device=DEVICE)
    found = causal_attention(q, cache, 0, num_rows, left).view(q.shape)
    own = torch.arange(num_rows, end)
    for head in range(NUM_KV_HEADS):
        rows = torch.cat((left[head][left[head] >= 0].cpu(), own))
        k, v = (wide(slab[0, head])[rows][None] for slab in (cache.k, cache.v))
        heads = slice(head * group_size, (head + 1) * group_size)
        expected = reference.attend_causal_ref(wide(q[:, heads]), k, v, HEAD_DIM**-0.5)
        assert_near(found[:, heads], expected)
