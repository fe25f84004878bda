"""Tiny GGUF files as llama.cpp writes them, and the tensors they must turn into."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quant
from tiny import train_tokenizer
from tokenizers import Tokenizer

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
TEXTS = ["The keeper counted 1849 ships, and didn't see the one that we'll need.", "日本 été\n"]
MIXED: Mapping[str, Quant] = {
    "token_embd": Quant.Q8_0,
    "attn_q": Quant.Q4_0,
    "attn_k": Quant.Q8_0,
    "attn_v": Quant.F16,
    "ffn_gate": Quant.Q5_0,
    "ffn_up": Quant.Q4_1,
    "ffn_down": Quant.BF16,
}
_PREFIXES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}


def write_gguf(
    path: Path,
    arch: str,
    *,
    quants: Mapping[str, Quant] = MIXED,
    tied: bool = True,
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    pre: str = "gpt-2",
    model: str = "gpt2",
    seed: int = 0,
) -> tuple[dict[str, np.ndarray], Tokenizer]:
    """Write a random model; return its tensors in Hugging Face's layout (fp32), and its tokenizer.

    Tensors go by the converter's canonical names, with q, k, v and gate, up apart.
    """
    rng = np.random.default_rng(seed)
    tokenizer = train_tokenizer(TEXTS, vocab_size=320)
    writer = gguf.GGUFWriter(str(path), arch)
    _add_metadata(writer, tokenizer, pre, model)
    add(writer)
    expected: dict[str, np.ndarray] = {}

    def put(stored: str, name: str, shape: tuple[int, ...], permute_heads: int = 0) -> None:
        values = rng.standard_normal(shape, dtype=np.float32)
        quant = quants.get(stored.split(".")[-2], Quant.F32)
        if len(shape) == 1 or shape[-1] % 32:
            quant = Quant.F32
        # Blocks run along the columns, so row order and quantisation do not touch each other.
        expected[name] = gguf.quants.dequantize(gguf.quants.quantize(values, quant), quant)
        if permute_heads:
            half = shape[0] // permute_heads // 2
            values = values.reshape(permute_heads, 2, half, *shape[1:])
            values = values.swapaxes(1, 2).reshape(shape)
        writer.add_tensor(stored, gguf.quants.quantize(values, quant), raw_dtype=quant)

    vocab_size = tokenizer.get_vocab_size()
    put("token_embd.weight", "embed_tokens", (vocab_size, HIDDEN))
    put("output_norm.weight", "norm", (HIDDEN,))
    if not tied:
        put("output.weight", "lm_head", (vocab_size, HIDDEN))
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    for i in range(LAYERS):
        ours, theirs = f"layers.{i}.", f"blk.{i}."
        for part, num_rows in rows.items():
            heads = {"q": HEADS, "k": KV_HEADS}.get(part, 0) if arch == "llama" else 0
            put(f"{theirs}{_PREFIXES[part]}.weight", ours + part, (num_rows, HIDDEN), heads)
            if arch == "qwen2":
                put(f"{theirs}{_PREFIXES[part]}.bias", f"{ours}{part}_bias", (num_rows,))
        put(theirs + "attn_output.weight", ours + "o", (HIDDEN, HEADS * HEAD_DIM))
        put(theirs + "attn_norm.weight", ours + "input_norm", (HIDDEN,))
        put(theirs + "ffn_norm.weight", ours + "post_norm", (HIDDEN,))
        put(theirs + "ffn_gate.weight", ours + "gate", (INTERMEDIATE, HIDDEN))
        put(theirs + "ffn_up.weight", ours + "up", (INTERMEDIATE, HIDDEN))
        put(theirs + "ffn_down.weight", ours + "down", (HIDDEN, INTERMEDIATE))
        if arch == "qwen3":
            put(theirs + "attn_q_norm.weight", ours + "q_norm", (HEAD_DIM,))
            put(theirs + "attn_k_norm.weight", ours + "k_norm", (HEAD_DIM,))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected, tokenizer


def _add_metadata(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str, model: str) -> None:
    writer.add_context_length(512)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(50000.0)
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    specials = {token["content"] for token in content["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in specials else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(vocab["<|endoftext|>"])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
