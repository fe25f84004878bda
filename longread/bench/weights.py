"""A decode step on a CPU under each form of the weights, beside what reading their bytes takes.

The cache is filled with random rows, so that a form costs what it costs whatever the text. A form
of which a product is far from that of the bf16 matrix is not timed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from longread.bench.prefill import relative_rms
from longread.cache import KVCache
from longread.errors import LongreadError
from longread.matrix import Int4Matrix, Int8Matrix, Matrix
from longread.model import Decoder
from longread.policies import Policy, Turn

_NAMES = ("qkv", "o", "gate_up", "down")
_WARM_UPS = 2
_QUESTION_LEN = 32
_READ_BYTES = 512 << 20
_MOST_DIFFERENCE = {"int8": 0.02, "int4": 0.2}  # relative RMS; int4 may be rounded from 16 bits


@dataclass(frozen=True)
class WeightFigures:
    """step_bytes: of the matrices, each read once a step. floor_ms: reading them, at the rate of a
    sum. step_ms: median, with the policy; products_ms: by tokens at a time, all matrices once,
    each in this form though bf16 may be faster; difference: relative RMS of the product that is
    farthest from the bf16 matrix's.
    """

    form: str
    step_bytes: int
    floor_ms: float
    step_ms: float
    products_ms: dict[int, float]
    difference: float


def read_rate() -> float:
    """Bytes a second that this process reads from memory, the best of several."""
    values = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / min(_times(lambda: values.sum(), 5))


@torch.inference_mode()
def measure(
    decoder: Decoder,
    form: str,
    policy: Policy,
    num_rows: int,
    token_counts: Sequence[int],
    repeats: int,
    rate: float,
) -> WeightFigures:
    """The figures of a form. rate: of `read_rate`.

    Raises ContextError where the rows do not fit the window, LongreadError for products far off.
    """
    cache = _random_cache(decoder, num_rows, _WARM_UPS + repeats + 1)
    policy = dataclasses.replace(policy)
    policy.prepare(cache)
    policy.start_turn(Turn(num_rows - _QUESTION_LEN, num_rows))
    difference = _difference(decoder)
    if not difference <= _MOST_DIFFERENCE.get(form, 0.0):
        raise LongreadError(
            f"a product of {form} differs by {difference:.0%} relative RMS: nothing is timed"
        )
    token = torch.tensor([7])
    step_s = median(_times(lambda: decoder.decode(token, cache, policy), repeats))
    num_bytes = _step_bytes(decoder)
    products = {count: _products_ms(decoder, count, repeats) for count in token_counts}
    floor_ms = 1e3 * num_bytes / rate
    return WeightFigures(form, num_bytes, floor_ms, 1e3 * step_s, products, difference)


def _random_cache(decoder: Decoder, num_rows: int, num_spare: int) -> KVCache:
    cache = decoder.new_cache(num_rows + num_spare)
    generator = torch.Generator().manual_seed(1)
    for slab in (cache.k, cache.v):
        slab.normal_(generator=generator)
    cache.q_moment.copy_(torch.eye(decoder.config.head_dim))
    cache.length = num_rows
    return cache


def _times(body: Callable[[], object], repeats: int) -> list[float]:
    for _ in range(_WARM_UPS):
        body()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        body()
        seconds.append(time.perf_counter() - start)
    return seconds


def _products(decoder: Decoder, num_tokens: int, most_rows: int) -> Iterator[Tensor]:
    """Each matrix by random tokens, in its form for up to `most_rows` of them."""
    network = decoder.network
    generator = torch.Generator().manual_seed(2)
    columns = {name: getattr(network.layers[0], name).shape[1] for name in _NAMES}
    inputs = {
        name: torch.randn(num_tokens, count, generator=generator).to(decoder.dtype)
        for name, count in columns.items()
    }
    for layer in network.layers:
        for name, x in inputs.items():
            yield layer.times(name, x, most_rows)
    yield network.logits(inputs["qkv"], most_rows)


def _difference(decoder: Decoder) -> float:
    pairs = zip(_products(decoder, 1, 1), _products(decoder, 1, 0), strict=True)
    return max(relative_rms(found, expected) for found, expected in pairs)


def _products_ms(decoder: Decoder, num_tokens: int, repeats: int) -> float:
    def run() -> None:
        for _ in _products(decoder, num_tokens, num_tokens):
            pass

    return 1e3 * median(_times(run, max(3, repeats // (1 + num_tokens // 8))))


def _step_bytes(decoder: Decoder) -> int:
    network = decoder.network
    pairs: list[tuple[Tensor, Matrix | None]] = [(network.lm_head, network.packed_head)]
    for layer in network.layers:
        pairs += [(getattr(layer, name), layer.packed.get(name)) for name in _NAMES]
    return sum(wide.nbytes if packed is None else _bytes(packed) for wide, packed in pairs)


def _bytes(matrix: Matrix) -> int:
    if isinstance(matrix, Int8Matrix):
        return _bytes(matrix.high) + _bytes(matrix.low)
    assert isinstance(matrix, Int4Matrix), "a form of matrix.py"
    return matrix.codes.nbytes + matrix.scale_zero.nbytes
