"""The Triton kernels of a decode step against their torch twins in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from longread_kernels import append_token, attend, linear, reference_decode, topk
from longread_kernels import mass as mass_kernels
from longread_kernels.tables import IndexLayer, Kept, Query, StandIns
from torch import Tensor
from triton_case import DEVICE, DTYPE, ON_GPU, assert_near, poison, random, wide

pytestmark = pytest.mark.usefixtures("poison")
__all__ = ["poison"]

LENGTHS = (1, 63, 64, 65, 1000) + ((131073,) if ON_GPU else ())
GROUP_SIZES = (1, 3, 4, 7, 8)
HEAD_DIMS = (64, 96, 128, 256)
# The interpreter rounds to fp8 wrongly (7.9 becomes 4), so that kind is written on a GPU only.
INDEX_DTYPES = (torch.int8, DTYPE) + ((torch.float8_e4m3fn,) if ON_GPU else ())
NUM_KV_HEADS = 2


def _kept(num_rows: int, question: tuple[int, int] = (0, 0), window_size: int = 16) -> Kept:
    state = torch.tensor([num_rows - 1, *question], dtype=torch.int32, device=DEVICE)
    return Kept(state, sink_size=4, window_size=window_size)


def _cpu(case: object) -> object:
    """A dataclass of tensors on the CPU, floating ones in float64."""
    values = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}  # type: ignore[arg-type]
    moved = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            exact = value.dtype in (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn)
            moved[name] = value.to("cpu", copy=True) if exact else wide(value).clone()
        else:
            moved[name] = value
    return type(case)(**moved)


@pytest.mark.parametrize("num_columns, num_rows", ((48, 33), (576, 64), (1536, 65), (3000, 5)))
@pytest.mark.parametrize("kind", ("plain", "normed", "gated", "residual"))
@pytest.mark.parametrize("batch", (1, 4))
def test_matvec(batch: int, num_columns: int, num_rows: int, kind: str) -> None:
    gated = kind == "gated"
    x = random(batch, num_columns)
    weight = random(num_rows * (2 if gated else 1), num_columns, seed=1) * num_columns**-0.5
    norm = random(num_columns, seed=2) if kind in ("normed", "gated") else None
    bias = random(num_rows, seed=3) if kind == "normed" else None
    residual = random(batch, num_rows, seed=4) if kind == "residual" else None
    out = torch.empty(batch, num_rows, dtype=DTYPE, device=DEVICE)
    linear.matvec(x, weight, out, norm=norm, eps=1e-6, bias=bias, residual=residual, gated=gated)
    expected = torch.empty(batch, num_rows, dtype=torch.float64)
    reference_decode.matvec_ref(
        wide(x),
        wide(weight),
        expected,
        norm=None if norm is None else wide(norm),
        eps=1e-6,
        bias=None if bias is None else wide(bias),
        residual=None if residual is None else wide(residual),
        gated=gated,
    )
    assert_near(out, expected)


def _index(head_dim: int, num_rows: int, dtype: torch.dtype, k: Tensor) -> IndexLayer:
    if dtype == DTYPE:
        return IndexLayer(k)
    index_dim = head_dim // 4
    shape = (NUM_KV_HEADS, num_rows + 3, index_dim)
    rows = (random(*shape, seed=8, dtype=torch.float32) * 30).clamp(-127, 127).to(dtype)

    def basis(seed: int) -> Tensor:
        values = random(NUM_KV_HEADS, head_dim, index_dim, seed=seed, dtype=torch.float32)
        return values * head_dim**-0.5

    offset = random(NUM_KV_HEADS, head_dim, seed=6, dtype=torch.float32) * head_dim**-0.5
    mean = random(NUM_KV_HEADS, head_dim, seed=7, dtype=torch.float32)
    return IndexLayer(rows, basis(4) * 0.02, offset, basis(5) * 30, mean)


def _query(group_size: int, head_dim: int, index: IndexLayer) -> Query:
    num_heads = NUM_KV_HEADS * group_size
    q = torch.empty(num_heads, head_dim, dtype=DTYPE, device=DEVICE)
    scale = torch.full((num_heads,), head_dim**-0.5, device=DEVICE)
    offset = torch.zeros(num_heads, device=DEVICE)
    norm = random(num_heads, seed=9, dtype=torch.float32)
    if index.is_exact:
        return Query(q, q, scale, offset, norm)
    codes = torch.zeros(num_heads, index.rows.shape[2], dtype=index.rows.dtype, device=DEVICE)
    return Query(q, codes, scale, offset, norm)


def _fp8_step(codes: Tensor) -> Tensor:
    """The next code's distance, and what the rounding of keys adds where terms cancel."""
    return codes.abs() / 6 + 0.02 * codes.pow(2).mean().sqrt()


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_append_token(head_dim: int, group_size: int, dtype: torch.dtype) -> None:
    row, normed = 37, head_dim == 128
    num_heads = NUM_KV_HEADS * (group_size + 2)
    heads = random(num_heads, head_dim)
    angles = random(64, head_dim // 2, seed=1, dtype=torch.float32)
    norms = (random(head_dim, seed=2), random(head_dim, seed=3)) if normed else None
    slab = random(NUM_KV_HEADS, 64, head_dim, seed=9)
    slab[:, row:] = torch.nan
    k, v = slab.clone(), slab.clone()
    index = _index(head_dim, 61, dtype, k)
    query = _query(group_size, head_dim, index)
    kept = _kept(row + 1)
    expected_query, expected_index = _cpu(query), _cpu(index)
    expected_k, expected_v = wide(k).clone(), wide(v).clone()
    append_token.append_token(
        heads, angles.cos(), angles.sin(), norms, 1e-6, kept, k, v, query, index, voted=True
    )
    reference_decode.append_token_ref(
        wide(heads),
        wide(angles).cos(),
        wide(angles).sin(),
        None if norms is None else (wide(norms[0]), wide(norms[1])),
        1e-6,
        _cpu(kept),  # type: ignore[arg-type]
        expected_k,
        expected_v,
        expected_query,  # type: ignore[arg-type]
        expected_index,  # type: ignore[arg-type]
        voted=True,
    )
    assert_near(query.norm, expected_query.norm)  # type: ignore[attr-defined]
    assert_near(query.q, expected_query.q)  # type: ignore[attr-defined]
    assert_near(k[:, row], expected_k[:, row])
    assert_near(v[:, row], expected_v[:, row])
    assert torch.equal(k.isnan().cpu(), expected_k.isnan()), "rows of others were written"
    if index.is_exact:
        return
    # A value half way between two codes may become either.
    for found, expected in (
        (query.codes, expected_query.codes),  # type: ignore[attr-defined]
        (index.rows[:, row], expected_index.rows[:, row]),  # type: ignore[attr-defined]
    ):
        away = (wide(found.float()) - wide(expected.float())).abs()
        step = 1.0 if dtype == torch.int8 else _fp8_step(wide(expected.float()))
        assert (away <= step).all() and (away > 0).float().mean() < 0.3
    assert_near(query.scale, expected_query.scale)  # type: ignore[attr-defined]
    assert_near(query.offset, expected_query.offset)  # type: ignore[attr-defined]
    others = [r for r in range(index.rows.shape[1]) if r != row]
    assert torch.equal(
        index.rows[:, others].float().cpu(),
        expected_index.rows[:, others].float(),  # type: ignore[attr-defined]
    )


def _scored_case(
    num_rows: int, group_size: int, head_dim: int, dtype: torch.dtype
) -> tuple[Query, IndexLayer]:
    k = random(NUM_KV_HEADS, num_rows + 3, head_dim, seed=1)
    index = _index(head_dim, num_rows, dtype, k)
    query = _query(group_size, head_dim, index)
    query.q.copy_(random(*query.q.shape, seed=2))
    if not index.is_exact:
        codes = random(*query.codes.shape, seed=3, dtype=torch.float32) * 30
        query.codes.copy_(codes.clamp(-127, 127).to(dtype))
        query.scale.copy_(query.scale.abs() * 0.004)
        query.offset.copy_(random(*query.offset.shape, seed=4, dtype=torch.float32))
    return query, index


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("summed", (True, False), ids=("group", "group-max"))
def test_choose_rows_of_each_group(summed: bool, group_size: int, dtype: torch.dtype) -> None:
    _check_choose_rows(600, group_size, 64, dtype, summed, 50)


@pytest.mark.parametrize("num_rows", LENGTHS)
@pytest.mark.parametrize("budget", (1, 7, 100, 2000))
def test_choose_rows_of_each_length(num_rows: int, budget: int) -> None:
    _check_choose_rows(num_rows, 4, 128, torch.int8, True, budget)


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_choose_rows_of_each_head_size(head_dim: int, dtype: torch.dtype) -> None:
    _check_choose_rows(300, 3, head_dim, dtype, True, 40)


def _check_choose_rows(
    num_rows: int, group_size: int, head_dim: int, dtype: torch.dtype, summed: bool, budget: int
) -> None:
    """Each share's rows are its best ones, but for those whose votes are as good as equal."""
    query, index = _scored_case(num_rows, group_size, head_dim, dtype)
    kept = _kept(num_rows, (num_rows // 2, min(num_rows // 2 + 10, num_rows)))
    share_rows = 4096 if num_rows > 2000 else 256
    num_shares = -(-(num_rows + 3) // share_rows)
    votes = torch.empty(NUM_KV_HEADS, num_shares, share_rows, device=DEVICE)
    chosen = torch.full((NUM_KV_HEADS, budget), 7, dtype=torch.int32, device=DEVICE)
    unread = torch.empty(votes.shape[:2], device=DEVICE) if summed else None
    topk.choose_rows(query, index, kept, votes, chosen, summed=summed, unread=unread)
    cpu_query: Query = _cpu(query)  # type: ignore[assignment]
    cpu_index: IndexLayer = _cpu(index)  # type: ignore[assignment]
    cpu_kept: Kept = _cpu(kept)  # type: ignore[assignment]
    wanted = chosen.cpu().clone()
    left = torch.empty(votes.shape[:2], dtype=torch.float64)
    reference_decode.choose_rows_ref(
        cpu_query, cpu_index, cpu_kept, votes.cpu(), wanted, summed=summed, unread=left
    )
    if unread is not None:
        assert_near(unread, left)
    ranking = reference_decode.votes_ref(cpu_query, cpu_index, num_rows, summed=summed)
    always = set(reference_decode.kept_rows_ref(cpu_kept).tolist())
    near = 0.003  # what nine cuts leave of the range of votes, as logarithms
    for head in range(NUM_KV_HEADS):
        for share in range(num_shares):
            part = slice(budget * share // num_shares, budget * (share + 1) // num_shares)
            found, best = chosen[head, part].tolist(), wanted[head, part].tolist()
            num_best = sum(row >= 0 for row in best)
            assert found[num_best:] == best[num_best:] == [-1] * (len(best) - num_best)
            found, best = found[:num_best], best[:num_best]
            assert len(set(found)) == num_best and not always & set(found)
            assert all(0 <= row < num_rows and row // 16 % num_shares == share for row in found)
            for row in set(found) ^ set(best):
                lowest = ranking[head, best].min()
                assert abs(ranking[head, row] - lowest) <= near


@pytest.mark.parametrize("chosen_rows", (None, 5, 200))
@pytest.mark.parametrize("num_rows", LENGTHS)
def test_attend_token_of_each_length(num_rows: int, chosen_rows: int | None) -> None:
    _check_attend_token(num_rows, chosen_rows, 4, 64)


@pytest.mark.parametrize("chosen_rows", (None, 40))
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_attend_token_of_each_group(group_size: int, chosen_rows: int | None) -> None:
    _check_attend_token(300, chosen_rows, group_size, 64)


@pytest.mark.parametrize("chosen_rows", (None, 40))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attend_token_of_each_head_size(head_dim: int, chosen_rows: int | None) -> None:
    _check_attend_token(300, chosen_rows, 3, head_dim)


@pytest.mark.parametrize("group_size, head_dim", ((1, 64), (7, 64), (3, 96), (4, 128)))
@pytest.mark.parametrize("num_shares", (1, 3))
def test_attend_token_with_stand_ins(num_shares: int, group_size: int, head_dim: int) -> None:
    """Of the two KV heads one has the votes of unread rows and one a key, or neither has any."""
    num_heads = NUM_KV_HEADS * group_size
    rows = random(2, 1, NUM_KV_HEADS, head_dim, seed=11, dtype=torch.float32)
    log_weight = torch.tensor([[-torch.inf, 5.0]], device=DEVICE)
    unread = random(NUM_KV_HEADS, num_shares, seed=12, dtype=torch.float32).square() * 90
    unread[1] = 0.0
    norm = random(num_heads, seed=13, dtype=torch.float32)
    _check_attend_token(
        300, 40, group_size, head_dim, StandIns(rows[0], rows[1], log_weight, unread, norm)
    )
    log_weight.fill_(-torch.inf)
    unread.zero_()
    _check_attend_token(
        300, 40, group_size, head_dim, StandIns(rows[0], rows[1], log_weight, unread, norm)
    )


def _check_attend_token(
    num_rows: int,
    chosen_rows: int | None,
    group_size: int,
    head_dim: int,
    stand_ins: StandIns | None = None,
) -> None:
    num_heads, num_splits = NUM_KV_HEADS * group_size, 5
    kept = _kept(num_rows, (num_rows // 3, min(num_rows // 3 + 9, num_rows)))
    always = reference_decode.kept_rows_ref(kept).tolist()
    chosen = None
    if chosen_rows is not None:
        rest = [row for row in range(num_rows) if row not in set(always)]
        chosen = torch.full((NUM_KV_HEADS, chosen_rows), -1, dtype=torch.int32)
        generator = torch.Generator().manual_seed(5)
        for head in range(NUM_KV_HEADS):
            order = torch.randperm(len(rest), generator=generator)[: chosen_rows - head]
            places = torch.randperm(chosen_rows, generator=generator)[: len(order)]
            chosen[head, places] = torch.tensor(rest, dtype=torch.int32)[order]
        chosen = chosen.to(DEVICE)
    q = random(num_heads, head_dim)
    slabs = random(2, NUM_KV_HEADS, num_rows + 3, head_dim, seed=1)
    if chosen is not None:  # rows that are not chosen are never read
        for head in range(NUM_KV_HEADS):
            read = always + [row for row in chosen[head].tolist() if row >= 0]
            unread = torch.ones(num_rows + 3, dtype=torch.bool)
            unread[read] = False
            slabs[:, head, unread.to(DEVICE)] = torch.nan
    slabs[:, :, num_rows:] = torch.nan
    k, v = slabs

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, device=DEVICE)

    out = torch.empty_like(q)
    log_sum = scratch(num_heads)
    logits = scratch(num_heads, num_rows + 3 + (chosen_rows or 0))
    attend.attend_token(
        q,
        k,
        v,
        kept,
        chosen,
        head_dim**-0.5,
        out,
        scratch(num_heads, num_splits, head_dim),
        scratch(num_heads, num_splits, 2),
        log_sum=log_sum,
        logits=logits,
        stand_ins=stand_ins,
    )
    expected, expected_sum = torch.empty(q.shape), torch.empty(num_heads)
    expected_logits = torch.empty(logits.shape)
    cpu_kept: Kept = _cpu(kept)  # type: ignore[assignment]
    cpu_chosen = None if chosen is None else chosen.cpu()
    reference_decode.attend_token_ref(
        q.cpu().float(),
        k.cpu().float(),
        v.cpu().float(),
        cpu_kept,
        cpu_chosen,
        head_dim**-0.5,
        expected,
        scratch(0).cpu(),
        scratch(0).cpu(),
        log_sum=expected_sum,
        logits=expected_logits,
        stand_ins=None if stand_ins is None else _cpu(stand_ins),  # type: ignore[arg-type]
    )
    assert_near(out, expected)
    assert_near(log_sum, expected_sum)
    num_counted = num_rows - num_rows // 4
    mass = torch.zeros(NUM_KV_HEADS, num_counted, device=DEVICE)
    selected = torch.zeros(NUM_KV_HEADS, num_counted, dtype=torch.int32, device=DEVICE)
    expected_mass, expected_selected = mass.cpu().clone(), selected.cpu().clone()
    mass_kernels.add_mass(logits, log_sum, kept, chosen, mass, selected)
    reference_decode.add_mass_ref(
        expected_logits,
        expected_sum,
        cpu_kept,
        cpu_chosen,
        expected_mass,
        expected_selected,
    )
    assert_near(mass, expected_mass)
    assert torch.equal(selected.cpu(), expected_selected)
