"""GGUF files: every family, quantisations, RoPE, tokenizers, and damaged or hostile files."""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from converted import assert_same, fused, run, stored
from gguf import GGMLQuantizationType as Quant
from tiny_gguf import HEAD_DIM, HEADS, KV_HEADS, TEXTS, write_gguf
from tokenizers import Tokenizer

from longread.errors import ModelError
from longread.gguf_reader import GGUFTensor, dequantize
from longread.weights import load_config


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_gguf_of_each_family(tmp_path: Path, arch: str) -> None:
    expected, tokenizer = write_gguf(tmp_path / "tiny.gguf", arch, tied=arch == "llama")
    path = run(tmp_path / "tiny.gguf", tmp_path)
    config = load_config(path)
    assert (config.family, config.name, config.window) == (arch, "tiny", 512)
    assert (config.num_attention_heads, config.num_key_value_heads) == (HEADS, KV_HEADS)
    assert (config.head_dim, config.torch_dtype) == (HEAD_DIM, "bfloat16")
    assert config.tie_word_embeddings == (arch == "llama")
    assert set(config.eos_token_ids) == {0, 2}
    parts = {name: torch.from_numpy(values).bfloat16() for name, values in expected.items()}
    found = stored(path, torch.bfloat16)
    assert_same(found, fused(parts, 2))
    exponents = torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
    assert torch.allclose(found["inv_freq"], 50000.0**-exponents)
    mine = Tokenizer.from_file(str(path / "tokenizer.json"))
    for text in (*TEXTS, "<|im_start|>user 23  x\r\n", "ships' été"):
        assert mine.encode(text).ids == tokenizer.encode(text).ids
        assert mine.decode(mine.encode(text).ids) == tokenizer.decode(tokenizer.encode(text).ids)
    assert mine.get_added_tokens_decoder()[2].special


def test_rounding_is_to_the_nearest(tmp_path: Path) -> None:
    expected, _ = write_gguf(tmp_path / "tiny.gguf", "llama", quants={})
    found = stored(run(tmp_path / "tiny.gguf", tmp_path))["layers.0.down"].numpy()
    exact = expected["layers.0.down"]
    bits = exact.view(np.uint32) & np.uint32(0xFFFF0000)
    toward_zero = bits.view(np.float32)
    away = (bits + np.uint32(0x10000)).view(np.float32)
    best = np.minimum(np.abs(exact - toward_zero), np.abs(exact - away))
    assert np.array_equal(np.abs(exact - found), best)


def test_rope_in_a_gguf(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    write_gguf(
        tmp_path / "llama3.gguf", "llama", add=lambda w: w.add_tensor("rope_freqs.weight", factors)
    )
    path = run(tmp_path / "llama3.gguf", tmp_path)
    exponents = torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
    plain = 50000.0**-exponents
    assert load_config(path).rope_type == "llama3"
    assert torch.allclose(stored(path)["inv_freq"], plain / torch.from_numpy(factors))

    def scale(kind: gguf.RopeScalingType) -> Any:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_scaling_type(kind)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(256)
            writer.add_sliding_window(400)

        return add

    write_gguf(tmp_path / "linear.gguf", "qwen2", add=scale(gguf.RopeScalingType.LINEAR))
    path = run(tmp_path / "linear.gguf", tmp_path)
    assert torch.allclose(stored(path)["inv_freq"], plain / 4)
    assert load_config(path).window == 400
    write_gguf(tmp_path / "yarn.gguf", "qwen2", add=scale(gguf.RopeScalingType.YARN))
    config = load_config(run(tmp_path / "yarn.gguf", tmp_path))
    assert config.attention_scaling == pytest.approx(1 + 0.1 * np.log(4))
    assert config.rope_parameters["original_max_position_embeddings"] == 256
    write_gguf(tmp_path / "long.gguf", "qwen2", add=scale(gguf.RopeScalingType.LONGROPE))
    with pytest.raises(ModelError, match="'longrope' is not supported"):
        run(tmp_path / "long.gguf", tmp_path)


def test_what_a_gguf_may_not_be(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, "gemma3")
    with pytest.raises(ModelError, match="family 'gemma3'; supported"):
        run(path, tmp_path)
    expert = np.zeros((2, 32, 32), np.float32)
    write_gguf(path, "llama", add=lambda w: w.add_tensor("blk.0.ffn_gate_exps.weight", expert))
    with pytest.raises(ModelError, match="ffn_gate_exps"):
        run(path, tmp_path)
    for key in ("embedding_length", "attention.head_count", "context_length", "block_count"):
        write_gguf(
            path, "llama", add=partial(gguf.GGUFWriter.add_uint32, key=f"llama.{key}", val=0)
        )
        with pytest.raises(ModelError):
            run(path, tmp_path)
    write_gguf(path, "llama", pre="klingon")
    with pytest.raises(ModelError, match="pre-tokenizer 'klingon'"):
        run(path, tmp_path)
    write_gguf(path, "llama", model="rwkv")
    with pytest.raises(ModelError, match="tokenizer of the kind 'rwkv'"):
        run(path, tmp_path)
    assert not [p for p in (tmp_path / "converted").iterdir() if p.suffix != ".lock"]


@pytest.mark.parametrize(
    ("num_bytes", "part"), [(0, "it is empty"), (3, "not a GGUF"), (20, "it is cut short")]
)
def test_a_gguf_that_is_cut_short(tmp_path: Path, num_bytes: int, part: str) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, "llama")
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match=part):
        run(path, tmp_path)


def test_a_sentencepiece_gguf(tmp_path: Path) -> None:
    pieces = ["\u2581", "t", "h", "e", "th", "the", "\u2581the"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]

    def add(writer: gguf.GGUFWriter) -> None:
        fields = writer.kv_data[0]
        for name in ("tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "pre"):
            fields.pop(f"tokenizer.ggml.{name}")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(pieces)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    write_gguf(tmp_path / "spm.gguf", "llama", model="llama", add=add)
    path = run(tmp_path / "spm.gguf", tmp_path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = tokenizer.encode("the\n", add_special_tokens=False).ids
    assert [tokens[token_id] for token_id in ids] == ["\u2581the", "<0x0A>"]
    assert load_config(path).eos_token_ids == (2,)


def test_a_quantisation_that_cannot_be_read() -> None:
    tensor = GGUFTensor("blk.0.ffn_up.weight", (2, 4), Quant.F64, 0, 32)
    with pytest.raises(ModelError, match="ffn_up.weight has quantisation F64"):
        dequantize(np.zeros((2, 32), np.uint8), tensor)


@pytest.mark.parametrize("length", [0, 3, 20, 300, 5000, -1000])
def test_a_gguf_cut_short(tmp_path: Path, length: int) -> None:
    write_gguf(tmp_path / "whole.gguf", "qwen2")
    data = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:length])
    with pytest.raises(ModelError, match="cut.gguf"):
        run(tmp_path / "cut.gguf", tmp_path)


def test_hostile_gguf_headers(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    huge = 2**63 - 1
    key = struct.pack("<Q", 1) + b"k"
    bodies = [
        struct.pack("<QQ", huge, huge),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q", huge),
        struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, huge),
        struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 4, huge),
        struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 9, 1),
        struct.pack("<QQ", 0, 1) + key + struct.pack("<I", 99),
        struct.pack("<QQ", 1, 0) + key + struct.pack("<IQIQ", 1, huge, 0, 0),
        struct.pack("<QQ", 1, 0) + key + struct.pack("<I", 77),
    ]
    for body in bodies:
        path.write_bytes(b"GGUF" + struct.pack("<I", 3) + body)
        with pytest.raises(ModelError, match="x.gguf"):
            run(path, tmp_path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(64))
    with pytest.raises(ModelError, match="version"):
        run(path, tmp_path)
