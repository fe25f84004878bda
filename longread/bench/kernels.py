"""Each kernel of the decode step beside the library's way to compute the same, on one GPU.

The kernels work on a real step's buffers over random rows. A kernel whose result differs from its
torch twin's by over 1 % relative RMS is not timed. The bytes that a kernel cannot do without, over
the copy rate measured in the same run, are its floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from longread_kernels import linear, reference_decode
from longread_kernels.tables import IndexLayer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from longread.bench.decode import (
    QUESTION_LEN,
    SPARE_ROWS,
    check_choice,
    check_rows,
    random_cache,
)
from longread.bench.prefill import relative_rms
from longread.bench.timing import graph_ms
from longread.cache import KVCache
from longread.decode_graph import StepGraph
from longread.errors import LongreadError, UsageError
from longread.model import Decoder
from longread.network import Layer
from longread.policies import TokenSelect, Turn
from longread.policies.kept import kept_ranges, row_tensor, rows_read
from longread.step_buffers import can_choose

_TOLERANCE = 0.01
_COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class KernelFigures:
    """All layers once, milliseconds. library_ms: None where no library has such an operation."""

    kernel: str
    ms: float
    library_ms: float | None
    floor_ms: float


@torch.inference_mode()
def run(decoder: Decoder, num_rows: int, budget: int, repeats: int) -> list[KernelFigures]:
    """Time the products of one token, then what chooses from `num_rows` rows and attends.

    Raises LongreadError where a kernel's result is wrong, UsageError for rows past the window and
    for a budget that leaves nothing to choose.
    """
    bytes_per_ms = _copy_rate(decoder.device, repeats)
    figures = _products(decoder, bytes_per_ms, repeats)
    return figures + _attention(decoder, num_rows, budget, bytes_per_ms, repeats)


def _copy_rate(device: torch.device, repeats: int) -> float:
    """Bytes read and written a millisecond by a copy on the device."""
    source = torch.zeros(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:  # `copy_` would become a copy engine's work, which is slower
        torch.neg(source, out=target)

    return 2 * _COPY_BYTES / graph_ms(copy, repeats)


def _products(decoder: Decoder, bytes_per_ms: float, repeats: int) -> list[KernelFigures]:
    """The matrix products of all layers and the head: ours, and the library's as torch calls it."""
    network, config = decoder.network, decoder.config
    eps = config.rms_norm_eps

    def random(size: int) -> Tensor:
        return torch.randn(1, size, device=decoder.device).to(decoder.dtype)

    def empty(size: int, dtype: torch.dtype = decoder.dtype) -> Tensor:
        return torch.empty(1, size, dtype=dtype, device=decoder.device)

    hidden, wide = random(config.hidden_size), random(config.intermediate_size)
    heads = random(config.num_attention_heads * config.head_dim)
    added, gated = empty(config.hidden_size), empty(config.intermediate_size)
    qkv = empty(network.layers[0].qkv.shape[0])
    logits = empty(config.vocab_size, torch.float32)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    Work = Callable[[Layer], object]
    kinds: dict[str, tuple[Callable[[Layer], Tensor], Work, Work, Tensor]] = {
        "norm, qkv": (
            lambda layer: layer.qkv,
            lambda layer: linear.matvec(
                hidden, layer.qkv, qkv, norm=layer.input_norm, eps=eps, bias=layer.qkv_bias
            ),
            lambda layer: F.linear(normed(hidden, layer.input_norm), layer.qkv, layer.qkv_bias),
            qkv,
        ),
        "o, residual": (
            lambda layer: layer.o,
            lambda layer: linear.matvec(heads, layer.o, added, bias=layer.o_bias, residual=hidden),
            lambda layer: F.linear(heads, layer.o, layer.o_bias) + hidden,
            added,
        ),
        "norm, gate and up, SwiGLU": (
            lambda layer: layer.gate_up,
            lambda layer: linear.matvec(
                hidden, layer.gate_up, gated, norm=layer.post_norm, eps=eps, gated=True
            ),
            lambda layer: _swiglu(F.linear(normed(hidden, layer.post_norm), layer.gate_up)),
            gated,
        ),
        "down, residual": (
            lambda layer: layer.down,
            lambda layer: linear.matvec(wide, layer.down, added, residual=hidden),
            lambda layer: F.linear(wide, layer.down) + hidden,
            added,
        ),
        "norm, head": (
            lambda layer: network.lm_head,
            lambda layer: linear.matvec(
                hidden, network.lm_head, logits, norm=network.norm, eps=eps
            ),
            lambda layer: F.linear(normed(hidden, network.norm), network.lm_head),
            logits,
        ),
    }
    figures = []
    for name, (weight_of, ours, library, out) in kinds.items():
        layers = network.layers if name != "norm, head" else network.layers[:1]

        def all_layers(work: Work, layers: Sequence[Layer] = layers) -> Callable[[], None]:
            def body() -> None:
                for layer in layers:
                    work(layer)

            return body

        ours(layers[0])
        expected = library(layers[0])
        assert isinstance(expected, Tensor)
        _check(name, out, expected)
        floor_ms = sum(weight_of(layer).nbytes for layer in layers) / bytes_per_ms
        figures.append(
            KernelFigures(
                name,
                graph_ms(all_layers(ours), repeats),
                graph_ms(all_layers(library), repeats),
                floor_ms,
            )
        )
    return figures


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _attention(
    decoder: Decoder, num_rows: int, budget: int, bytes_per_ms: float, repeats: int
) -> list[KernelFigures]:
    """What a step does with the cache: append, choose, attend to the chosen rows, attend to all."""
    cache = random_cache(decoder, num_rows, SPARE_ROWS)
    policy = TokenSelect(budget=budget)
    policy.prepare(cache)
    policy.start_turn(Turn(num_rows - QUESTION_LEN, num_rows))
    plan = policy.kernel_plan()
    assert plan is not None and plan.index is not None
    if not (budget < num_rows - QUESTION_LEN - 260 and can_choose((plan,), cache.capacity)):
        raise UsageError(f"{budget:,} rows cannot be chosen from {num_rows:,}: another --chosen")
    graph = StepGraph(decoder.network, cache, [plan], None)
    graph.step(torch.tensor([7], device=decoder.device), policy.turn, None)
    cache.length = num_rows + 1
    graph.buffers.kept.state[:, 0] = num_rows
    layers = range(decoder.config.num_hidden_layers)

    def all_layers(work: Callable[[int], None]) -> Callable[[], None]:
        def body() -> None:
            for layer_idx in layers:
                work(layer_idx)

        return body

    _check_attention(graph, cache, plan.index.layer(0), policy.turn)
    row_bytes = 2 * cache.k.shape[1] * cache.k.shape[3] * cache.k.element_size()
    index_bytes = plan.index.layer(0).rows[:, :num_rows].nbytes
    num_read = rows_read(plan, policy.turn, num_rows + 1)
    read_ms = graph_ms(all_layers(lambda i: graph.attend(i, False, False)), repeats)
    both_ms = graph_ms(all_layers(lambda i: graph.attend(i, False, True)), repeats)
    votes = torch.rand(cache.k.shape[1], num_rows, device=decoder.device)
    q = graph.buffers.query.q[None, :, None]

    def library_topk(layer_idx: int) -> None:
        torch.topk(votes, budget)

    def library_attention(layer_idx: int) -> None:
        k, v = (slab[layer_idx, None, :, : num_rows + 1] for slab in (cache.k, cache.v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    per_layer: dict[str, tuple[float, float | None, float]] = {
        f"choose {budget:,} of {num_rows:,} rows (library: top-k of given votes)": (
            both_ms - read_ms,
            graph_ms(all_layers(library_topk), repeats),
            index_bytes,
        ),
        f"attend to {num_read:,} rows": (read_ms, None, num_read * row_bytes),
        f"attend to {num_rows:,} rows (library: cuDNN)": (
            graph_ms(all_layers(lambda i: graph.attend(i, True, False)), repeats),
            graph_ms(all_layers(library_attention), repeats),
            num_rows * row_bytes,
        ),
    }
    return [
        KernelFigures(name, ms, library_ms, num_bytes * len(layers) / bytes_per_ms)
        for name, (ms, library_ms, num_bytes) in per_layer.items()
    ]


def _check_attention(graph: StepGraph, cache: KVCache, index: IndexLayer, turn: Turn) -> None:
    """Compare the first layer's choice and both attentions with their torch twins."""
    buffers = graph.buffers
    graph.append(0, True)
    graph.attend(0, False, True)
    chosen, attended = buffers.chosen[0, 0], buffers.attended.clone()
    plan = graph.plans[0]
    ranges = kept_ranges(int(buffers.kept.state[0, 0]) + 1, turn, plan.sink_size, plan.window_size)
    kept_rows = row_tensor(ranges, chosen.device)
    check_rows(chosen[None].long(), kept_rows)
    check_choice(buffers, index, chosen.long(), 0, plan.summed)
    expected, scratch = torch.empty_like(attended), torch.empty(0)
    for name, rows in (("chosen rows", chosen), ("all rows", None)):
        if rows is None:
            graph.attend(0, True, False)
            attended = buffers.attended
        reference_decode.attend_token_ref(
            buffers.query.q,
            cache.k[0],
            cache.v[0],
            buffers.kept,
            rows,
            cache.k.shape[3] ** -0.5,
            expected,
            scratch,
            scratch,
            log_sum=torch.empty_like(buffers.log_sum),
        )
        _check(f"attention to {name}", attended, expected)


def _check(name: str, found: Tensor, expected: Tensor) -> None:
    difference = relative_rms(found, expected)
    if difference > _TOLERANCE:
        raise LongreadError(
            f"{name}: the result differs from torch's by {difference:.2%} relative RMS: "
            "nothing is timed"
        )
