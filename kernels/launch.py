"""What the decode kernels share: programmatic dependent launch, and the rows that are always kept.

With programmatic dependent launch (compute capability 9.0) a kernel starts while the one before it
ends: it fetches what does not depend on its predecessor, then waits for it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver


@functools.cache
def _device_launches_early(device_idx: int) -> bool:
    return torch.cuda.get_device_capability(device_idx) >= (9, 0)


def launch_options(x: Tensor) -> dict[str, bool]:
    """The options with which a kernel on x's device is launched."""
    early = x.is_cuda and _device_launches_early(x.device.index)
    return {"EARLY": early, "launch_pdl": True} if early else {"EARLY": False}


@functools.cache
def _device_shared_bytes(device_idx: int) -> int:
    return driver.active.utils.get_device_properties(device_idx)["max_shared_mem"]


def shared_bytes(x: Tensor) -> int:
    """Shared memory that a program may have on x's device; an H100's for the interpreter."""
    return _device_shared_bytes(x.device.index) if x.is_cuda else 232_448


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Let the next kernel start, then wait until the one before has written its output.

    Before it a kernel may read weights, the state and the rows of earlier steps: what the step's
    own kernels never write.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def kept_ranges(state_ptr, sink_size, window_size):
    """The rows that every step reads: [0, sink_end), [middle, middle_end) and [tail, num_rows).

    state: the row of the token that is being decoded, and where its question starts and ends.
    """
    num_rows = tl.load(state_ptr) + 1
    question, question_end = tl.load(state_ptr + 1), tl.load(state_ptr + 2)
    sink_end = tl.minimum(sink_size, num_rows)
    window = tl.maximum(num_rows - window_size, 0)
    joined = window <= question_end
    tail = tl.maximum(tl.where(joined, tl.minimum(window, question), window), sink_end)
    middle = tl.where(joined, tail, tl.maximum(question, sink_end))
    middle_end = tl.where(joined, tail, tl.maximum(question_end, middle))
    return num_rows, sink_end, middle, middle_end, tail


@triton.jit
def branch_sizes(branches_ptr, branch, sink_size, window_size, budget, BRANCHED: tl.constexpr):
    """Shared rows, sinks, window, rows listed and rows chosen: a branch's own, or those given."""
    num_shared, num_listed = 0, budget
    if BRANCHED:
        branches_ptr += branch * 5
        num_shared = tl.load(branches_ptr)
        sink_size, window_size = tl.load(branches_ptr + 1), tl.load(branches_ptr + 2)
        num_listed, budget = tl.load(branches_ptr + 3), tl.load(branches_ptr + 4)
    return num_shared, sink_size, window_size, num_listed, budget


@triton.jit
def slab_row(row, num_shared, branch, branch_rows, BRANCHED: tl.constexpr):
    """Where a branch's row lies in the slab."""
    if BRANCHED:
        row = tl.where(row < num_shared, row, row + branch * branch_rows)
    return row
