"""RazorAttention (arXiv 2407.15891): retrieval heads keep all rows, the others a window and a mean.

Retrieval heads are found once by a text of random tokens that is repeated: echo heads attend to
earlier occurrences of the current token, induction heads to what came after these. The other heads
keep sinks, question and window, and in place of what they drop one row that is its mean key and
mean value and counts as many times as rows were dropped.

Differences from the paper: `budget` is the mean over all KV heads, so that the policies compare at
equal rows, and what retrieval heads leave of it lengthens the others' window (under a budget of
about the share of retrieval heads they leave nothing, and more than the budget is read); a KV head
counts as its best query head; the text is 4 times 512 tokens and not 4 times 2,500, and is judged
by its last repetition, which costs the reading of 2,048 tokens. The scores are stored with the
entry. Rows stay in the slab, so no memory is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from longread_kernels import dispatch as ops
from torch import Tensor

from longread.cache import KVCache
from longread.policies.base import KernelPlan, Policy, Rereader, StandIn, Turn
from longread.policies.evicting import PromptEvicting
from longread.policies.kept import kept_ranges, row_tensor

_SEED = 0
_ALL_ROWS = 2**31 - 1  # a retrieval head lists as many as there are


@dataclass
class Razor(PromptEvicting):
    """echo_share, induction_share: of the KV heads; period, repeats: of the text of random tokens.

    budget (None: all), sink_size, window_size are rows.
    """

    echo_share: float = 0.01
    induction_share: float = 0.14
    period: int = 512
    repeats: int = 4
    retrieval_heads: list[list[bool]] = field(default_factory=list, init=False, repr=False)
    _stand_ins: dict[int, StandIn] = field(default_factory=dict, init=False, repr=False)

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        super().prepare(cache)
        self._stand_ins.clear()
        if self.budget is None:
            return
        echo, induction = self._scores(cache, rereader)
        chosen = torch.zeros_like(echo, dtype=torch.bool)
        for scores, share in ((echo, self.echo_share), (induction, self.induction_share)):
            num_heads = round(share * scores.numel()) or int(share > 0)
            chosen.view(-1)[scores.flatten().topk(num_heads).indices] = True
        self.retrieval_heads = chosen.tolist()

    def choose(self, layer_idx: int, num_rows: int, kept: Tensor) -> Tensor | None:
        if self.budget is None:
            return None
        num_eligible = num_rows - kept.shape[0]
        flags = [flag for layer in self.retrieval_heads for flag in layer]
        num_others = len(flags) - sum(flags)
        spare = self.budget * len(flags) - num_eligible * sum(flags)
        longer = num_eligible if num_others == 0 else max(0, spare // num_others)
        own_flags = self.retrieval_heads[layer_idx]
        if longer >= num_eligible or all(own_flags):
            return None
        window_size = self.window_size + longer
        ranges = kept_ranges(num_rows, self.turn, self.sink_size, window_size)
        some = row_tensor(ranges, kept.device)
        if some.shape[0] == num_rows:
            return None
        self._stand_ins[layer_idx] = self._mean(layer_idx, num_rows, some)
        others = torch.ones(num_rows, dtype=torch.bool, device=kept.device)
        others[kept] = False
        every = others.nonzero()[:, 0]
        padded = every.masked_fill(~torch.isin(every, some), -1)
        if not any(own_flags):
            padded = padded[padded >= 0]
        own = torch.stack([every if flag else padded for flag in own_flags])
        return torch.cat((kept.expand(own.shape[0], -1), own), dim=1)

    def kernel_plan(self) -> KernelPlan:
        if self.budget is None:
            return KernelPlan()
        return KernelPlan(_ALL_ROWS, self.sink_size, stand_in=True)

    def kernel_turn(self) -> Turn:
        if self.budget is not None and self._kernel_turn is None:
            turn = super().kernel_turn()
            layers = range(len(turn.listed))
            self._kernel_turn = replace(turn, stand_ins=tuple(map(self.stand_in_of, layers)))
        return super().kernel_turn()

    def stand_in_of(self, layer_idx: int) -> StandIn | None:
        return self._stand_ins.get(layer_idx)

    def _mean(self, layer_idx: int, num_rows: int, kept: Tensor) -> StandIn:
        """The mean of rows [0, num_rows) that are not kept, which retrieval heads do without."""
        assert self._cache is not None, "prepare() comes first"
        dropped = torch.ones(num_rows, dtype=torch.bool, device=kept.device)
        dropped[kept] = False
        num_dropped = num_rows - kept.shape[0]
        means = []
        for slab in (self._cache.k, self._cache.v):
            rows = slab[layer_idx, :, :num_rows].transpose(1, 2)  # [H_kv, D, S]
            means.append(torch.stack([dropped.float() @ head.float().T for head in rows]))
        weights = torch.full((rows.shape[0],), float(num_dropped), device=kept.device)
        no_weight = torch.tensor(self.retrieval_heads[layer_idx], device=kept.device)
        log_weight = weights.log().masked_fill(no_weight, float("-inf"))
        return StandIn(means[0] / num_dropped, means[1] / num_dropped, log_weight)

    def _scores(self, cache: KVCache, rereader: Rereader | None) -> Tensor:
        """Echo and induction score of each KV head, [2, L, H_kv] fp32 on the CPU."""
        name = f"retrieval-heads-{self.period}-{self.repeats}"
        stored = cache.by_products.read_extra(name) if cache.by_products is not None else None
        if stored is not None:
            return stored["scores"]
        assert rereader is not None, "retrieval heads are found by reading a text"
        period = max(1, min(self.period, rereader.window // self.repeats))
        generator = torch.Generator().manual_seed(_SEED)
        text = torch.randint(rereader.vocab_size, (period,), generator=generator)
        probe = _Probe(period, self.repeats)
        rereader.text(text.repeat(self.repeats), probe)
        paid = torch.stack([probe.paid[layer_idx] for layer_idx in range(cache.num_layers)], dim=1)
        scores = (paid.amax(dim=-1) / period).cpu()
        if cache.by_products is not None:
            cache.by_products.write_extra(name, {"scores": scores})
        return scores


@dataclass
class _Probe(Policy):
    """Scores heads while it is shown a text of `repeats` times `period` tokens."""

    period: int
    repeats: int
    # For each layer what the last repetition pays to echoes and to what came after: [2, H_kv, G].
    paid: dict[int, Tensor] = field(default_factory=dict)
    _cache: KVCache | None = None

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        self._cache = cache

    def observe(self, layer_idx: int, q: Tensor, start: int) -> None:
        assert self._cache is not None, "prepare() comes first"
        last = (self.repeats - 1) * self.period
        if start + q.shape[0] <= last:
            return
        q = q[max(last - start, 0) :]
        tokens = torch.arange(max(start, last), max(start, last) + q.shape[0], device=q.device)
        k = self._cache.k[layer_idx, :, : self.repeats * self.period]
        rows = torch.arange(k.shape[1], device=q.device)
        distance = tokens[:, None] - rows  # [T, S]
        echo = (distance > 0) & (distance % self.period == 0)
        induction = (distance >= 0) & ((distance + 1) % self.period == 0) & (rows > 0)
        paid = []
        for head, own in enumerate(q.chunk(k.shape[0], dim=1)):
            grouped = own.transpose(0, 1).reshape(1, -1, q.shape[2]) * q.shape[2] ** -0.5
            scores = ops.score(grouped, k[head : head + 1]).view(own.shape[1], *distance.shape)
            probs = torch.softmax(scores.masked_fill(distance < 0, float("-inf")), dim=-1)
            paid.append(torch.stack([(probs * kind).sum((1, 2)) for kind in (echo, induction)]))
        self.paid[layer_idx] = self.paid.get(layer_idx, 0) + torch.stack(paid, dim=1)
