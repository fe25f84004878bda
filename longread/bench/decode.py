"""The decode step on a GPU: dense and selected in one run, beside Hugging Face and the libraries.

The cache is filled with random rows, so the mass that selection keeps is low by nature; it is
reported beside the mass of the best rows there are. A variant whose logits differ from the step in
torch operations over the same rows by over 2 % relative RMS is not timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from longread_kernels.reference_decode import choose_rows_ref
from longread_kernels.tables import IndexLayer
from torch import Tensor

from longread.bench.prefill import relative_rms
from longread.bench.timing import WARM_UPS, graph_ms, median_ms
from longread.cache import KVCache
from longread.config import parse_budget
from longread.decode_graph import StepGraph
from longread.errors import LongreadError, UsageError
from longread.model import Decoder
from longread.policies import Butler, Dense, Policy, TokenSelect, Turn
from longread.policies.kept import kept_ranges, row_tensor, rows_read
from longread.policies.predictor import Predictor, Shape, fitting_width
from longread.reread import DocumentRereader
from longread.step_buffers import StepBuffers, can_choose, most_rows

QUESTION_LEN = 32
SPARE_ROWS = 64
_TOLERANCE = 0.02


@dataclass(frozen=True)
class DecodeFigures:
    """Medians in milliseconds. attention_ms: choosing and attending, all layers; mass_kept and
    best_mass: softmax mass on the rows read, and on as many of the best, last layer, mean of heads.
    batch: questions on one document that are answered in one step.
    """

    variant: str
    num_rows: int
    step_ms: float
    attention_ms: float
    mass_kept: float | None = None
    best_mass: float | None = None
    gpu_bytes: int = 0
    batch: int = 1


def variants(
    budgets: Sequence[str],
    num_rows: int,
    vote: str,
    index: str,
    reselect: int,
    butler: bool = False,
) -> dict[str, Policy]:
    """Dense, then each budget as `--budget` takes it, choosing at every step and more rarely; with
    `butler` also by a predictor, which is as fast as one that was trained.
    """
    kinds: dict[str, Policy] = {"dense": Dense()}
    for text in budgets:
        for interval in sorted({1, reselect}):
            name = text if interval == 1 else f"{text}, reselect {interval}"
            budget = parse_budget(text).resolve(num_rows)
            kinds[name] = TokenSelect(budget, vote=vote, index=index, reselect=interval)
            if butler:
                kinds[f"butler {name}"] = Butler(budget, reselect=interval)
    return kinds


@torch.inference_mode()
def run(
    decoder: Decoder, num_rows: int, policies: Mapping[str, Policy], repeats: int, batch: int = 1
) -> list[DecodeFigures]:
    """Time each policy's step over `num_rows` random rows, for `batch` questions at once.

    Raises UsageError for rows or a vote that cannot be timed, LongreadError on a mismatch: what was
    timed before it is not reported either.
    """
    longest = max(
        (WARM_UPS + repeats) * getattr(policy, "reselect", 1) for policy in policies.values()
    )
    branch_rows = QUESTION_LEN + longest + SPARE_ROWS
    cache = random_cache(decoder, num_rows, batch * branch_rows)
    room = most_rows(cache.capacity, batch, branch_rows)
    figures = []
    for name, template in policies.items():
        policy = dataclasses.replace(template)
        cache.length = cache.capacity  # the branches' rows are indexed too
        if isinstance(policy, Butler):
            policy.predictor = _untrained(decoder)
        policy.prepare(cache, DocumentRereader(decoder, torch.empty(0)))
        cache.length = num_rows
        policy.start_turn(Turn(num_rows - QUESTION_LEN, num_rows))
        plan = policy.kernel_plan()
        if plan is None or plan.apart or not can_choose((plan,), room):
            raise UsageError(f"{name} has no kernels to time: another vote, or a larger budget")
        graph = StepGraph(decoder.network, cache, [plan] * batch, None, branch_rows)
        mass = _check(decoder, cache, policy, graph, branch_rows)
        torch.cuda.reset_peak_memory_stats(decoder.device)  # what checks take is not the step's
        figures.append(
            DecodeFigures(
                name,
                num_rows,
                _step_ms(num_rows, policy, graph, repeats),
                _attention_ms(decoder, num_rows, policy, graph, repeats),
                *mass,
                gpu_bytes=torch.cuda.max_memory_allocated(decoder.device),
                batch=batch,
            )
        )
        del graph, plan, policy  # their index and buffers are not the next one's
    return figures


def _untrained(decoder: Decoder) -> Predictor:
    shape = Shape.of(decoder.config)
    num_parameters = sum(tensor.numel() for tensor in decoder.network.tensors.values())
    with torch.inference_mode(False):
        return Predictor(shape, fitting_width(shape, num_parameters)).requires_grad_(False)


def random_cache(decoder: Decoder, num_rows: int, num_spare: int) -> KVCache:
    """A cache of random rows with room for `num_spare` tokens. Raises UsageError past the window.

    The keys' variance falls off over their directions, as it does in trained models: a key index
    has something to find.
    """
    if not QUESTION_LEN < num_rows <= decoder.config.window - num_spare:
        raise UsageError(
            f"{num_rows:,} rows cannot be timed with {decoder.config.name}: over {QUESTION_LEN}, "
            f"and with {num_spare:,} more in its window of {decoder.config.window:,}"
        )
    cache = decoder.new_cache(num_rows + num_spare)
    generator = torch.Generator(decoder.device).manual_seed(1)
    head_dim = decoder.config.head_dim
    spread = torch.logspace(0.5, -1.5, head_dim, device=decoder.device)
    mix = torch.linalg.qr(torch.randn(head_dim, head_dim, device=decoder.device)).Q
    mix = (mix * spread[:, None]).to(cache.k.dtype)
    for k, v in zip(cache.k, cache.v, strict=True):
        v.normal_(generator=generator)
        k.copy_(torch.matmul(torch.empty_like(k).normal_(generator=generator), mix))
    cache.q_moment.copy_(torch.eye(decoder.config.head_dim))
    cache.length = num_rows
    return cache


def _check(
    decoder: Decoder, cache: KVCache, policy: Policy, graph: StepGraph, branch_rows: int
) -> tuple[float | None, float | None]:
    """Compare each branch's step with torch operations over the rows that it read; both masses."""
    num_rows, count, plan = cache.length, len(graph.plans), graph.plans[0]
    num_shared = num_rows - QUESTION_LEN
    token = torch.tensor([7], device=decoder.device)
    turns = [policy.turn] * count
    found = graph.step_branches(token.expand(count), [num_rows] * count, turns, num_shared)
    found, all_chosen = found.clone(), graph.buffers.chosen.long().clone()
    ranges = kept_ranges(num_rows + 1, policy.turn, plan.sink_size, plan.window_size)
    kept_rows = row_tensor(ranges, token.device)
    dense = rows_read(plan, policy.turn, num_rows + 1) > num_rows
    own = slice(num_shared, num_shared + branch_rows)
    slabs = [cache.k, cache.v]
    index = plan.index.layer(-1) if plan.index is not None else None
    if index is not None and not index.is_exact:
        slabs.append(index.rows[None])
    graph.buffers.kept.state[:, 0] -= 1  # the last layer's queries are those of this row
    masses: tuple[float | None, float | None] = (None, None)
    for branch in range(count):
        start = own.start + branch * branch_rows
        for slab in slabs:  # the first branch's place is where a cache has its rows
            slab[:, :, own] = slab[:, :, start : start + branch_rows]
        chosen = all_chosen[:, branch]
        if not dense:
            check_rows(chosen, kept_rows)
        if not dense and index is not None:
            check_choice(graph.buffers, index, chosen[-1], branch, plan.summed)
        replayed = policy if dense else _Replay(chosen, kept_rows)
        expected = decoder.decode_with_torch(token, cache, replayed)
        cache.truncate(num_rows)
        difference = relative_rms(found[branch], expected)
        if difference > _TOLERANCE:
            raise LongreadError(
                f"the logits differ from torch's by {difference:.2%} relative RMS: nothing is timed"
            )
        if not dense and branch == 0:
            masses = _masses(cache, graph, chosen, kept_rows)
    return masses


def check_rows(chosen: Tensor, kept_rows: Tensor) -> None:
    """Raise LongreadError where a row comes twice, or is a kept one, in any layer.

    chosen: [layers, H_kv, budget] int64 of one branch.
    """
    order = chosen.sort(dim=-1).values
    twice = ((order[..., 1:] == order[..., :-1]) & (order[..., 1:] >= 0)).any()
    if twice or torch.isin(chosen, kept_rows).any():
        raise LongreadError("a row was chosen twice, or is kept anyway: nothing is timed")


def check_choice(
    buffers: StepBuffers, index: IndexLayer, chosen: Tensor, branch: int, summed: bool
) -> None:
    """Raise LongreadError where a step did not choose what its torch twin would, to 99 %.

    chosen: [H_kv, budget] int64 of one branch, in the layer whose queries the buffers hold, the
    last. index: of that layer, with the branch's rows where a cache has them.
    """
    kept = dataclasses.replace(buffers.kept, state=buffers.kept.state[branch], branches=None)
    query, num_branches = buffers.query, buffers.tokens.shape[0]
    own = {
        field.name: getattr(query, field.name).chunk(num_branches)[branch]
        for field in dataclasses.fields(query)
    }
    wanted = torch.empty_like(chosen, dtype=torch.int32)
    choose_rows_ref(
        dataclasses.replace(query, **own), index, kept, buffers.votes, wanted, summed=summed
    )
    pairs = zip(wanted.tolist(), chosen.tolist(), strict=True)
    missed = sum(len(set(best) - set(rows)) for best, rows in pairs)
    if missed > 0.01 * wanted.numel():
        raise LongreadError(f"{missed} of {wanted.numel()} chosen rows differ: nothing is timed")


def _masses(
    cache: KVCache, graph: StepGraph, chosen: Tensor, kept_rows: Tensor
) -> tuple[float, float]:
    """What the first branch's rows hold in the last layer, and what as many of the best would."""
    k = cache.k[-1, :, : cache.length + 1].float()
    q_heads = graph.buffers.query.q.shape[0] // graph.buffers.tokens.shape[0]
    q = graph.buffers.query.q.float().reshape(-1, k.shape[0], q_heads // k.shape[0], k.shape[2])[0]
    probs = torch.softmax(torch.matmul(q * k.shape[2] ** -0.5, k.transpose(1, 2)), dim=-1)
    kept = probs[:, :, kept_rows].sum(dim=-1).mean()
    probs = probs.mean(dim=1)  # [H_kv, S]: a KV head chooses for all its query heads
    probs[:, kept_rows] = 0
    mass = kept + (probs.gather(1, chosen[-1].clamp(min=0)) * (chosen[-1] >= 0)).sum(-1).mean()
    best = kept + probs.topk(chosen.shape[2], dim=-1).values.sum(dim=-1).mean()
    return float(mass), float(best)


@dataclass
class _Replay(Policy):
    """Reads the kept rows and those that a graph chose."""

    chosen: Tensor
    kept: Tensor

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor:
        rows = self.chosen[layer_idx]
        return torch.cat((self.kept.expand(rows.shape[0], -1), rows), dim=1)


def _step_ms(num_rows: int, policy: Policy, graph: StepGraph, repeats: int) -> float:
    """Median over whole rounds of a step that chooses and those that read its rows again."""
    batch, row = len(graph.plans), num_rows
    tokens = torch.full((batch,), 7, device=graph.buffers.tokens.device)
    turns, interval = [policy.turn] * batch, graph.plans[0].reselect

    def one_round() -> None:
        nonlocal row
        for _ in range(interval):
            graph.step_branches(tokens, [row] * batch, turns, num_rows - QUESTION_LEN)
            row += 1

    return median_ms(one_round, repeats) / interval


def _attention_ms(
    decoder: Decoder, num_rows: int, policy: Policy, graph: StepGraph, repeats: int
) -> float:
    """The step's choosing and attending alone, captured by themselves, mean over a round."""
    dense = rows_read(graph.plans[0], policy.turn, num_rows + 1) > num_rows
    layers = range(decoder.config.num_hidden_layers)

    def attend(chooses: bool) -> Callable[[], None]:
        def run_all() -> None:
            for layer_idx in layers:
                graph.attend(layer_idx, dense, chooses)

        return run_all

    interval = graph.plans[0].reselect
    reading_ms = graph_ms(attend(False), repeats) if dense or interval > 1 else 0.0
    if dense:
        return reading_ms
    choosing_ms = graph_ms(attend(True), repeats)
    return (choosing_ms + (interval - 1) * reading_ms) / interval
