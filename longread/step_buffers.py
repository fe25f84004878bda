"""What a decode step writes to, allocated once: a CUDA graph owns these tensors. Also how the rows
of a cache are dealt out to the programs that choose and attend. Computes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from longread_kernels.tables import IndexLayer, Kept, Query, StandIns
from torch import Tensor

from longread.cache import KVCache
from longread.network import Network
from longread.policies import KernelPlan, StandIn

_SHARE_ROWS = 4096  # rows of a KV head that one program chooses from; 2048 and 8192 were slower
_SHARE_BUDGET = 32  # rows that a share should choose: two of its stripes
_LEAST_SHARE_BUDGET = 8
_PROGRAMS = 264  # two for each of an H100's or H200's 132 multiprocessors
_ROWS_A_PROGRAM = 64  # of a short list of rows: many programs with one tile each
_MOST_SPLITS = 128  # what the merge holds in registers


def most_rows(capacity: int, num_branches: int, branch_rows: int) -> int:
    """Rows that one branch can have, shared ones and its own, in a cache of `capacity` rows."""
    assert num_branches == 1 or branch_rows > 0, "a branch needs rows of its own"
    num_rows = capacity - (num_branches - 1) * branch_rows
    assert num_rows >= branch_rows, "no room for branches"
    return num_rows


def can_choose(plans: Sequence[KernelPlan], capacity: int) -> bool:
    """Whether each budget gives each share of a cache's rows something to choose."""
    budget = _least_budget(plans)
    if budget is None:
        return True
    num_shares = -(-capacity // share_rows(capacity, budget))
    return num_shares == 1 or budget >= _LEAST_SHARE_BUDGET * num_shares


def _least_budget(plans: Sequence[KernelPlan]) -> int | None:
    """Of the plans that choose rows; None where none does."""
    budgets = [plan.budget for plan in plans if plan.index is not None]
    return min((budget for budget in budgets if budget is not None), default=None)


def share_rows(capacity: int, budget: int) -> int:
    """Rows of a share: a whole passage should fit, and a short cache still give many programs."""
    by_budget = _SHARE_BUDGET * capacity // max(budget, 1)
    wanted = min(_SHARE_ROWS, max(by_budget, capacity // 8, 256))
    return 1 << (wanted - 1).bit_length()


def _sizes(plan: KernelPlan, num_rows: int) -> tuple[int, int, int, int, int]:
    """A branch's line of `Kept.branches`, before rows are shared."""
    if plan.budget is None:
        return 0, 0, num_rows, 0, 0  # all rows are in the window
    num_listed = min(plan.budget, num_rows)
    num_chosen = num_listed if plan.index is not None else 0
    return 0, plan.sink_size, plan.window_size, num_listed, num_chosen


class StepBuffers:
    """The tensors of one step, a branch for each plan; H_q, H_kv, D and C are the model's."""

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        plans: Sequence[KernelPlan],
        index: IndexLayer | None,
        branch_rows: int,
    ) -> None:
        config, device, count = network.config, network.device, len(plans)
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = config.head_dim
        num_sets = num_heads if plans[0].apart else num_kv_heads
        num_rows = most_rows(cache.capacity, count, branch_rows)

        def empty(*shape: int, dtype: torch.dtype = network.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.tokens = torch.zeros(count, dtype=torch.int64, device=device)
        state = torch.zeros(count, 3, dtype=torch.int32, device=device)
        sizes = [_sizes(plan, num_rows) for plan in plans]
        _, sink_size, window_size, self.budget, _ = map(max, zip(*sizes, strict=True))
        branches = torch.tensor(sizes, dtype=torch.int32, device=device) if count > 1 else None
        self.kept = Kept(state, sink_size, window_size, branches, branch_rows)
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
        shape = (config.num_hidden_layers, count, num_sets, self.budget)
        self.chosen = torch.full(shape, -1, dtype=torch.int32, device=device)
        num_own = share_rows(num_rows, _least_budget(plans) or 0)
        num_shares = -(-num_rows // num_own)
        self.votes = empty(count * num_sets, num_shares, num_own, dtype=torch.float32)
        self.queries = [self.query] * config.num_hidden_layers
        self.stand_ins: list[StandIns] = []  # of each layer, where a plan has any
        if any(plan.stand_in for plan in plans):
            assert num_sets == num_kv_heads, "a stand-in is a KV head's"
            layers = config.num_hidden_layers
            k, v = torch.zeros(2, layers, count, num_kv_heads, head_dim, device=device)
            log_weight = torch.full((layers, count, num_kv_heads), -torch.inf, device=device)
            unread = torch.zeros(layers, count * num_sets, num_shares, device=device)
            norm = torch.zeros(layers, count * num_heads, device=device)
            self.stand_ins = [
                StandIns(*parts) for parts in zip(k, v, log_weight, unread, norm, strict=True)
            ]
            self.queries = [replace(self.query, norm=own.norm) for own in self.stand_ins]
        most = min(_MOST_SPLITS, max(1, _PROGRAMS // num_kv_heads), -(-num_rows // 64))
        few = -(-(self.budget + window_size + sink_size + 64) // _ROWS_A_PROGRAM)
        few = few if few <= min(3 * most, _MOST_SPLITS) else most
        splits = {True: most, False: min(few, max(1, 8 * _PROGRAMS // (count * num_sets)))}
        self.log_sum = empty(count * num_heads, dtype=torch.float32)
        self.parts = {
            dense: empty(count * num_heads, num_splits, head_dim, dtype=torch.float32)
            for dense, num_splits in splits.items()
        }
        self.part_stats = {
            dense: empty(count * num_heads, num_splits, 2, dtype=torch.float32)
            for dense, num_splits in splits.items()
        }

    def put_stand_ins(self, branch: int, stand_ins: Sequence[StandIn | None]) -> None:
        """Take in what stands for unread rows in a branch's turn, of each layer."""
        for own, stand_in in itertools.zip_longest(self.stand_ins, stand_ins):
            own.log_weight[branch] = -torch.inf
            if stand_in is not None:
                own.k[branch], own.v[branch] = stand_in.k, stand_in.v
                own.log_weight[branch] = stand_in.log_weight
