"""The decode step on a GPU: Triton kernels over static buffers, captured once as CUDA graphs.

Owns the buffers, the capture and the replay; what a step computes is what `Decoder.decode` computes
with torch operations. Positions and lengths live on the device and nothing inside a step waits for
the host, which only picks the graph: one that chooses rows, one that reads the rows of the last
choice (`reselect`), and one that reads all rows.
"""

from __future__ import annotations

import weakref

import torch
from longread_kernels import append_token, attend, linear, mass, topk
from longread_kernels.tables import IndexLayer, Kept, Query
from torch import Tensor

from longread.cache import KVCache
from longread.network import Network
from longread.policies import KernelPlan, Turn
from longread.policies.kept import kept_ranges
from longread.trace import Trace

_SHARE_ROWS = 2048  # rows of a KV head that one program chooses from
_MOST_SHARE_ROWS = 16384
_SHARE_BUDGET = 32  # rows that a share should choose: two of its stripes
_LEAST_SHARE_BUDGET = 8
_PROGRAMS = 264  # two for each of an H100's or H200's 132 multiprocessors
_ROWS_A_PROGRAM = 64  # of a short list of rows: many programs with one tile each
_MOST_SPLITS = 128  # what the merge holds in registers


def can_choose(plan: KernelPlan, capacity: int) -> bool:
    """Whether the budget gives each share of a cache's rows something to choose."""
    if plan.budget is None:
        return True
    num_shares = -(-capacity // _share_rows(capacity, plan.budget))
    return num_shares == 1 or plan.budget >= _LEAST_SHARE_BUDGET * num_shares


def _share_rows(capacity: int, budget: int) -> int:
    """A share should take a whole passage; a short cache should still give many programs."""
    by_budget = _SHARE_BUDGET * capacity // max(budget, 1)
    wanted = max(by_budget, min(_SHARE_ROWS, capacity // 8), 256)
    return min(_MOST_SHARE_ROWS, 1 << (wanted - 1).bit_length())


class StepGraph:
    """The decode step of one policy on one cache. Rows past `cache.length` may be overwritten."""

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        plan: KernelPlan,
        num_counted: int | None,
    ) -> None:
        """num_counted: rows whose mass and choices are counted, or None for no trace."""
        config = network.config
        self._network = network
        self._cache = cache
        self._slabs = (cache.k, cache.v)
        self.plan = plan
        self._indexes: list[IndexLayer] = []
        if plan.index is not None:
            self._indexes = [plan.index.layer(i) for i in range(config.num_hidden_layers)]
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim, capacity = config.head_dim, cache.capacity

        def empty(*shape: int, dtype: torch.dtype = network.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=network.device)

        self._token = torch.zeros(1, dtype=torch.int64, device=network.device)
        self._state = torch.zeros(3, dtype=torch.int32, device=network.device)
        self._kept = Kept(self._state, plan.sink_size, plan.window_size)
        self._hidden = empty(config.hidden_size)
        self._heads = empty(num_heads + 2 * num_kv_heads, head_dim)
        self._attended = empty(num_heads, head_dim)
        self._gated = empty(config.intermediate_size)
        self._logits = empty(config.vocab_size, dtype=torch.float32)
        self._cos, self._sin = network.rope_rows(0, min(capacity, config.window))
        q = empty(num_heads, head_dim)
        codes = q
        if self._indexes and not self._indexes[0].is_exact:
            rows = self._indexes[0].rows
            codes = empty(num_heads, rows.shape[2], dtype=rows.dtype)
        self.query = Query(
            q,
            codes,
            torch.full((num_heads,), head_dim**-0.5, device=network.device),
            torch.zeros(num_heads, device=network.device),
            torch.zeros(num_heads, device=network.device),
        )
        budget = min(plan.budget or 0, capacity)
        self.chosen = torch.full(
            (config.num_hidden_layers, num_kv_heads, budget),
            -1,
            dtype=torch.int32,
            device=network.device,
        )
        share_rows = _share_rows(capacity, budget)
        num_shares = -(-capacity // share_rows)
        self._votes = empty(num_kv_heads, num_shares, share_rows, dtype=torch.float32)
        most = min(_MOST_SPLITS, max(1, _PROGRAMS // num_kv_heads), -(-capacity // 64))
        few = -(-(budget + plan.window_size + plan.sink_size + 64) // _ROWS_A_PROGRAM)
        self._splits = {True: most, False: few if few <= min(3 * most, _MOST_SPLITS) else most}
        self.log_sum = empty(num_heads, dtype=torch.float32)
        self._parts = {
            dense: empty(num_heads, splits, head_dim, dtype=torch.float32)
            for dense, splits in self._splits.items()
        }
        self._part_stats = {
            dense: empty(num_heads, splits, 2, dtype=torch.float32)
            for dense, splits in self._splits.items()
        }
        self._logits_of_rows: Tensor | None = None
        self._mass = self._selected = empty(0)
        if num_counted is not None:
            shape = (config.num_hidden_layers, num_kv_heads, num_counted)
            self._logits_of_rows = empty(num_heads, capacity + budget, dtype=torch.float32)
            self._mass = torch.zeros(shape, dtype=torch.float32, device=network.device)
            self._selected = torch.zeros(shape, dtype=torch.int32, device=network.device)
        self._graphs: dict[tuple[bool, bool], torch.cuda.CUDAGraph] = {}
        self._trace: weakref.ref[Trace] | None = None
        self._turn = Turn()
        self._steps_since_choice = -1  # none yet in this turn
        self._expected = -1  # the row that the state on the device names

    def fits(self, cache: KVCache, plan: KernelPlan, num_counted: int | None) -> bool:
        """Whether the graphs were captured for this cache, policy and trace size."""
        counted = self._mass.shape[2] if self._logits_of_rows is not None else None
        same_slabs = cache.k is self._slabs[0] and cache.v is self._slabs[1]
        return same_slabs and plan == self.plan and counted == num_counted

    def step(self, token_id: Tensor, turn: Turn, trace: Trace | None) -> Tensor:
        """Append one token ([1] int64) and return its logits [V] fp32, valid until the next step.

        The cache must have room for it; its length is not changed. The trace is told of the rows
        that were to be read; where a share has too few, fewer are.
        """
        row = self._cache.length
        assert row < self._cache.capacity, "the cache has no room for the token"
        if turn is not self._turn or row != self._expected:
            self._turn, self._steps_since_choice = turn, -1
            state = (row, turn.question_start, turn.question_end)
            self._state.copy_(torch.tensor(state, dtype=torch.int32))
        dense = self.reads_all(row + 1)
        chooses = not dense and (self._steps_since_choice + 1) % self.plan.reselect == 0
        self._steps_since_choice = -1 if dense else self._steps_since_choice + 1
        if trace is not None:
            counting = self._trace() if self._trace is not None else None
            if trace is not counting:
                if counting is not None:  # somebody still looks at the answer before
                    counting.count_into(self._mass.clone(), self._selected.clone())
                trace.count_into(self._mass, self._selected)
                self._trace = weakref.ref(trace)
            trace.start_step(row + 1)
            trace.add_rows_read(self.num_read(row + 1))
        self._token.copy_(token_id)
        self._replay(dense, chooses)
        self._expected = row + 1
        return self._logits

    def num_read(self, num_rows: int) -> int:
        """Rows that each KV head reads of `num_rows` in this turn."""
        plan = self.plan
        if plan.budget is None:
            return num_rows
        ranges = kept_ranges(num_rows, self._turn, plan.sink_size, plan.window_size)
        return min(plan.budget + sum(end - start for start, end in ranges), num_rows)

    def reads_all(self, num_rows: int) -> bool:
        """Whether a step over `num_rows` rows is a dense one."""
        return self.num_read(num_rows) == num_rows

    def _replay(self, dense: bool, chooses: bool) -> None:
        if self._network.device.type == "cpu":  # Triton's interpreter, in the tests
            self._run(dense, chooses)
            return
        if (dense, chooses) not in self._graphs:
            self._capture(dense, chooses)
        self._graphs[dense, chooses].replay()

    def _capture(self, dense: bool, chooses: bool) -> None:
        """Run the step once to compile its kernels, then capture it; leaves the state as it was."""
        counts = self._mass.clone(), self._selected.clone()
        state, chosen = self._state.clone(), self.chosen.clone()

        def restore() -> None:
            self._state.copy_(state)
            self.chosen.copy_(chosen)
            self._mass.copy_(counts[0])
            self._selected.copy_(counts[1])

        stream = torch.cuda.Stream(self._network.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(dense, chooses)
            restore()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run(dense, chooses)
        self._graphs[dense, chooses] = graph

    def _run(self, dense: bool, chooses: bool) -> None:
        network, eps = self._network, self._network.config.rms_norm_eps
        self.start_token()
        for layer_idx in range(len(network.layers)):
            self.append(layer_idx, chooses)
            self.attend(layer_idx, dense, chooses)
            if self._logits_of_rows is not None:
                self._count(layer_idx, dense)
            self.finish_layer(layer_idx)
        linear.matvec(self._hidden, network.lm_head, self._logits, norm=network.norm, eps=eps)
        self._state[:1] += 1

    def start_token(self) -> None:
        """Put the token's embedding into the residual."""
        self._hidden.copy_(self._network.embed[self._token][0])

    def append(self, layer_idx: int, chooses: bool) -> None:
        """Project the residual, and write the token's K, V and index rows and its queries."""
        layer, eps = self._network.layers[layer_idx], self._network.config.rms_norm_eps
        linear.matvec(
            self._hidden,
            layer.qkv,
            self._heads.view(-1),
            norm=layer.input_norm,
            eps=eps,
            bias=layer.qkv_bias,
        )
        append_token.append_token(
            self._heads,
            self._cos,
            self._sin,
            layer.head_norms,
            eps,
            self._kept,
            self._cache.k[layer_idx],
            self._cache.v[layer_idx],
            self.query,
            self._indexes[layer_idx] if self._indexes else None,
            voted=chooses,
        )

    def attend(self, layer_idx: int, dense: bool, chooses: bool) -> None:
        """Choose rows, where it is time to, and attend to them and to the kept ones, or to all."""
        chosen = None if dense else self.chosen[layer_idx]
        if chooses:
            assert chosen is not None, "a dense step chooses nothing"
            topk.choose_rows(
                self.query,
                self._indexes[layer_idx],
                self._kept,
                self._votes,
                chosen,
                summed=self.plan.summed,
                next_weights=self._network.layers[layer_idx].o,
            )
        attend.attend_token(
            self.query.q,
            self._cache.k[layer_idx],
            self._cache.v[layer_idx],
            self._kept,
            chosen,
            self._network.config.head_dim**-0.5,
            self._attended,
            self._parts[dense],
            self._part_stats[dense],
            log_sum=self.log_sum,
            logits=self._logits_of_rows,
        )

    def finish_layer(self, layer_idx: int) -> None:
        """The output projection and the feed-forward network, added to the residual."""
        layer, eps = self._network.layers[layer_idx], self._network.config.rms_norm_eps
        attended, hidden = self._attended.view(-1), self._hidden
        linear.matvec(attended, layer.o, hidden, bias=layer.o_bias, residual=hidden)
        linear.matvec(hidden, layer.gate_up, self._gated, norm=layer.post_norm, eps=eps, gated=True)
        linear.matvec(self._gated, layer.down, hidden, residual=hidden)

    def _count(self, layer_idx: int, dense: bool) -> None:
        assert self._logits_of_rows is not None, "there is no trace"
        mass.add_mass(
            self._logits_of_rows,
            self.log_sum,
            self._kept,
            None if dense else self.chosen[layer_idx],
            self._mass[layer_idx],
            self._selected[layer_idx],
        )
