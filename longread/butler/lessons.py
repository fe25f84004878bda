"""What a predictor learns from one text: attention of the frozen model, and how far off it is.

The model reads a piece of text as it reads a question, in chunks. Of a few queries of its second
half, the last one among them, the attention of every head to every earlier row is what is to be
predicted (TokenButler, arXiv 2503.07518).

The loss is the Kullback-Leibler divergence over the rows that a policy does not keep anyway (first
ones and window), each query and head counting by the attention that these rows get from it: of the
cross-entropy over all rows, which is the paper's, the part that choosing rows depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longread.model import Decoder
from longread.policies import Policy
from longread.policies.predictor import Predictor, unturned

_HIDDEN = -1e9  # finite, so that what is hidden from both counts nothing
RECALL_SHARE = 0.1  # of the rows, to measure recall with


@dataclass(frozen=True)
class Lesson:
    """A text's keys [L, H_kv, S, D], and [L, R, H_q, D] queries of the rows [R]; all after RoPE.

    cos, sin: [S, D/2] fp32, by which they were turned.
    """

    rows: Tensor
    q: Sequence[Tensor]
    k: Tensor
    cos: Tensor
    sin: Tensor

    def plain_queries(self, layer_idx: int) -> Tensor:
        """Of the sampled rows before RoPE, [R, H_q, D] fp32."""
        cos, sin = self.cos[self.rows], self.sin[self.rows]
        return unturned(self.q[layer_idx].contiguous(), cos, sin).float()

    def plain_keys(self, layer_idx: int) -> Tensor:
        """[H_kv, S, D] fp32."""
        k = self.k[layer_idx].transpose(0, 1).contiguous()
        return unturned(k, self.cos, self.sin).transpose(0, 1).float()


@dataclass
class _Watcher(Policy):
    """Takes the queries of some rows down."""

    rows: Tensor
    q: dict[int, list[Tensor]] = field(default_factory=dict)

    def observe(self, layer_idx: int, q: Tensor, start: int) -> None:
        with torch.inference_mode(False):  # gradients go through what is made of them
            mine = self.rows[(self.rows >= start) & (self.rows < start + q.shape[0])]
            self.q.setdefault(layer_idx, []).append(q[mine - start])


def read_lesson(decoder: Decoder, token_ids: Tensor, num_queries: int, seed: int) -> Lesson:
    """The model's queries and keys for a text [S] int64 that fits its window."""
    num_rows = token_ids.shape[0]
    first, device = num_rows // 2, decoder.device
    order = torch.randperm(num_rows - 1 - first, generator=torch.Generator().manual_seed(seed))
    some = order[: num_queries - 1] + first
    rows = torch.cat((some, torch.tensor([num_rows - 1]))).sort().values.to(device)
    cache, watcher = decoder.new_cache(num_rows), _Watcher(rows)
    decoder.extend(token_ids, cache, watcher)
    cos, sin = (table.clone() for table in decoder.network.rope_rows(0, num_rows))
    queries = [torch.cat(watcher.q[layer_idx]) for layer_idx in range(cache.num_layers)]
    return Lesson(rows, queries, cache.k[:, :, :num_rows], cos, sin)


@dataclass(frozen=True)
class Kept:
    """Rows that are always read: the first `sink_size`, and the last `window_size` of a query."""

    sink_size: int
    window_size: int

    def hides(self, queries: Tensor, num_rows: int) -> Tensor:
        """What is not chosen from, the kept ones and later rows: [R, S] bool."""
        rows = torch.arange(num_rows, device=queries.device)
        return (rows < self.sink_size) | (rows > queries[:, None] - self.window_size)


def losses(predictor: Predictor, lesson: Lesson, kept: Kept, producer: int) -> list[Tensor]:
    """The loss of each layer that a producer serves."""
    found = []
    for weight, wanted, predicted in _both(predictor, lesson, kept, producer):
        divergence = (wanted.exp() * (wanted - predicted)).sum(dim=-1)
        found.append((weight * divergence).sum() / weight.sum().clamp(min=1e-9))
    return found


@torch.no_grad()
def recall(predictor: Predictor, lesson: Lesson, kept: Kept) -> list[tuple[float, float]]:
    """Of each layer, the share of the attention to rows that are not kept which falls on the tenth
    of them that is chosen, and on the best tenth.
    """
    num_rows, shares = lesson.k.shape[2], []
    num_chosen = max(1, int(RECALL_SHARE * (num_rows - kept.sink_size - kept.window_size)))
    for producer in range(len(predictor.shape.groups)):
        for weight, wanted, predicted in _both(predictor, lesson, kept, producer):
            mass = wanted.exp()  # [H_kv, G, R, S]
            best = []
            for scores in (predicted, wanted):
                votes = torch.logsumexp(scores, dim=1, keepdim=True)  # of a KV head's heads
                chosen = votes.topk(num_chosen, dim=-1).indices.expand(-1, mass.shape[1], -1, -1)
                held = mass.gather(-1, chosen).sum(dim=-1)
                best.append(float((weight * held).sum() / weight.sum().clamp(min=1e-9)))
            shares.append((best[0], best[1]))
    return shares


def _both(
    predictor: Predictor, lesson: Lesson, kept: Kept, producer: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each layer of a producer: the attention [H_kv, G, R] that rows to choose from get, its
    logarithm over them as it is and as it is predicted, [H_kv, G, R, S] fp32 both.
    """
    group = predictor.shape.groups[producer]
    small = predictor.small_queries(producer, lesson.plain_queries(group.start))
    hidden = kept.hides(lesson.rows, lesson.k.shape[2])
    future = Kept(0, 0).hides(lesson.rows, lesson.k.shape[2])
    found = []
    for q, layer_idx in zip(small, group, strict=True):
        k = lesson.k[layer_idx].float()
        scores = _scores(lesson.q[layer_idx].float() * k.shape[-1] ** -0.5, k)
        norm = torch.logsumexp(scores.masked_fill(future, _HIDDEN), dim=-1)
        scores = scores.masked_fill(hidden, _HIDDEN)
        weight = (torch.logsumexp(scores, dim=-1) - norm).exp()
        predicted = _scores(q, predictor.small_keys(layer_idx, lesson.plain_keys(layer_idx)))
        predicted = torch.log_softmax(predicted.masked_fill(hidden, _HIDDEN), dim=-1)
        found.append((weight, torch.log_softmax(scores, dim=-1), predicted))
    return found


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q: [R, H_q, d]; k: [H_kv, S, d]; returns [H_kv, G, R, S]."""
    grouped = q.unflatten(1, (k.shape[0], -1)).permute(1, 2, 0, 3)  # [H_kv, G, R, d]
    return torch.matmul(grouped.flatten(1, 2), k.mT).unflatten(1, grouped.shape[1:3])
