"""The runner against Hugging Face's models: prefill, chunked prefill, extend and decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from longread import model as model_module
from longread.attention import causal_attention
from longread.bench.prefill import relative_rms
from longread.cache import KVCache
from longread.device import choose_device, choose_dtype
from longread.errors import ContextError, ModelError
from longread.model import Decoder
from longread.policies import Dense

TOLERANCE = 1e-4
NUM_TOKENS = 300
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in tiny.FAMILIES},
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "dynamic-rope": ("llama", {"rope_parameters": DYNAMIC}),
    "yarn-rope": ("qwen3", {"rope_parameters": YARN}),
    "one-kv-head": ("qwen2", {"num_key_value_heads": 1}),
    "no-groups": ("llama", {"num_key_value_heads": 6}),
}


@pytest.fixture(scope="module", params=CASES)
def pair(
    request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Decoder, Tensor, Tensor]:
    """A decoder, token ids, and Hugging Face's logits of every position, computed on the CPU."""
    from transformers import AutoModelForCausalLM

    family, overrides = CASES[request.param]
    root = tmp_path_factory.mktemp(request.param)
    folder = tiny.save_hf_folder(root / "hf", family, **overrides)
    decoder = Decoder.load(tiny.convert(folder, root / "models"), device, "float32")
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, decoder.config.vocab_size, (NUM_TOKENS,))
    with torch.inference_mode():
        logits = oracle(ids[None]).logits[0]
    return decoder, ids, logits


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu() - expected).abs().max())


def test_prefill_then_extend_gives_hugging_face_logits(
    pair: tuple[Decoder, Tensor, Tensor],
) -> None:
    decoder, ids, expected = pair
    cache = decoder.new_cache(NUM_TOKENS)
    decoder.prefill(ids[:-1], cache)
    logits = decoder.extend(ids[-1:], cache, Dense())
    assert _difference(logits, expected[-1]) < TOLERANCE


@pytest.mark.parametrize("chunk", (7, 63, 64, 65))
def test_chunked_prefill_gives_the_same(
    pair: tuple[Decoder, Tensor, Tensor], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, ids, expected = pair
    monkeypatch.setitem(model_module._CHUNK_TOKENS, decoder.device.type, chunk)
    cache = decoder.new_cache(1)  # has to grow
    read: list[int] = []
    decoder.prefill(ids[:200], cache, read.append)
    logits = decoder.extend(ids[200:], cache, Dense())
    assert _difference(logits, expected[-1]) < TOLERANCE
    assert read == sorted(read) and read[-1] == 200
    assert len(read) == decoder.config.num_hidden_layers * -(-200 // chunk)


def test_decode_gives_hugging_face_logits_at_each_step(
    pair: tuple[Decoder, Tensor, Tensor],
) -> None:
    decoder, ids, expected = pair
    cache = decoder.new_cache(NUM_TOKENS)
    decoder.prefill(ids[:200], cache)
    decoder.extend(ids[200:250], cache, Dense())
    for position in range(250, NUM_TOKENS):
        logits = decoder.decode(ids[position : position + 1], cache, Dense())
        assert _difference(logits, expected[position]) < TOLERANCE
    assert cache.length == NUM_TOKENS


def test_a_truncated_cache_answers_as_if_the_turn_had_not_been(
    pair: tuple[Decoder, Tensor, Tensor],
) -> None:
    decoder, ids, expected = pair
    cache = decoder.new_cache(NUM_TOKENS)
    decoder.prefill(ids[:200], cache)
    decoder.extend(ids[:50], cache, Dense())
    cache.truncate(200)
    logits = decoder.extend(ids[200:], cache, Dense())
    assert _difference(logits, expected[-1]) < TOLERANCE


def test_the_window_is_a_limit_with_its_numbers(pair: tuple[Decoder, Tensor, Tensor]) -> None:
    decoder, ids, _ = pair
    cache = decoder.new_cache(1)
    too_many = ids.repeat(14)[: decoder.config.window + 1]
    with pytest.raises(ContextError, match=f"{decoder.config.window + 1:,} tokens"):
        decoder.extend(too_many, cache, Dense())
    assert cache.length == 0


def test_chunks_in_bf16_attend_like_one_chunk_in_fp32(device: str) -> None:
    """The merge of past and chunk, in the dtype and head sizes of real models."""
    generator = torch.Generator().manual_seed(0)
    num_rows, start = 1000, 700
    for head_dim, num_heads, num_kv_heads in ((64, 9, 3), (128, 12, 2), (96, 4, 4), (256, 4, 1)):
        cache = KVCache(
            1, num_kv_heads, head_dim, num_rows, device=torch.device(device), dtype=torch.bfloat16
        )
        shape = (num_rows, num_kv_heads, head_dim)
        k, v = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        cache.k[0], cache.v[0] = k.transpose(0, 1), v.transpose(0, 1)
        q = torch.randn(num_rows - start, num_heads, head_dim, generator=generator)
        q = q.to(device, torch.bfloat16)
        found = causal_attention(q, cache, 0, start).float()
        mask = torch.ones(num_rows - start, num_rows, dtype=torch.bool, device=device).tril(start)
        expected = (
            torch.nn.functional.scaled_dot_product_attention(
                q.float().transpose(0, 1)[None],
                cache.k[0, None].float().repeat_interleave(num_heads // num_kv_heads, 1),
                cache.v[0, None].float().repeat_interleave(num_heads // num_kv_heads, 1),
                attn_mask=mask,
            )[0]
            .transpose(0, 1)
            .flatten(1)
        )
        assert relative_rms(found, expected) < 0.01


def test_unknown_devices_and_dtypes_are_model_errors() -> None:
    with pytest.raises(ModelError, match="no such device"):
        choose_device("gpu please")
    with pytest.raises(ModelError, match="not supported"):
        choose_device("meta")
    with pytest.raises(ModelError, match="dtype must be"):
        choose_dtype("float16")


@pytest.mark.weights
def test_smollm2_in_bf16_answers_as_hugging_face(smollm2_dir: Path) -> None:
    _assert_same_answers(smollm2_dir)


@pytest.mark.weights_all
def test_qwen_05b_in_bf16_answers_as_hugging_face(qwen05_dir: Path) -> None:
    _assert_same_answers(qwen05_dir)


def _assert_same_answers(model_dir: Path) -> None:
    """The same 16 greedy tokens on three prompts, or logits within 2 % relative RMS."""
    from longread.bench.prefill import huggingface_model
    from longread.bench.shapes import load_model
    from longread.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(model_dir)
    decoder = Decoder.load(model_dir, "cpu", "bfloat16")
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    oracle = huggingface_model(*load_model(str(model_dir), cpu, dtype), cpu, dtype)
    text = Path(__file__).parent.parent.joinpath("sample_docs/us_constitution.txt").read_text()
    for prompt in ("The capital of France is", text[:3000], "def fibonacci(n):\n"):
        ids = torch.tensor(tokenizer.encode(prompt))
        cache = decoder.new_cache(len(ids) + 16)
        logits = decoder.extend(ids, cache, Dense())
        for _ in range(16):
            with torch.inference_mode():
                expected = oracle(ids[None], logits_to_keep=1).logits[0, -1].float()
            same_choice = logits.argmax() == expected.argmax()
            assert same_choice or relative_rms(logits, expected) < 0.02
            token = expected.argmax(keepdim=True)
            ids = torch.cat((ids, token))
            logits = decoder.decode(token, cache, Dense())
