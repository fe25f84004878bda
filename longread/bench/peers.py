"""What stands beside our decode step: dense attention of the libraries, Hugging Face's model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F

from longread.bench.decode import SPARE_ROWS, DecodeFigures, random_cache
from longread.bench.prefill import huggingface_model
from longread.bench.timing import graph_ms, median_ms
from longread.cache import KVCache
from longread.model import Decoder


@torch.inference_mode()
def run(decoder: Decoder, num_rows: int, repeats: int) -> list[DecodeFigures]:
    """Dense attention of the libraries over all layers; then a step of Hugging Face's model."""
    cache = random_cache(decoder, num_rows, SPARE_ROWS)
    config = decoder.config
    q = torch.randn(config.num_attention_heads, config.head_dim, device=decoder.device)
    q = q.to(decoder.dtype)
    figures = []
    contenders: dict[str, Callable[[], None]] = {}

    def sdpa() -> None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            for k, v in zip(cache.k, cache.v, strict=True):
                F.scaled_dot_product_attention(
                    q[None, :, None], k[None, :, :num_rows], v[None, :, :num_rows], enable_gqa=True
                )

    contenders["cuDNN attention"] = sdpa
    if importlib.util.find_spec("flashinfer") is not None:
        import flashinfer

        def flash() -> None:
            for k, v in zip(cache.k, cache.v, strict=True):
                flashinfer.single_decode_with_kv_cache(
                    q, k[:, :num_rows], v[:, :num_rows], kv_layout="HND", use_tensor_cores=True
                )

        contenders["FlashInfer attention"] = flash
    for name, contender in contenders.items():
        milliseconds = graph_ms(contender, repeats)
        figures.append(DecodeFigures(name, num_rows, 0.0, milliseconds))
    figures.append(
        DecodeFigures(
            "Hugging Face", num_rows, _huggingface_ms(decoder, cache, num_rows, repeats), 0.0
        )
    )
    return figures


def _huggingface_ms(decoder: Decoder, cache: KVCache, num_rows: int, repeats: int) -> float:
    """A step of its model with its own cache and SDPA, as `generate` runs it."""
    from transformers import DynamicCache

    model = huggingface_model(
        decoder.config, decoder.network.tensors, decoder.device, decoder.dtype
    )
    theirs = DynamicCache()
    for layer_idx, (k, v) in enumerate(zip(cache.k, cache.v, strict=True)):
        theirs.update(k[None, :, :num_rows], v[None, :, :num_rows], layer_idx)
    cache.k = cache.v = cache.k.new_empty((0,))  # theirs are copies
    token = torch.tensor([[7]], device=decoder.device)

    def step() -> None:
        model(token, past_key_values=theirs, use_cache=True)

    return median_ms(step, min(repeats, 5))
