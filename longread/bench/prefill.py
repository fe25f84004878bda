"""Prefill beside Hugging Face's, or by selection beside dense: same weights, dtype, tokens and
machine, each in its own process.

Both contenders are started in turn, several times; each reports its own wall time and its peak
resident memory. A run whose last logits differ from Hugging Face's by over 2 % relative RMS in
bfloat16 (0.01 % in float32) is not reported, unless they are as near to Hugging Face's in float32
as its own are: random tokens make some models differ from themselves by more than that. What a
prefill by selection computes is no other's: there each kernel is compared with its torch twin.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longread.bench.selected import check_kernels
from longread.bench.shapes import load_model
from longread.device import choose_device, choose_dtype
from longread.errors import LongreadError
from longread.model import Decoder
from longread.past_window import Reading
from longread.policies import Dense
from longread.weights import ModelConfig

CONTENDERS = ("longread", "huggingface")
CONTEXTS = ("dense", "select")
_WARM_UP = {"select": 12_288}  # until each kernel has met its longest row of splits
_AS_NEAR = 1.1  # our distance from float32's logits over Hugging Face's, at most
_TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-4}


@dataclass(frozen=True)
class PrefillRun:
    """One prefill of `num_tokens`; peak_bytes is the process's resident peak, or the GPU's."""

    contender: str
    num_tokens: int
    prefill_s: float
    peak_bytes: int


def run(
    model: str, device: str, dtype: str, num_tokens: int, repeats: int
) -> tuple[list[PrefillRun], float]:
    """Time both contenders in turn on random token ids, `repeats` times after one warm-up each.

    model: a converted directory, or a name of shapes.SHAPES for random weights. Returns the runs
    and the relative RMS difference of the last logits. Raises LongreadError where they do not
    match.
    """
    runs: list[PrefillRun] = []
    logits: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory(prefix="longread-bench-") as directory:
        for repeat in range(repeats):
            for contender in CONTENDERS[:: 1 if repeat % 2 == 0 else -1]:
                out = Path(directory) / f"{contender}.pt"
                timed, logits[contender] = _run_child(
                    model, device, dtype, num_tokens, contender, out
                )
                runs.append(timed)
        difference = relative_rms(logits["longread"], logits["huggingface"])
        tolerance = _TOLERANCE[choose_dtype(dtype)]
        if difference > tolerance:
            out = Path(directory) / "reference.pt"
            _, reference = _run_child(model, device, "float32", num_tokens, "huggingface", out)
            ours, theirs = (relative_rms(logits[name], reference) for name in CONTENDERS)
            if ours > theirs * _AS_NEAR:
                raise LongreadError(
                    f"the logits differ by {difference:.2%} relative RMS, over {tolerance:.2%}, "
                    f"and from float32's by {ours:.2%} where Hugging Face's differ by "
                    f"{theirs:.2%}: nothing is reported"
                )
    return runs, difference


def run_contexts(
    model: str,
    device: str,
    dtype: str,
    num_tokens: int,
    repeats: int,
    contexts: Sequence[str] = CONTEXTS,
) -> list[PrefillRun]:
    """Time our own ways to read in turn, `repeats` times, as `run` does.

    Raises LongreadError where a kernel's result is not that of its torch twin.
    """
    runs = []
    with tempfile.TemporaryDirectory(prefix="longread-bench-") as directory:
        out = Path(directory) / "logits.npy"
        for repeat in range(repeats):
            for context in contexts[:: 1 if repeat % 2 == 0 else -1]:
                runs.append(_run_child(model, device, dtype, num_tokens, context, out)[0])
    return runs


def _run_child(
    model: str, device: str, dtype: str, num_tokens: int, contender: str, out: Path
) -> tuple[PrefillRun, Tensor]:
    arguments = [model, device, dtype, str(num_tokens), contender, str(out)]
    command = [sys.executable, "-m", "longread.bench.prefill", *arguments]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise LongreadError(f"the prefill of {contender} failed: {last}")
    logits = torch.from_numpy(np.load(out, allow_pickle=False))
    return PrefillRun(**json.loads(child.stdout)), logits


def relative_rms(found: Tensor, reference: Tensor) -> float:
    """RMS of the difference over RMS of the reference; infinite where it is no number."""
    found, reference = found.double(), reference.double()
    ratio = float((found - reference).pow(2).mean().sqrt() / reference.pow(2).mean().sqrt())
    return math.inf if math.isnan(ratio) else ratio


def huggingface_model(
    config: ModelConfig, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> torch.nn.Module:
    """Hugging Face's own model over converted weights, taken apart again without a copy."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # Our window is capped where a sliding one would begin.
    window = {"sliding_window": None} if config.family == "mistral" else {}
    hf_config = AutoConfig.for_model(
        config.family,
        **window,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.window,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        attention_bias="layers.0.o_bias" in weights,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    state = {"model.embed_tokens.weight": weights["embed_tokens"]}
    state["model.norm.weight"] = weights["norm"]
    state["lm_head.weight"] = weights.get("lm_head", weights["embed_tokens"])
    plain = {
        "self_attn.o_proj.weight": "o",
        "self_attn.o_proj.bias": "o_bias",
        "self_attn.q_norm.weight": "q_norm",
        "self_attn.k_norm.weight": "k_norm",
        "mlp.down_proj.weight": "down",
        "input_layernorm.weight": "input_norm",
        "post_attention_layernorm.weight": "post_norm",
    }
    fused = {
        "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "weight"),
        "qkv_bias": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "bias"),
        "gate_up": (("mlp.gate_proj", "mlp.up_proj"), "weight"),
    }
    for i in range(config.num_hidden_layers):
        for theirs, ours in plain.items():
            if (tensor := weights.get(f"layers.{i}.{ours}")) is not None:
                state[f"model.layers.{i}.{theirs}"] = tensor
        for ours, (modules, kind) in fused.items():
            if (tensor := weights.get(f"layers.{i}.{ours}")) is None:
                continue
            sizes = (
                [config.intermediate_size] * 2 if ours == "gate_up" else [q_size, kv_size, kv_size]
            )
            for module, part in zip(modules, tensor.split(sizes), strict=True):
                state[f"model.layers.{i}.{module}.{kind}"] = part
    model.load_state_dict(state, assign=True, strict=True)
    # The rotary table is a buffer outside the state dict; rebuild it off the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(hf_config).to(device)
    return model.eval()


def _child(name: str, device: str, dtype: str, num_tokens: int, contender: str) -> Tensor:
    torch_device, torch_dtype = choose_device(device), choose_dtype(dtype)
    config, weights = load_model(name, torch_device, torch_dtype)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, config.vocab_size, (num_tokens,), generator=generator)
    if contender != "huggingface":
        selects = contender == "select"
        decoder = Decoder(
            config, weights, torch_device, torch_dtype, past_window=Reading() if selects else None
        )
        if selects:
            check_kernels(decoder)
        cache = decoder.new_cache(num_tokens)

        def prefill(ids: Tensor) -> None:
            cache.truncate(0)
            decoder.prefill(ids, cache)

        def last_logits() -> Tensor:
            cache.truncate(num_tokens - 1)
            return decoder.extend(token_ids[-1:], cache, Dense())

    else:
        model = huggingface_model(config, weights, torch_device, torch_dtype)
        logits: list[Tensor] = []

        def prefill(ids: Tensor) -> None:
            with torch.inference_mode():
                out = model(ids[None].to(torch_device), use_cache=True, logits_to_keep=1)
            logits.append(out.logits[0, -1].float())

        def last_logits() -> Tensor:
            return logits[-1]

    prefill(token_ids[: _WARM_UP.get(contender, 64)])
    _synchronize(torch_device)
    started = time.perf_counter()
    prefill(token_ids)
    _synchronize(torch_device)
    prefill_s = time.perf_counter() - started
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch_device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(torch_device)
    result = PrefillRun(contender, num_tokens, prefill_s, peak_bytes)
    sys.stdout.write(json.dumps(result.__dict__))
    return last_logits().cpu()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    _model, _device, _dtype, _num, _contender, _out = sys.argv[1:]
    np.save(
        _out, _child(_model, _device, _dtype, int(_num), _contender).numpy(), allow_pickle=False
    )
