"""xKV's low-rank form against a plain SVD, and which rows each turn reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from longread_kernels.reference import rope_ref
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longread.attention import decode_attention
from longread.cache import KVCache
from longread.config import Settings
from longread.errors import UsageError
from longread.evaluate import selection
from longread.model import Decoder
from longread.policies import XKV, Dense, Policy, TokenSelect, Turn
from longread.reread import DocumentRereader
from longread.trace import Trace

LENGTHS = (1, 63, 64, 65, 1000)
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, NUM_LATER = 5, 2, 8, 7
GROUPS = (slice(0, 4), slice(4, 5))  # of four layers, and what is left
ANGLES = torch.outer(torch.arange(4096.0), 0.7 ** torch.arange(HEAD_DIM // 2))
COS, SIN = 1.2 * ANGLES.cos(), 1.2 * ANGLES.sin()  # YaRN scales what it turns


class _Document:
    """A Rereader of documents whose keys were turned by COS and SIN."""

    vocab_size, window = 100, 4096

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def rope_rows(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return COS[start:end], SIN[start:end]

    def documents(self, cache: KVCache, observer: Policy) -> None:
        raise AssertionError("xKV needs no second reading")

    def text(self, token_ids: Tensor, observer: Policy) -> None:
        raise AssertionError("xKV reads no other text")


def _turned(rows: Tensor) -> Tensor:
    """The keys after RoPE. rows: [L, H_kv, S, D]."""
    cos, sin = COS[: rows.shape[2]], SIN[: rows.shape[2]]
    return torch.stack([rope_ref(r.transpose(0, 1), cos, sin).transpose(0, 1) for r in rows])


def _case(num_document: int, true_rank: int | None = None) -> tuple[KVCache, Tensor, Tensor]:
    """A cache of a document and NUM_LATER rows more, and its keys before RoPE and values.

    true_rank: of the document in each group, None for full.
    """
    num_rows = num_document + NUM_LATER
    shape = (NUM_LAYERS, NUM_KV_HEADS, num_rows, HEAD_DIM)
    generator = torch.Generator().manual_seed(num_document)
    k, v = torch.randn(2, *shape, generator=generator)
    for rows in (k, v) if true_rank is not None else ():
        for group in GROUPS:
            matrix = _matrix(rows[group, :, :num_document])
            left = torch.randn(num_document, true_rank or 0, generator=generator)
            right = torch.randn(true_rank or 0, matrix.shape[1], generator=generator)
            rows[group, :, :num_document] = _heads(left @ right, group)
    cache = KVCache(
        NUM_LAYERS,
        NUM_KV_HEADS,
        HEAD_DIM,
        num_rows,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    cache.k.copy_(_turned(k))
    cache.v.copy_(v)
    cache.length = num_rows
    return cache, k, v


def _matrix(rows: Tensor) -> Tensor:
    """[g, H_kv, S, D] as [S, g * H_kv * D]."""
    return rows.permute(2, 0, 1, 3).reshape(rows.shape[2], -1)


def _heads(matrix: Tensor, group: slice) -> Tensor:
    num_layers = group.stop - group.start
    return matrix.view(-1, num_layers, NUM_KV_HEADS, HEAD_DIM).permute(1, 2, 0, 3)


def _after_first_answer(policy: XKV, cache: KVCache, num_document: int) -> KVCache:
    """What is read once a question was read and an answer has begun."""
    policy.prepare(cache, _Document(num_document))
    policy.start_turn(Turn(num_document, cache.length))
    q = torch.zeros(1, NUM_KV_HEADS, HEAD_DIM)
    for layer_idx in range(NUM_LAYERS):
        policy.observe(layer_idx, q, cache.length - 1)
        assert policy.read_from(cache) is cache, "the first question reads the rows as they were"
    assert policy.select(0, q[0], cache.length) is None
    return policy.read_from(cache)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("num_features", (16, 64, 1024))
@pytest.mark.parametrize("num_rows", (63, 65, 1000, 131072))
@pytest.mark.parametrize("value_ratio", (1.5, 1.0, 0.5))
def test_ranks_store_what_the_budget_does(
    num_rows: int, num_features: int, value_ratio: float
) -> None:
    def stored(rank: int | None) -> int:
        return num_rows * num_features if rank is None else rank * (num_rows + num_features)

    step = num_rows + num_features  # what one more rank stores
    for budget in {max(1, num_rows * percent // 100) for percent in range(1, 101, 3)}:
        policy = XKV(budget, value_ratio=value_ratio)
        rank_k, rank_v = policy.ranks(num_rows, num_features)
        allowed = 2 * budget * num_features
        spent = stored(rank_k) + stored(rank_v)
        assert allowed - 2 * step < spent
        assert spent <= allowed or 1 in (rank_k, rank_v)
        if rank_k is not None and rank_v is not None:
            assert abs(rank_v - value_ratio * rank_k) < 1 + value_ratio
            assert max(rank_k, rank_v) <= min(num_rows, num_features)
    assert XKV(num_rows).ranks(num_rows, num_features) == (None, None)
    assert XKV(None).ranks(num_rows, num_features) == (None, None)


@pytest.mark.parametrize("num_document", LENGTHS)
def test_each_group_is_cut_to_its_best_approximation(
    num_document: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longread.policies.xkv._CHUNK_ROWS", 64)
    cache, k, v = _case(num_document)
    budget = max(1, num_document // 3)
    policy = XKV(budget)
    read = _after_first_answer(policy, cache, num_document)
    if num_document == 1:
        assert read is cache
        return
    for group in GROUPS:
        num_layers = group.stop - group.start
        ranks = policy.ranks(num_document, num_layers * NUM_KV_HEADS * HEAD_DIM)
        best = []
        for rows, rank in zip((k, v), ranks, strict=True):
            assert rank is not None
            matrix = _matrix(rows[group, :, :num_document]).double()
            left, scale, right = torch.linalg.svd(matrix, full_matrices=False)
            cut = (left[:, :rank] * scale[:rank]) @ right[:rank]
            best.append(_heads(cut, group).float())
        best[0] = _turned(best[0])
        for slab, expected in zip((read.k, read.v), best, strict=True):
            torch.testing.assert_close(
                slab[group, :, :num_document], expected, rtol=1e-3, atol=1e-3
            )


@pytest.mark.parametrize("num_document", (63, 300))
def test_rows_of_low_rank_come_out_as_they_were(num_document: int) -> None:
    cache, _, _ = _case(num_document, true_rank=3)
    policy = XKV(num_document // 2)
    ranks = [policy.ranks(num_document, NUM_KV_HEADS * HEAD_DIM * layers) for layers in (4, 1)]
    assert all(rank is not None and 3 <= rank for pair in ranks for rank in pair)
    read = _after_first_answer(policy, cache, num_document)
    assert read is not cache
    torch.testing.assert_close(read.k, cache.k, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(read.v, cache.v, rtol=1e-3, atol=1e-3)


def test_more_budget_means_less_error_and_all_rows_none() -> None:
    cache, _, _ = _case(200)
    errors = []
    for budget in (5, 20, 50, 100, 190):
        read = _after_first_answer(XKV(budget), cache, 200)
        errors.append((_error(read.k, cache.k), _error(read.v, cache.v)))
    for column in zip(*errors, strict=True):
        assert sorted(column, reverse=True) == list(column) and column[0] > 0.5
    assert errors[-1][1] == 0.0, "the values fit as they are, and the keys have the rest"
    assert errors[-1][0] > 0.0
    for budget in (200, 1000, None):
        assert _after_first_answer(XKV(budget), cache, 200) is cache


def test_rows_after_the_documents_are_exact_and_the_documents_are_not() -> None:
    cache, _, _ = _case(100)
    read = _after_first_answer(XKV(20), cache, 100)
    assert read.k.shape == cache.k.shape and read.k.dtype == cache.k.dtype
    for found, given in ((read.k, cache.k), (read.v, cache.v)):
        assert torch.equal(found[:, :, 100:], given[:, :, 100:])
        assert (found[:, :, :100] != given[:, :, :100]).any(dim=-1).all()


def test_another_document_begins_anew() -> None:
    policy = XKV(20)
    first, _, _ = _case(100)
    second, _, _ = _case(64)
    slab = _after_first_answer(policy, first, 100).v
    read = _after_first_answer(policy, second, 64)  # asserts that the rows are read as they are
    assert read.v is slab and read.length == 64 + NUM_LATER
    assert _error(read.v[:, :, :64], second.v[:, :, :64]) < 0.9
    third, _, _ = _case(200)
    assert _after_first_answer(policy, third, 200).capacity == third.capacity


class _Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation returns in storage of its own."""

    num_bytes = 0
    num_slabs = 0

    def __init__(self, slab_bytes: int) -> None:
        super().__init__()
        self._slab_bytes = slab_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if func is torch.ops.aten.empty.memory_format and tensor.nbytes == self._slab_bytes:
                self.num_slabs += 1
            elif not func.is_view and not func._schema.is_mutable:
                self.num_bytes = max(self.num_bytes, tensor.nbytes)
        return out


def test_it_takes_one_more_copy_of_the_rows_and_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longread.policies.xkv._CHUNK_ROWS", 64)
    cache, _, _ = _case(2000)
    with _Largest(cache.k.nbytes) as largest:
        _after_first_answer(XKV(400), cache, 2000)
    assert largest.num_slabs == 2, "keys and values, once"
    num_features = 4 * NUM_KV_HEADS * HEAD_DIM
    assert largest.num_bytes == 4 * 64 * num_features < cache.k.nbytes / 20


@pytest.fixture(scope="module")
def decoder(device: str, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    root = tmp_path_factory.mktemp("xkv")
    folder = tiny.save_hf_folder(root / "hf", "qwen3", num_hidden_layers=5)
    return Decoder.load(tiny.convert(folder, root / "models"), device, "float32")


@pytest.fixture(scope="module")
def ids(decoder: Decoder) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, decoder.config.vocab_size, (1000,), generator=generator)


def _turn(
    decoder: Decoder, ids: Tensor, cache: KVCache, policy: Policy, num_tokens: int = 3
) -> tuple[Tensor, Trace]:
    """Logits of a question of ten tokens and of an answer, and what they attended to."""
    config, start = decoder.config, cache.length
    trace = Trace(config.num_hidden_layers, config.num_key_value_heads, 300, device=decoder.device)
    policy.start_turn(Turn(start, start + 10))
    logits = [decoder.extend(ids[start : start + 10], cache, policy, trace)]
    for position in range(start + 10, start + 10 + num_tokens):
        logits.append(decoder.decode(ids[position : position + 1], cache, policy, trace))
    return torch.stack(logits), trace


def _opened(decoder: Decoder, ids: Tensor, policy: Policy, capacity: int = 400) -> KVCache:
    cache = decoder.new_cache(capacity)
    decoder.prefill(ids[:300], cache)
    policy.prepare(cache, DocumentRereader(decoder, ids[:300]))
    return cache


def test_later_turns_read_the_rebuilt_rows_alone(decoder: Decoder, ids: Tensor) -> None:
    """The question of the first turn is dense; from the answer on the originals may be lost."""
    turns = {}
    for kind, policy in (("dense", Dense()), ("xkv", XKV(60)), ("poisoned", XKV(60))):
        cache = _opened(decoder, ids, policy)
        first, _ = _turn(decoder, ids, cache, policy)
        if kind == "poisoned":
            cache.k[:, :, :300] = torch.nan
            cache.v[:, :, :300] = torch.nan
        second, trace = _turn(decoder, ids, cache, policy)
        turns[kind] = (first, second, trace)
    dense, xkv, poisoned = (turns[kind] for kind in ("dense", "xkv", "poisoned"))
    assert torch.equal(xkv[0][0], dense[0][0])
    assert (xkv[0][1:] - dense[0][1:]).abs().amax(dim=1).min() > 1e-3
    assert (xkv[1] - dense[1]).abs().amax(dim=1).min() > 1e-3
    assert torch.equal(poisoned[1], xkv[1])
    assert torch.isfinite(poisoned[2].mass).all() and torch.equal(poisoned[2].mass, xkv[2].mass)
    assert xkv[2].fraction_kept == 1.0


def test_the_second_question_attends_to_the_rebuilt_rows(decoder: Decoder, ids: Tensor) -> None:
    """The same rows in a dense cache give the same logits."""
    policy = XKV(60)
    cache = _opened(decoder, ids, policy)
    _turn(decoder, ids, cache, policy)
    twin = decoder.new_cache(400)
    read = policy.read_from(cache)
    twin.k.copy_(read.k)
    twin.v.copy_(read.v)
    twin.length = cache.length
    found, trace = _turn(decoder, ids, cache, policy)
    expected, expected_trace = _turn(decoder, ids, twin, Dense())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(trace.mass, expected_trace.mass)


def test_undone_turns_are_written_over_and_the_slab_grows(decoder: Decoder, ids: Tensor) -> None:
    policy = XKV(60)
    cache = _opened(decoder, ids, policy, capacity=310)
    _turn(decoder, ids, cache, policy)
    document = policy.read_from(cache).k[:, :, :300].clone()
    cache.truncate(300)
    shifted = ids.roll(7)
    while cache.length < 600:
        _turn(decoder, shifted, cache, policy, num_tokens=100)
    read, end = policy.read_from(cache), cache.length
    assert read.length == end and read.capacity >= end
    assert torch.equal(read.k[:, :, :300], document)
    assert torch.equal(read.k[:, :, 300:end], cache.k[:, :, 300:end])
    assert torch.equal(read.v[:, :, 300:end], cache.v[:, :, 300:end])


def test_an_answer_without_tokens_is_followed_by_rebuilt_rows(
    decoder: Decoder, ids: Tensor
) -> None:
    policy = XKV(60)
    cache = _opened(decoder, ids, policy)
    _turn(decoder, ids, cache, policy, num_tokens=0)
    assert policy.read_from(cache) is cache
    _turn(decoder, ids, cache, policy, num_tokens=0)
    assert policy.read_from(cache) is not cache


def test_selection_only_says_that_there_is_nothing_to_measure(settings: Settings) -> None:
    def unused(event: object) -> None:
        raise AssertionError(event)

    with pytest.raises(UsageError, match="xkv reads every row, .* choose another --policy"):
        selection.run(
            replace(settings, policy="xkv"),
            "none.txt",
            pages=None,
            password=None,
            progress=unused,
            notice=unused,
        )


def output_errors(
    decoder: Decoder, token_ids: Tensor, policies: dict[str, Policy], num_tokens: int
) -> dict[str, float]:
    """Mean over layers and the last tokens of |found - exact| / |exact| of the attention output.

    The tokens before those are the document; all are read with dense attention.
    """
    num_rows = len(token_ids) - num_tokens
    cache = decoder.new_cache(len(token_ids))
    decoder.prefill(token_ids[:num_rows], cache)
    for policy in policies.values():
        policy.prepare(cache, DocumentRereader(decoder, token_ids[:num_rows]))
        policy.start_turn(Turn(num_rows, num_rows))
    errors: dict[str, list[float]] = {name: [] for name in policies}

    class Measured(Policy):
        def appended(self, layer_idx: int, start: int, end: int) -> None:
            for policy in policies.values():
                policy.appended(layer_idx, start, end)

        def select(self, layer_idx: int, q: Tensor, num_rows: int) -> None:
            exact = decode_attention(q, cache, layer_idx, num_rows, Dense(), None).float()
            for name, policy in policies.items():
                found = decode_attention(q, cache, layer_idx, num_rows, policy, None).float()
                errors[name].append(_error(found, exact))

    measured = Measured()
    for token in token_ids[num_rows:].split(1):
        decoder.decode(token, cache, measured)
    return {name: sum(found) / len(found) for name, found in errors.items()}


@pytest.mark.weights
def test_layers_that_share_a_basis_lose_less_than_layers_alone(smollm2_dir: Path) -> None:
    """The paper's claim, at as many numbers stored; the figures are those of docs/quality.md."""
    from longread.tokenizer import Tokenizer

    text = Path(__file__).parent.parent.joinpath("sample_docs/us_constitution.txt").read_text()
    token_ids = torch.tensor(Tokenizer.load(smollm2_dir).encode(text)[:2048])
    smollm2 = Decoder.load(smollm2_dir, "cpu", "bfloat16")
    policies: dict[str, Policy] = {}
    for percent in (5, 20, 50):
        budget = len(token_ids) * percent // 100
        policies[f"groups of 4, {percent} %"] = XKV(budget)
        policies[f"layers alone, {percent} %"] = XKV(budget, group_size=1)
        policies[f"tokenselect, {percent} %"] = TokenSelect(budget)
    found = output_errors(smollm2, token_ids, policies, num_tokens=16)
    expected = {
        "groups of 4": (0.68, 0.51, 0.30),
        "layers alone": (0.83, 0.60, 0.41),
        "tokenselect": (0.05, 0.03, 0.01),
    }
    for name, errors in expected.items():
        for percent, error in zip((5, 20, 50), errors, strict=True):
            assert found[f"{name}, {percent} %"] == pytest.approx(error, abs=0.02)
