"""Compile, for a GPU that need not be there, the kernels that the ops past the window launch.

The interpreter takes Python that Triton's compiler does not. Run as a script, in a process where
the interpreter is off; prints the name of each kernel that was compiled.
"""

from __future__ import annotations

import torch
import triton
from longread_kernels import best_rows, chunk_votes, gathered, rotate, turn_rows
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_TARGET = GPUTarget("cuda", 90, 32)
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages")


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
    source = ASTSource(kernel, signature, constants, attributes)
    triton.compile(source, target=_TARGET, options=options)
    print(kernel.__name__)


def main() -> None:
    JITFunction.run = _compile_only
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


if __name__ == "__main__":
    main()
