"""What a step attended to: the probability of each row that it read, added up from step to step."""

from __future__ import annotations

import triton
import triton.language as tl
from longread_kernels.attend import count_places, row_at
from longread_kernels.launch import (
    branch_sizes,
    kept_ranges,
    launch_options,
    wait_for_inputs,
)
from longread_kernels.tables import Kept
from torch import Tensor


@triton.jit
def add_mass_kernel(
    logits_ptr,
    logits_stride,
    log_sum_ptr,
    state_ptr,
    sink_size,
    window_size,
    branches_ptr,
    chosen_ptr,
    list_len,
    mass_ptr,
    selected_ptr,
    branch_stride,
    num_counted,
    BRANCHES: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
    DENSE: tl.constexpr,
    EARLY: tl.constexpr,
):
    branch = tl.program_id(0) % BRANCHES
    kv_head = (tl.program_id(0) // BRANCHES).to(tl.int64)
    set_head = branch * (tl.num_programs(0) // BRANCHES) + kv_head
    _, sink_size, window_size, num_listed, _ = branch_sizes(
        branches_ptr, branch, sink_size, window_size, list_len, BRANCHES > 1
    )
    num_rows, sink_end, middle, middle_end, tail = kept_ranges(
        state_ptr + branch * 3, sink_size, window_size
    )
    wait_for_inputs(EARLY)
    num_places = count_places(sink_end, middle, middle_end, tail, num_rows, num_listed, DENSE)
    chosen_ptr += set_head * list_len
    mass_ptr += branch.to(tl.int64) * branch_stride + kv_head * num_counted
    selected_ptr += branch.to(tl.int64) * branch_stride + kv_head * num_counted
    step = tl.num_programs(1) * BLOCK
    for start in tl.range(tl.program_id(1) * BLOCK, num_places, step):
        place = start + tl.arange(0, BLOCK)
        inside = place < num_places
        if DENSE:
            row = place
        else:
            row = row_at(place, chosen_ptr, sink_end, middle, middle_end, tail, num_rows, inside)
            inside &= row >= 0
        inside &= row < num_counted  # no row comes twice, so no two programs meet
        mass = tl.zeros([BLOCK], tl.float32)
        for member in tl.static_range(G):
            head = set_head * G + member
            logits = tl.load(
                logits_ptr + head * logits_stride + place, mask=inside, other=float("-inf")
            )
            mass += tl.exp2(logits - tl.load(log_sum_ptr + head))
        mass += tl.load(mass_ptr + row, mask=inside, other=0.0)
        tl.store(mass_ptr + row, mass, mask=inside)
        count = tl.load(selected_ptr + row, mask=inside, other=0)
        tl.store(selected_ptr + row, count + G, mask=inside)


def add_mass(
    logits: Tensor,
    log_sum: Tensor,
    kept: Kept,
    chosen: Tensor | None,
    mass: Tensor,
    selected: Tensor,
) -> None:
    """Add each row's attention probability and count it, for each query head of its KV head.

    logits, log_sum: as `attend_token` left them; chosen: [B, H_kv, n] or [H_kv, n]; mass: [B, H_kv,
    rows] or [H_kv, rows] fp32 and selected int32, for the first rows of the cache, which are all
    branches'.
    """
    num_kv_heads, num_counted = mass.shape[-2:]
    num_branches, block = kept.num_branches, 1024
    branch_stride = mass.stride(0) if mass.dim() == 3 else 0
    assert mass.stride()[-2:] == (num_counted, 1) and mass.stride() == selected.stride()
    assert mass.shape[:-2].numel() == num_branches, "each branch is counted"
    num_programs = max(1, min(32, triton.cdiv(logits.shape[1], block)))
    add_mass_kernel[(num_kv_heads * num_branches, num_programs)](
        logits,
        logits.shape[1],
        log_sum,
        kept.state,
        kept.sink_size,
        kept.window_size,
        kept.branches if kept.branches is not None else kept.state,
        chosen if chosen is not None else logits,
        chosen.shape[-1] if chosen is not None else 0,
        mass,
        selected,
        branch_stride,
        num_counted,
        BRANCHES=num_branches,
        G=logits.shape[0] // (num_kv_heads * num_branches),
        BLOCK=block,
        DENSE=chosen is None,
        num_warps=4,
        **launch_options(logits),
    )
