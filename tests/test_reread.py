"""A second reading shows the queries of the first, and the cache is what it was."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import tiny
import torch
from torch import Tensor

from longread.cache import KVCache
from longread.errors import ContextError
from longread.model import Decoder
from longread.policies import Policy, Rereader
from longread.reread import DocumentRereader, blank_mass


@dataclass
class _Recorder(Policy):
    q: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    cache: KVCache | None = None

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        self.cache = cache

    def observe(self, layer_idx: int, q: Tensor, start: int) -> None:
        self.q[layer_idx, start] = q.clone()


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    root = tmp_path_factory.mktemp("reread")
    folder = tiny.save_hf_folder(root / "hf", "qwen2")
    return Decoder.load(tiny.convert(folder, root / "models"), "cpu", "float32")


def test_the_queries_are_those_of_one_reading(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longread.reread._CHUNK_TOKENS", 64)
    ids = torch.randint(0, decoder.config.vocab_size, (150,), generator=torch.Generator())
    cache = decoder.new_cache(200)
    decoder.prefill(ids[:130], cache)
    decoder.extend(ids[130:], cache, Policy())  # a conversation follows the documents
    cache.k[:, :, :130] *= 1.0001  # as if the stored rows were rounded
    k, v, moment = cache.k[:, :, :150].clone(), cache.v[:, :, :150].clone(), cache.q_moment.clone()
    rereader, found, expected = DocumentRereader(decoder, ids[:130]), _Recorder(), _Recorder()
    rereader.documents(cache, found)
    rereader.text(ids[:130], expected)
    assert cache.length == 150 and rereader.num_rows == 130
    assert torch.equal(cache.k[:, :, :150], k) and torch.equal(cache.v[:, :, :150], v)
    assert torch.equal(cache.q_moment, moment)
    assert expected.cache is not None and expected.cache.length == 130
    for layer_idx in range(decoder.config.num_hidden_layers):
        shown = torch.cat([found.q[layer_idx, start] for start in (0, 64, 128)])
        torch.testing.assert_close(shown, expected.q[layer_idx, 0], rtol=0.02, atol=0.02)


def test_a_failure_leaves_the_cache_as_it_was(decoder: Decoder) -> None:
    class Failing(Policy):
        def left(self, layer_idx: int, num_rows: int) -> Tensor | None:
            raise ArithmeticError

    ids = torch.arange(20)
    cache = decoder.new_cache(20)
    decoder.prefill(ids, cache)
    cache.k *= 1.5
    k = cache.k.clone()
    with pytest.raises(ArithmeticError):
        DocumentRereader(decoder, ids).documents(cache, Failing())
    assert torch.equal(cache.k, k) and cache.length == 20


def test_what_an_empty_question_looks_at(decoder: Decoder) -> None:
    config = decoder.config
    ids = torch.randint(0, config.vocab_size, (90,), generator=torch.Generator())
    cache = decoder.new_cache(90)
    decoder.prefill(ids, cache)
    k, moment = cache.k[:, :, :90].clone(), cache.q_moment.clone()
    mass = blank_mass(decoder, cache, [5, 6, 7])
    assert mass.shape == (config.num_hidden_layers, config.num_key_value_heads, 90)
    heads = config.num_attention_heads // config.num_key_value_heads
    assert ((mass.sum(dim=-1) > 0) & (mass.sum(dim=-1) < heads)).all()  # the rest is its own
    assert cache.length == 90
    assert torch.equal(cache.k[:, :, :90], k) and torch.equal(cache.q_moment, moment)
    assert torch.equal(blank_mass(decoder, cache, [5, 6, 7]), mass)
    with pytest.raises(ContextError):
        blank_mass(decoder, cache, [5] * config.window)
    assert cache.length == 90
