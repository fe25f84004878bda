"""Compile, for a GPU that need not be there, the kernels past the window and those of a step.

The interpreter takes Python that Triton's compiler does not. Run as a script, in a process where
the interpreter is off, with `past` or `step`; prints the name of each kernel that was compiled.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
import triton
from longread_kernels import best_rows, chunk_votes, gathered, rotate, turn_rows
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from longread.bench.shapes import SHAPES, random_weights
from longread.decode_graph import StepGraph
from longread.model import Decoder
from longread.policies import KernelPlan, TokenSelect, Turn

_TARGET = GPUTarget("cuda", 90, 32)
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages")
_compiled: set[tuple[object, ...]] = set()


def _compile_only(
    kernel: JITFunction, *args: object, grid: object, warmup: bool, **named: object
) -> None:
    """In place of a launch: compile for the arguments as a launch would specialise on them."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | named
    signature: dict[str, str] = {}
    constants: dict[tuple[int], object] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for place, param in enumerate(kernel.params):
        value, is_special = given[param.name], not param.do_not_specialize
        if param.is_constexpr or (is_special and isinstance(value, int) and value == 1):
            signature[param.name], constants[place,] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[param.name] = _POINTERS[value.dtype]
        else:
            signature[param.name] = "i32" if isinstance(value, int) else "fp32"
        aligned = isinstance(value, int) and value % 16 == 0
        if is_special and (aligned or isinstance(value, Tensor)):
            attributes[place,] = [["tt.divisibility", 16]]
    options = {name: given[name] for name in _OPTIONS if name in given}
    key = kernel, *map(str, (signature, constants, attributes, options))
    if key in _compiled:
        return
    _compiled.add(key)
    source = ASTSource(kernel, signature, constants, attributes)
    triton.compile(source, target=_TARGET, options=options)
    print(kernel.__name__)


def past_window() -> None:
    turn_rows.attend_causal = lambda q, k, v, scale: q  # compiled for prefill as well
    num_kv_heads, group_size, head_dim, num_rows = 2, 3, 128, 4096
    k, v = torch.zeros(2, num_kv_heads, num_rows, head_dim, dtype=torch.bfloat16)
    cos = sin = torch.zeros(num_rows, head_dim // 2)
    rows = torch.arange(1000, dtype=torch.int32).expand(num_kv_heads, -1)
    for num_tokens in (3, 64):
        q = torch.zeros(num_tokens, num_kv_heads * group_size, head_dim, dtype=torch.bfloat16)
        gathered.attend_listed(q, k, v, rows, cos, sin, 1.0)
    gathered.attend_placed(q[0], k, v, rows.long(), cos, sin, 1.0)
    rotate.rope(q, cos[:1].expand(64, -1), sin[:1].expand(64, -1))
    voters = rotate.mean_queries(q, 8, num_kv_heads, cos[:1], sin[:1])
    votes = chunk_votes.soft_votes(voters, k, 1.0, 128, 3500, 4000, outer_norm=True)
    best_rows.list_rows(votes, 2048, 128, 4000)


@torch.inference_mode()
def decode_steps() -> None:
    """Steps of one branch and of several, traced and not, with choices, lists and stand-ins."""
    device, dtype = torch.device("cpu"), torch.bfloat16
    for name in ("qwen2.5-0.5b", "llama3-8b"):  # heads of 64 and 128, in groups of 7 and 4
        sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 300}
        config = dataclasses.replace(SHAPES[name], num_hidden_layers=1, window=2048, **sizes)
        decoder = Decoder(config, random_weights(config, device, dtype), device, dtype)
        cache = decoder.new_cache(1024)
        cache.k.normal_()
        cache.length = 512
        selecting, standing = (TokenSelect(32, stand_in=stands) for stands in (False, True))
        selecting.prepare(cache)
        standing.prepare(cache)
        plans = {policy.stand_in: policy.kernel_plan() for policy in (selecting, standing)}
        assert plans[False] is not None and plans[True] is not None
        dense, listed = KernelPlan(), KernelPlan(32, 4)
        for branches, num_counted in (
            ([plans[False]], 512),
            ([plans[False], dense, listed], None),
            ([plans[False]] * 3, 512),
            ([plans[True]] * 2, None),
            ([dense] * 12, None),
        ):
            rows = 40 if len(branches) > 1 else 0
            step = StepGraph(decoder.network, cache, branches, num_counted, rows)
            turns = [Turn(500, 512)] * len(branches)
            tokens = torch.zeros(len(branches), dtype=torch.int64)
            step.step_branches(tokens, [512] * len(branches), turns, 512 if rows else 0)


if __name__ == "__main__":
    JITFunction.run = _compile_only
    {"past": past_window, "step": decode_steps}[sys.argv[1]]()
