"""What a step attended to: the probability of each row that it read, added up from step to step."""

from __future__ import annotations

import triton
import triton.language as tl
from longread_kernels.attend import count_places, row_at
from longread_kernels.launch import kept_ranges, launch_options, wait_for_inputs
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
    chosen_ptr,
    budget,
    mass_ptr,
    selected_ptr,
    num_counted,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
    DENSE: tl.constexpr,
    EARLY: tl.constexpr,
):
    kv_head = tl.program_id(0).to(tl.int64)
    num_rows, sink_end, middle, middle_end, tail = kept_ranges(state_ptr, sink_size, window_size)
    wait_for_inputs(EARLY)
    num_places = count_places(sink_end, middle, middle_end, tail, num_rows, budget, DENSE)
    chosen_ptr += kv_head * budget
    mass_ptr += kv_head * num_counted
    selected_ptr += kv_head * num_counted
    step = tl.num_programs(1) * BLOCK
    for start in tl.range(tl.program_id(1) * BLOCK, num_places, step):
        place = start + tl.arange(0, BLOCK)
        inside = place < num_places
        if DENSE:
            row = place
        else:
            row = row_at(place, chosen_ptr, sink_end, middle, middle_end, tail, num_rows, inside)
            inside &= row >= 0
        mass = tl.zeros([BLOCK], tl.float32)
        for member in tl.static_range(G):
            head = kv_head * G + member
            logits = tl.load(
                logits_ptr + head * logits_stride + place, mask=inside, other=float("-inf")
            )
            mass += tl.exp2(logits - tl.load(log_sum_ptr + head))
        inside = inside & (row < num_counted)  # no row comes twice, so no two programs meet
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

    logits, log_sum: as `attend_token` left them; mass: [H_kv, rows] fp32 and selected int32, for
    the first rows of the cache.
    """
    num_kv_heads, num_counted = mass.shape
    block = 1024
    add_mass_kernel[(num_kv_heads, max(1, min(32, triton.cdiv(logits.shape[1], block))))](
        logits,
        logits.shape[1],
        log_sum,
        kept.state,
        kept.sink_size,
        kept.window_size,
        chosen if chosen is not None else logits,
        chosen.shape[1] if chosen is not None else 0,
        mass,
        selected,
        num_counted,
        G=logits.shape[0] // num_kv_heads,
        BLOCK=block,
        DENSE=chosen is None,
        num_warps=4,
        **launch_options(logits),
    )
