"""The one place that chooses an implementation for each op.

An op runs as its Triton kernel where its tensors are on a GPU that Triton can compile for and in a
dtype that the kernel takes, and as its torch twin everywhere else.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sysconfig

import torch
from longread_kernels import reference, reference_gathered
from longread_kernels.reference import attend_ref as attend
from longread_kernels.reference import rms_norm_ref as rms_norm
from longread_kernels.reference import score_ref as score
from longread_kernels.reference import select_rows_ref as select_rows
from longread_kernels.reference import vote_ref as vote
from torch import Tensor

__all__ = [
    "add_rms_norm",
    "attend",
    "attend_causal",
    "attend_listed",
    "attend_placed",
    "has_fp8",
    "list_rows",
    "mean_queries",
    "on_triton",
    "rms_norm",
    "rope",
    "rope_append",
    "score",
    "select_rows",
    "soft_votes",
    "swiglu",
    "triton_missing",
    "vote",
]


@functools.cache
def triton_missing(device_idx: int = 0) -> str | None:
    """Why no Triton kernel can run on a CUDA device, or None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    major, minor = torch.cuda.get_device_capability(device_idx)
    if major < 8:
        return f"its compute capability is {major}.{minor}, and the kernels need 8.0"
    compilers = (str(sysconfig.get_config_var("CC")).split()[0], "cc", "gcc", "clang")
    if not any(shutil.which(name) for name in compilers):
        return "Triton needs a C compiler (gcc or clang)"
    return None


def on_triton(x: Tensor) -> bool:
    """Whether ops on this tensor run as Triton kernels."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and triton_missing(x.device.index) is None
    )


def has_fp8(x: Tensor) -> bool:
    """Whether x's GPU has the conversions that an fp8 index takes."""
    return torch.cuda.get_device_capability(x.device) >= (8, 9)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if on_triton(x):
        from longread_kernels import norm

        return norm.add_rms_norm(x, delta, weight, eps)
    return reference.add_rms_norm_ref(x, delta, weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if on_triton(x):
        from longread_kernels import rotate

        return rotate.rope(x, cos, sin)
    return reference.rope_ref(x, cos, sin)


def rope_append(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    k: Tensor,
    v: Tensor,
    start: int,
) -> Tensor:
    if on_triton(heads):
        from longread_kernels import append

        return append.rope_append(heads, cos, sin, norms, eps, k, v, start)
    return reference.rope_append_ref(heads, cos, sin, norms, eps, k, v, start)


def attend_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    if on_triton(q):
        from longread_kernels import prefill

        return prefill.attend_causal(q, k, v, scale)
    return reference.attend_causal_ref(q, k, v, scale)


def swiglu(gate_up: Tensor) -> Tensor:
    if on_triton(gate_up):
        from longread_kernels import linear

        return linear.swiglu(gate_up)
    return reference.swiglu_ref(gate_up)


def mean_queries(q: Tensor, num_voters: int, num_kv_heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    if on_triton(q):
        from longread_kernels import rotate

        return rotate.mean_queries(q, num_voters, num_kv_heads, cos, sin)
    return reference_gathered.mean_queries_ref(q, num_voters, num_kv_heads, cos, sin)


def soft_votes(
    q: Tensor, k: Tensor, scale: float, first_row: int, tail: int, end: int, *, outer_norm: bool
) -> Tensor:
    votes = reference_gathered.soft_votes_ref
    if on_triton(q):
        from longread_kernels import chunk_votes

        votes = chunk_votes.soft_votes
    return votes(q, k, scale, first_row, tail, end, outer_norm=outer_norm)


def list_rows(votes: Tensor, num_chosen: int, first_row: int, end: int) -> Tensor:
    if votes.is_cuda and triton_missing(votes.device.index) is None:
        from longread_kernels import best_rows

        return best_rows.list_rows(votes, num_chosen, first_row, end)
    return reference_gathered.list_rows_ref(votes, num_chosen, first_row, end)


def attend_listed(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> Tensor:
    if on_triton(q):
        from longread_kernels import gathered

        return gathered.attend_listed(q, k, v, rows, cos, sin, scale)
    return reference_gathered.attend_listed_ref(q, k, v, rows, cos, sin, scale)


def attend_placed(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    if on_triton(q):
        from longread_kernels import gathered

        return gathered.attend_placed(q, k, v, rows, cos, sin, scale)
    return reference_gathered.attend_placed_ref(q, k, v, rows, cos, sin, scale)
