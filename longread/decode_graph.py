"""The decode step on a GPU: Triton kernels over static buffers, captured once as CUDA graphs.

Owns the buffers, the capture and the replay; what a step computes is what `Decoder.decode` computes
with torch operations. Positions and lengths live on the device and nothing inside a step waits for
the host, which only picks the graph: one that chooses rows, one that reads the rows of the last
choice (`reselect`), and one that reads all rows.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence

import torch
from longread_kernels import append_token, attend, linear, mass, topk
from longread_kernels.tables import IndexLayer
from torch import Tensor

from longread.cache import KVCache
from longread.network import Network
from longread.policies import KernelPlan, Turn
from longread.policies.base import listings
from longread.policies.kept import rows_read
from longread.step_buffers import StepBuffers, most_rows
from longread.trace import Trace


class StepGraph:
    """The decode step of one policy on one cache, or of several policies' answers side by side.

    All read the first rows of the cache; each answer, a branch, has `branch_rows` rows of its own
    behind them, one branch's after the other's. Rows past `cache.length` may be overwritten.
    """

    def __init__(
        self,
        network: Network,
        cache: KVCache,
        plans: Sequence[KernelPlan],
        num_counted: int | None,
        branch_rows: int = 0,
    ) -> None:
        """plans: a branch's each; those that choose rows do it alike, from one index.

        num_counted: rows whose mass and choices are counted, or None for no trace.
        """
        config = network.config
        self._network = network
        self._cache: KVCache = weakref.proxy(cache)  # it goes when nobody else needs it
        self._slabs = (cache.k, cache.v)
        self.plans = tuple(plans)
        self._branch_rows = branch_rows
        choosing = [plan for plan in plans if plan.index is not None or plan.reselect > 1]
        alike = {(id(p.index), p.summed, p.apart, p.reselect, p.stand_in) for p in choosing}
        assert len(alike) <= 1, "plans that choose do it alike"
        assert len({plan.apart for plan in plans}) == 1, "sets of one kind"
        self._summed = choosing[0].summed if choosing else True
        self._reselect = choosing[0].reselect if choosing else 1
        self._sums_unread = bool(choosing) and choosing[0].stand_in
        self._indexes: list[IndexLayer] = []
        if choosing and choosing[0].index is not None:
            index = choosing[0].index
            self._indexes = [index.layer(i) for i in range(config.num_hidden_layers)]
        self.buffers = StepBuffers(
            network, cache, plans, self._indexes[0] if self._indexes else None, branch_rows
        )
        self._listings = listings(plans, self.buffers.kept)
        self._most_rows = most_rows(cache.capacity, len(plans), branch_rows)
        self._cos, self._sin = network.rope_rows(0, min(self._most_rows, config.window))
        self._logits_of_rows: Tensor | None = None
        self._mass = self._selected = torch.empty(0, device=network.device)
        if num_counted is not None:
            assert not plans[0].apart, "sets of KV heads are traced"
            kv_heads = (config.num_hidden_layers, config.num_key_value_heads)
            shape = (len(plans), *kv_heads, num_counted)
            num_heads = len(plans) * config.num_attention_heads
            num_listed = cache.capacity + self.buffers.budget
            self._logits_of_rows = torch.empty((num_heads, num_listed), device=network.device)
            self._mass = torch.zeros(shape, dtype=torch.float32, device=network.device)
            self._selected = torch.zeros(shape, dtype=torch.int32, device=network.device)
        self._graphs: dict[tuple[bool, bool], torch.cuda.CUDAGraph] = {}
        self._trace: weakref.ref[Trace] | None = None
        self._turns: tuple[Turn, ...] = ()
        self._num_shared = -1
        self._steps_since_choice = -1  # none yet in this turn
        self._expected: tuple[int, ...] = ()  # the rows that the state on the device names

    def fits(self, cache: KVCache) -> bool:
        """Whether the graphs were captured for this cache, and it has not grown since."""
        is_same = cache.k is self._slabs[0] and cache.v is self._slabs[1]
        return is_same and all(listing.fits() for listing in self._listings)

    def step(self, token_id: Tensor, turn: Turn, trace: Trace | None) -> Tensor:
        """Append one token ([1] int64) and return its logits [V] fp32, valid until the next step.

        The cache must have room for it; its length is not changed. The trace is told of the rows
        that were to be read; where a share has too few, fewer are.
        """
        row = self._cache.length
        if trace is not None:
            counting = self._trace() if self._trace is not None else None
            if trace is not counting:
                if counting is not None:  # somebody still looks at the answer before
                    counting.count_into(self._mass[0].clone(), self._selected[0].clone())
                self.count_branch(0, trace)
                self._trace = weakref.ref(trace)
            trace.start_step(row + 1)
            trace.add_rows_read(rows_read(self.plans[0], turn, row + 1))
        return self.step_branches(token_id, (row,), (turn,))[0]

    def count_branch(self, branch: int, trace: Trace) -> None:
        """Count what a branch reads in this trace from here on, and in none before."""
        trace.count_into(self._mass[branch], self._selected[branch])

    def step_branches(
        self,
        token_ids: Tensor,
        rows: Sequence[int],
        turns: Sequence[Turn],
        num_shared: int = 0,
    ) -> Tensor:
        """Append a token to each branch ([B] int64); logits [B, V] fp32, valid until the next step.

        rows: the tokens' rows, one past what the branch has; turns: the branches' questions;
        num_shared: rows of the cache that are every branch's.
        """
        if len(self.plans) == 1:
            assert rows[0] < self._most_rows, "the cache has no room for the token"
        else:
            end = num_shared + self._branch_rows
            assert end <= self._most_rows, "the cache has no room for the branches"
            assert max(rows) < end, "a branch has no room for the token"
            assert min(rows) >= num_shared, "a row of all branches would be overwritten"
        rows, turns = tuple(rows), tuple(turns)
        same_turns = len(turns) == len(self._turns) and all(map(operator.is_, turns, self._turns))
        if not same_turns or rows != self._expected or num_shared != self._num_shared:
            self._start(rows, turns, num_shared)
        dense = all(map(self._reads_all, self.plans, turns, rows))
        chooses = bool(self._indexes or self._listings) and not dense
        chooses = chooses and (self._steps_since_choice + 1) % self._reselect == 0
        self._steps_since_choice = -1 if dense else self._steps_since_choice + 1
        self.buffers.tokens.copy_(token_ids)
        self._replay(dense, chooses)
        self._expected = tuple(row + 1 for row in rows)
        return self.buffers.logits

    def _start(self, rows: tuple[int, ...], turns: tuple[Turn, ...], num_shared: int) -> None:
        """Put the branches' places and listed rows on the device."""
        buffers = self.buffers
        for branch, turn in enumerate(turns):
            if len(self._turns) == len(turns) and turn is self._turns[branch]:
                continue
            for chosen, listed in zip(buffers.chosen[:, branch], turn.listed, strict=False):
                chosen[:, : listed.shape[1]] = listed
                chosen[:, listed.shape[1] :] = -1
            if buffers.stand_ins:
                buffers.put_stand_ins(branch, turn.stand_ins)
        state = [
            (row, turn.question_start, turn.question_end)
            for row, turn in zip(rows, turns, strict=True)
        ]
        buffers.kept.state.copy_(torch.tensor(state, dtype=torch.int32))
        if buffers.kept.branches is not None:
            buffers.kept.branches[:, 0] = num_shared
        for listing in self._listings:
            listing.start_answer(rows, num_shared)
        self._turns, self._num_shared, self._steps_since_choice = turns, num_shared, -1

    @staticmethod
    def _reads_all(plan: KernelPlan, turn: Turn, row: int) -> bool:
        """Whether the step of the token in `row` is a dense one."""
        return rows_read(plan, turn, row + 1) == row + 1

    def _replay(self, dense: bool, chooses: bool) -> None:
        if self._network.device.type == "cpu":  # Triton's interpreter, in the tests
            self._run(dense, chooses)
            return
        if (dense, chooses) not in self._graphs:
            self._capture(dense, chooses)
        self._graphs[dense, chooses].replay()

    def _capture(self, dense: bool, chooses: bool) -> None:
        """Run the step once to compile its kernels, then capture it; leaves the state as it was."""
        changed = [self.buffers.kept.state, self.buffers.chosen, self._mass, self._selected]
        changed += [tensor for listing in self._listings for tensor in listing.state]
        before = [tensor.clone() for tensor in changed]

        stream = torch.cuda.Stream(self._network.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(dense, chooses)
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(old)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run(dense, chooses)
        self._graphs[dense, chooses] = graph

    def _run(self, dense: bool, chooses: bool) -> None:
        network, eps, buffers = self._network, self._network.config.rms_norm_eps, self.buffers
        self.start_token()
        for layer_idx in range(len(network.layers)):
            self.append(layer_idx, chooses)
            self.attend(layer_idx, dense, chooses)
            if self._logits_of_rows is not None:
                self._count(layer_idx, dense)
            self.finish_layer(layer_idx)
        linear.matvec(buffers.hidden, network.lm_head, buffers.logits, norm=network.norm, eps=eps)
        buffers.kept.state[:, :1] += 1

    def start_token(self) -> None:
        """Put the tokens' embeddings into the residuals."""
        self.buffers.hidden.copy_(self._network.embed[self.buffers.tokens])
        for listing in self._listings:
            listing.start_step()

    def append(self, layer_idx: int, chooses: bool) -> None:
        """Project the residuals, and write the tokens' K, V and index rows and their queries."""
        layer, eps = self._network.layers[layer_idx], self._network.config.rms_norm_eps
        buffers = self.buffers
        linear.matvec(
            buffers.hidden,
            layer.qkv,
            buffers.heads.view(len(self.plans), -1),
            norm=layer.input_norm,
            eps=eps,
            bias=layer.qkv_bias,
        )
        append_token.append_token(
            buffers.heads,
            self._cos,
            self._sin,
            layer.head_norms,
            eps,
            buffers.kept,
            self._cache.k[layer_idx],
            self._cache.v[layer_idx],
            buffers.queries[layer_idx],
            self._indexes[layer_idx] if self._indexes else None,
            voted=chooses and bool(self._indexes),
        )

    def attend(self, layer_idx: int, dense: bool, chooses: bool) -> None:
        """Choose rows, where it is time to, and attend to them and to the kept ones, or to all."""
        buffers = self.buffers
        chosen = None if dense else buffers.chosen[layer_idx]
        stand_ins = buffers.stand_ins[layer_idx] if buffers.stand_ins and not dense else None
        if chooses and self._indexes:
            assert chosen is not None, "a dense step chooses nothing"
            topk.choose_rows(
                buffers.queries[layer_idx],
                self._indexes[layer_idx],
                buffers.kept,
                buffers.votes,
                chosen,
                summed=self._summed,
                unread=stand_ins.unread if stand_ins and self._sums_unread else None,
            )
        for listing in self._listings:
            if chooses or dense or listing.reselect == 1:
                q = buffers.query.q.unflatten(0, (len(self.plans), -1))
                listing.list_rows(layer_idx, q, buffers.chosen[layer_idx])
        attend.attend_token(
            buffers.query.q,
            self._cache.k[layer_idx],
            self._cache.v[layer_idx],
            buffers.kept,
            chosen,
            self._network.config.head_dim**-0.5,
            buffers.attended,
            buffers.parts[dense],
            buffers.part_stats[dense],
            log_sum=buffers.log_sum,
            logits=self._logits_of_rows,
            stand_ins=stand_ins,
        )

    def finish_layer(self, layer_idx: int) -> None:
        """The output projection and the feed-forward network, added to the residuals."""
        layer, eps = self._network.layers[layer_idx], self._network.config.rms_norm_eps
        hidden, gated = self.buffers.hidden, self.buffers.gated
        attended = self.buffers.attended.view(len(self.plans), -1)
        linear.matvec(attended, layer.o, hidden, bias=layer.o_bias, residual=hidden)
        linear.matvec(hidden, layer.gate_up, gated, norm=layer.post_norm, eps=eps, gated=True)
        linear.matvec(gated, layer.down, hidden, residual=hidden)

    def _count(self, layer_idx: int, dense: bool) -> None:
        assert self._logits_of_rows is not None, "there is no trace"
        mass.add_mass(
            self._logits_of_rows,
            self.buffers.log_sum,
            self.buffers.kept,
            None if dense else self.buffers.chosen[layer_idx],
            self._mass[:, layer_idx],
            self._selected[:, layer_idx],
        )
