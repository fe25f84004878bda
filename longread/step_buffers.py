"""What a decode step writes to, allocated once: a CUDA graph owns these tensors. Also how the rows
of a cache are dealt out to the programs that choose and attend. Computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from longread_kernels.tables import IndexLayer, Kept, Query
from torch import Tensor

from longread.cache import KVCache
from longread.network import Network
from longread.policies import KernelPlan

_SHARE_ROWS = 4096  # rows of a KV head that one program chooses from; 2048 and 8192 were slower
_SHARE_BUDGET = 32  # rows that a share should choose: two of its stripes
_LEAST_SHARE_BUDGET = 8
_PROGRAMS = 264  # two for each of an H100's or H200's 132 multiprocessors
_ROWS_A_PROGRAM = 64  # of a short list of rows: many programs with one tile each
_MOST_SPLITS = 128  # what the merge holds in registers


@dataclass(frozen=True)
class Branches:
    """Several answers on one document: all read the first `num_shared` rows of a cache, and each
    has room for `branch_rows` rows of its own behind them, one branch's after the other's.
    """

    count: int = 1
    num_shared: int = 0
    branch_rows: int = 0

    def rows(self, capacity: int) -> int:
        """Rows that one branch can have in a cache of `capacity` rows."""
        if self.count == 1:
            return capacity
        assert self.num_shared + self.count * self.branch_rows <= capacity, "no room for branches"
        assert self.branch_rows > 0, "a branch needs rows of its own"
        return self.num_shared + self.branch_rows


def can_choose(plan: KernelPlan, capacity: int) -> bool:
    """Whether the budget gives each share of a cache's rows something to choose."""
    if plan.budget is None:
        return True
    num_shares = -(-capacity // _share_rows(capacity, plan.budget))
    return num_shares == 1 or plan.budget >= _LEAST_SHARE_BUDGET * num_shares


def _share_rows(capacity: int, budget: int) -> int:
    """A share should take a whole passage; a short cache should still give many programs."""
    by_budget = _SHARE_BUDGET * capacity // max(budget, 1)
    wanted = min(_SHARE_ROWS, max(by_budget, capacity // 8, 256))
    return 1 << (wanted - 1).bit_length()


class StepBuffers:
    """The tensors of one step of B branches; H_q, H_kv, D and C are the model's."""

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        plan: KernelPlan,
        index: IndexLayer | None,
        branches: Branches,
    ) -> None:
        config, device = network.config, network.device
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim, count = config.head_dim, branches.count
        num_rows = branches.rows(cache.capacity)

        def empty(*shape: int, dtype: torch.dtype = network.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.tokens = torch.zeros(count, dtype=torch.int64, device=device)
        state = torch.zeros(count, 3, dtype=torch.int32, device=device)
        self.kept = Kept(
            state, plan.sink_size, plan.window_size, branches.num_shared, branches.branch_rows
        )
        self.hidden = empty(count, config.hidden_size)
        self.heads = empty(count * (num_heads + 2 * num_kv_heads), head_dim)
        self.attended = empty(count * num_heads, head_dim)
        self.gated = empty(count, config.intermediate_size)
        self.logits = empty(count, config.vocab_size, dtype=torch.float32)
        q = empty(count * num_heads, head_dim)
        codes = q
        if index is not None and not index.is_exact:
            codes = empty(count * num_heads, index.rows.shape[2], dtype=index.rows.dtype)
        self.query = Query(
            q,
            codes,
            torch.full((count * num_heads,), head_dim**-0.5, device=device),
            torch.zeros(count * num_heads, device=device),
            torch.zeros(count * num_heads, device=device),
        )
        self.budget = min(plan.budget or 0, num_rows)
        shape = (config.num_hidden_layers, count, num_kv_heads, self.budget)
        self.chosen = torch.full(shape, -1, dtype=torch.int32, device=device)
        share_rows = _share_rows(num_rows, self.budget)
        num_shares = -(-num_rows // share_rows)
        self.votes = empty(count * num_kv_heads, num_shares, share_rows, dtype=torch.float32)
        most = min(_MOST_SPLITS, max(1, _PROGRAMS // num_kv_heads), -(-num_rows // 64))
        num_listed = self.budget + plan.window_size + plan.sink_size
        few = -(-(num_listed + 64) // _ROWS_A_PROGRAM)
        splits = {True: most, False: few if few <= min(3 * most, _MOST_SPLITS) else most}
        self.log_sum = empty(count * num_heads, dtype=torch.float32)
        self.parts = {
            dense: empty(count * num_heads, num_splits, head_dim, dtype=torch.float32)
            for dense, num_splits in splits.items()
        }
        self.part_stats = {
            dense: empty(count * num_heads, num_splits, 2, dtype=torch.float32)
            for dense, num_splits in splits.items()
        }
