"""The compressed key index: optimality of its basis, quantisation, growth, by-products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longread.cache import KVCache
from longread.errors import UsageError
from longread.index import KeyIndex

NUM_KV_HEADS, GROUP, HEAD_DIM = 2, 3, 16


def _cache_with_queries(num_rows: int, capacity: int = 0) -> tuple[KVCache, Tensor]:
    """Keys and queries whose variance lies in different directions, as in real heads."""
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(
        1,
        NUM_KV_HEADS,
        HEAD_DIM,
        capacity or num_rows,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    spread = torch.logspace(0, -2, HEAD_DIM)
    mix = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, generator=generator)).Q
    k = torch.randn(num_rows, NUM_KV_HEADS, HEAD_DIM, generator=generator) * spread + 1.0
    q = torch.randn(num_rows, NUM_KV_HEADS * GROUP, HEAD_DIM, generator=generator)
    q = (q * spread.flip(0)) @ mix
    cache.k[0, :, :num_rows] = k.transpose(0, 1)
    cache.length = num_rows
    grouped = q.transpose(0, 1).reshape(NUM_KV_HEADS, -1, HEAD_DIM)
    cache.add_moment(0, grouped.transpose(1, 2) @ grouped)
    return cache, q


def _error(index: KeyIndex, cache: KVCache, q: Tensor) -> float:
    exact = KeyIndex(cache, "exact", 0)
    num = den = 0.0
    for row in q[:20]:
        reference = exact.scores(0, row, cache.length)
        found = index.scores(0, row, cache.length)
        num += float((found - reference).pow(2).sum())
        den += float((reference - reference.mean(dim=-1, keepdim=True)).pow(2).sum())
    return (num / den) ** 0.5


@pytest.mark.parametrize("num_rows", (1, 63, 64, 65, 1000))
def test_exact_scores_are_scaled_dot_products(num_rows: int) -> None:
    cache, q = _cache_with_queries(num_rows)
    found = KeyIndex(cache, "exact", 0).scores(0, q[0], num_rows)
    expected = torch.einsum("hgd,hsd->hgs", q[0].view(NUM_KV_HEADS, GROUP, -1), cache.k[0])
    torch.testing.assert_close(found, expected * HEAD_DIM**-0.5)


@pytest.mark.parametrize(("kind", "limit"), (("int8", 0.02), ("fp8", 0.1)))
def test_a_full_rank_index_loses_only_the_rounding(kind: str, limit: float) -> None:
    cache, q = _cache_with_queries(1000)
    assert _error(KeyIndex(cache, kind, HEAD_DIM), cache, q) < limit


def test_the_error_falls_with_the_rank() -> None:
    cache, q = _cache_with_queries(1000)
    errors = [_error(KeyIndex(cache, "int8", dim), cache, q) for dim in (1, 2, 4, 8, 16)]
    assert errors == sorted(errors, reverse=True)


def test_the_basis_beats_the_principal_components_of_the_keys() -> None:
    cache, q = _cache_with_queries(1000)
    ours = _error(KeyIndex(cache, "int8", 4), cache, q)
    cache.q_moment[0] = torch.eye(HEAD_DIM)  # with white queries the basis is the keys' PCA
    assert ours < 0.9 * _error(KeyIndex(cache, "int8", 4), cache, q)


def test_rows_appended_later_score_like_rows_indexed_at_once() -> None:
    whole, q = _cache_with_queries(200)
    grown, _ = _cache_with_queries(200, capacity=200)
    index = KeyIndex(grown, "int8", 4)
    more = torch.randn(300, NUM_KV_HEADS, HEAD_DIM)
    grown.reserve(500)
    grown.k[0, :, 200:500] = more.transpose(0, 1)
    index.append(0, 200, 500)
    found = index.scores(0, q[0], 500)
    torch.testing.assert_close(found[..., :200], KeyIndex(whole, "int8", 4).scores(0, q[0], 200))
    grown.length = 500
    exact = KeyIndex(grown, "exact", 0).scores(0, q[0], 500)
    assert torch.corrcoef(torch.stack((found[0, 0], exact[0, 0])))[0, 1] > 0.5


class _Memory:
    def __init__(self) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {}

    def read_extra(self, name: str) -> dict[str, Tensor] | None:
        return self.tensors.get(name)

    def write_extra(self, name: str, tensors: dict[str, Tensor]) -> None:
        self.tensors[name] = tensors


@pytest.mark.parametrize("kind", ("int8", "fp8"))
def test_a_stored_index_is_read_back_instead_of_built(kind: str) -> None:
    cache, q = _cache_with_queries(100)
    cache.by_products = _Memory()
    first = KeyIndex(cache, kind, 4).scores(0, q[0], 100)
    assert list(cache.by_products.tensors) == [f"index-{kind}-4-static"]
    cache.q_moment.zero_()  # would give another basis if it were built again
    assert torch.equal(KeyIndex(cache, kind, 4).scores(0, q[0], 100), first)


def test_bad_kinds_and_sizes_are_usage_errors() -> None:
    cache, _ = _cache_with_queries(10)
    with pytest.raises(UsageError, match="index must be one of"):
        KeyIndex(cache, "int3", 0)
    with pytest.raises(UsageError, match="index-dim must be 0 to 16"):
        KeyIndex(cache, "int8", 17)


@pytest.mark.parametrize("num_rows", (1, 2, 5))
def test_documents_of_a_few_tokens_have_an_index(num_rows: int) -> None:
    cache, q = _cache_with_queries(num_rows)
    assert torch.isfinite(KeyIndex(cache, "int8", 0).scores(0, q[0], num_rows)).all()


@pytest.mark.parametrize(("head_dim", "width"), ((16, 16), (64, 32), (128, 32), (256, 64)))
def test_the_index_is_a_quarter_of_the_head_but_32_at_least(head_dim: int, width: int) -> None:
    cache = KVCache(1, 1, head_dim, 20, device=torch.device("cpu"), dtype=torch.float32)
    cache.k.normal_()
    cache.q_moment.copy_(torch.eye(head_dim))
    cache.length = 20
    assert KeyIndex(cache, "int8", 0).layer(0).rows.shape == (1, 20, width)
