"""The Triton kernels of reading past the window against their torch twins in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from longread_kernels import best_rows, chunk_votes, gathered, reference_gathered, rotate, turn_rows
from longread_kernels import dispatch as ops
from longread_kernels.reference import rope_ref
from torch import Tensor
from triton_case import DEVICE, ON_GPU, assert_near, poison, random, wide

from longread.model import Decoder
from longread.past_window import Reading
from longread.policies import TokenSelect, Turn
from longread.weights import load_config, load_weights

pytestmark = pytest.mark.usefixtures("poison")
__all__ = ["poison"]

NUM_KV_HEADS = 2
LENGTHS = (1, 63, 64, 65, 1000)


def _angles(num_places: int, head_dim: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(num_places, dtype=torch.float32, device=DEVICE)
    exponents = torch.arange(head_dim // 2, dtype=torch.float32, device=DEVICE) / head_dim
    angles = torch.outer(positions, 1e4 ** (-2 * exponents))
    return angles.cos(), angles.sin()


def _slabs(num_rows: int, head_dim: int) -> tuple[Tensor, Tensor]:
    slabs = random(2, NUM_KV_HEADS, num_rows + 9, head_dim, seed=1)
    slabs[:, :, num_rows:] = torch.nan  # rows that are not there yet
    return slabs[0], slabs[1]


def _lists(num_sets: int, num_places: int, num_rows: int) -> Tensor:
    """Ascending rows of each set, [sets, num_places] int64."""
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randperm(num_rows, generator=generator)[:num_places] for _ in range(num_sets)]
    return torch.stack(rows).sort(dim=1).values.to(DEVICE)


@pytest.mark.parametrize(
    "num_tokens, num_places, group_size",
    (
        (1, 1, 7),
        (1, 1000, 4),
        (16, 64, 7),
        (63, 63, 3),
        (64, 65, 4),
        (65, 130, 7),
        (65, 1000, 1),
        *(((512, 3200, 4), (512, 3200, 7), (1, 3200, 7), (1000, 1000, 3)) if ON_GPU else ()),
    ),
)
def test_a_chunk_attends_to_a_list(num_tokens: int, num_places: int, group_size: int) -> None:
    _check_listed(num_tokens, num_places, group_size, 64)


@pytest.mark.parametrize("head_dim", (16, 64, 96, 128, 256))
@pytest.mark.parametrize("num_tokens", (3, 65))
def test_a_chunk_attends_to_a_list_with_each_head_size(num_tokens: int, head_dim: int) -> None:
    _check_listed(num_tokens, 130, 2, head_dim)


def _check_listed(num_tokens: int, num_places: int, group_size: int, head_dim: int) -> None:
    q = random(num_tokens, NUM_KV_HEADS * group_size, head_dim)
    k, v = _slabs(2 * num_places, head_dim)
    rows = _lists(NUM_KV_HEADS, num_places, 2 * num_places).to(torch.int32)
    angles, scale = _angles(num_places + 3, head_dim), head_dim**-0.5
    expected = reference_gathered.attend_listed_ref(
        wide(q), wide(k), wide(v), rows.cpu(), *map(wide, angles), scale
    )
    assert_near(turn_rows.attend_turned(q, k, v, rows, *angles, scale), expected)
    found, shares = gathered.attend_turning(q, k, v, rows, None, *angles, scale)
    assert_near(found, expected)
    assert shares is None
    assert_near(gathered.attend_listed(q, k, v, rows, *angles, scale), expected)


@pytest.mark.parametrize("num_places", LENGTHS)
@pytest.mark.parametrize("group_size", (1, 3, 4, 7))
def test_one_token_attends_to_lists_of_different_lengths(num_places: int, group_size: int) -> None:
    _check_placed(num_places, group_size, 64, NUM_KV_HEADS)


@pytest.mark.parametrize("head_dim", (16, 96, 128, 256))
def test_each_query_head_attends_to_a_list_of_its_own(head_dim: int) -> None:
    _check_placed(130, 3, head_dim, NUM_KV_HEADS * 3)


def _check_placed(num_places: int, group_size: int, head_dim: int, num_sets: int) -> None:
    q = random(NUM_KV_HEADS * group_size, head_dim)
    k, v = _slabs(2 * num_places, head_dim)
    rows = _lists(num_sets, num_places, 2 * num_places)
    for set_idx in range(1, num_sets):  # the first list is full
        rows[set_idx, max(1, num_places - 17 * set_idx) :] = -1
    angles, scale = _angles(num_places, head_dim), head_dim**-0.5
    expected, expected_shares = reference_gathered.attend_placed_ref(
        wide(q), wide(k), wide(v), rows.cpu(), *map(wide, angles), scale
    )
    found, shares = gathered.attend_placed(q, k, v, rows, *angles, scale)
    assert_near(found, expected)
    assert_near(shares, expected_shares)
    empty = (rows < 0).repeat_interleave(q.shape[0] // num_sets, 0)
    assert (shares[empty] == 0).all()


@pytest.mark.parametrize("num_rows", LENGTHS + ((131_073,) if ON_GPU else ()))
@pytest.mark.parametrize("num_queries", (1, 24, 56))
@pytest.mark.parametrize("outer_norm", (False, True))
def test_votes(num_rows: int, num_queries: int, outer_norm: bool) -> None:
    votes = _check_votes(num_rows, num_queries, 64, outer_norm)
    if not outer_norm:
        assert torch.allclose(votes.sum(dim=1), votes.new_tensor(num_queries), rtol=1e-4)


@pytest.mark.parametrize("head_dim", (16, 96, 128, 256))
def test_votes_of_each_head_size(head_dim: int) -> None:
    _check_votes(300, 32, head_dim, outer_norm=True)


def test_votes_of_more_queries_than_a_thread_block_holds() -> None:
    _check_votes(90, 300, 64, outer_norm=False)


def _check_votes(num_rows: int, num_queries: int, head_dim: int, outer_norm: bool) -> Tensor:
    q = random(NUM_KV_HEADS, num_queries, head_dim)
    k, _ = _slabs(num_rows + 75, head_dim)
    spans = (5, num_rows + 5, num_rows + 70)
    found = chunk_votes.soft_votes(q, k, 2 * head_dim**-0.5, *spans, outer_norm=outer_norm)
    expected = reference_gathered.soft_votes_ref(
        wide(q), wide(k), 2 * head_dim**-0.5, *spans, outer_norm=outer_norm
    )
    assert_near(found, expected)
    return found


def test_a_vote_far_over_its_norm_stays_a_number() -> None:
    q, k = random(1, 3, 64).fill_(30.0), random(1, 90, 64).fill_(-30.0)
    k[:, 20] = 30.0
    votes = chunk_votes.soft_votes(q, k, 1.0, 8, 64, 90, outer_norm=True)
    assert votes.isfinite().all() and votes[0].argmax() == 12
    expected = reference_gathered.soft_votes_ref(q, k, 1.0, 8, 64, 90, outer_norm=True)
    torch.testing.assert_close(votes, expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("num_tokens, num_voters", ((1, 1), (7, 7), (65, 8), (1000, 3)))
@pytest.mark.parametrize("group_size, head_dim", ((1, 64), (3, 96), (4, 128), (7, 16)))
def test_mean_queries(num_tokens: int, num_voters: int, group_size: int, head_dim: int) -> None:
    q = random(num_tokens, NUM_KV_HEADS * group_size, head_dim)
    cos, sin = (table[50:51] for table in _angles(51, head_dim))
    found = rotate.mean_queries(q, num_voters, NUM_KV_HEADS, cos, sin)
    expected = reference_gathered.mean_queries_ref(
        wide(q), num_voters, NUM_KV_HEADS, wide(cos), wide(sin)
    )
    assert_near(found, expected)


@pytest.mark.parametrize("num_tokens", (1, 65))
@pytest.mark.parametrize("head_dim", (16, 96, 128))
def test_rope(num_tokens: int, head_dim: int) -> None:
    x = random(num_tokens, 3, head_dim)
    cos, sin = _angles(num_tokens, head_dim)
    assert_near(rotate.rope(x, cos, sin), rope_ref(wide(x), wide(cos), wide(sin)))
    cos, sin = (table[-1:].expand(num_tokens, -1) for table in (cos, sin))
    assert_near(rotate.rope(x, cos, sin), rope_ref(wide(x), wide(cos), wide(sin)))


@pytest.mark.parametrize(
    "num_rows, num_chosen",
    (
        (1, 1),
        (64, 63),
        (65, 65),
        (1000, 1),
        (70_000, 2048),
        *(((131_072, 2048), (1_000_001, 8192)) if ON_GPU else ()),
    ),
)
def test_the_best_rows_are_listed_in_order(num_rows: int, num_chosen: int) -> None:
    votes = torch.rand(2, num_rows, generator=torch.Generator().manual_seed(2)).pow(9)
    _check_list(votes.to(DEVICE), num_chosen, 7, 12)


def test_of_rows_with_equal_votes_the_first_are_listed() -> None:
    votes = torch.zeros(2, 40_000, device=DEVICE)
    votes[0, 39_999] = votes[1, 20_000] = 1e-30
    rows = _check_list(votes, 2500, 0, 0)
    assert rows[0].tolist() == [*range(2499), 39_999]
    assert rows[1].tolist() == [*range(2499), 20_000]


def _check_list(votes: Tensor, num_chosen: int, first_row: int, num_tail: int) -> Tensor:
    num_rows = votes.shape[1]
    end = first_row + num_rows + num_tail
    rows = best_rows.list_rows(votes, num_chosen, first_row, end)
    expected = reference_gathered.list_rows_ref(votes, num_chosen, first_row, end)
    assert rows.shape == expected.shape and rows.dtype == expected.dtype
    assert (rows.diff(dim=1) > 0).all(), "rows are in order, and none comes twice"
    ends = (slice(0, first_row), slice(first_row + num_chosen, None))
    assert all(torch.equal(rows[:, part], expected[:, part]) for part in ends)

    def ranked(listed: Tensor) -> Tensor:
        """The votes of the chosen rows, to the 22 bits that count, sorted."""
        chosen = listed[:, first_row : first_row + num_chosen].long() - first_row
        return (votes.gather(1, chosen).view(torch.int32) >> 9).sort(dim=1).values

    assert torch.equal(ranked(rows), ranked(expected))
    return rows


@torch.inference_mode()
def test_a_decoder_past_its_window_takes_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading(sink_size=4, window_size=8, budget=12, chunk_tokens=32)
    folder = tiny.convert(tiny.save_hf_folder(tmp_path / "hf", "qwen3"), tmp_path / "models")
    ids = torch.randint(0, 400, (110,), generator=torch.Generator().manual_seed(3))
    logits = []
    for device, dtype in ((torch.device("cpu"), torch.float32), (DEVICE, torch.float16)):
        monkeypatch.setattr(ops, "on_triton", lambda x, two=dtype.itemsize == 2: two)
        weights = load_weights(folder, device=str(device), dtype=dtype)
        decoder = Decoder(load_config(folder), weights, device, dtype, past_window=reading)
        cache, policy = decoder.new_cache(120), TokenSelect(budget=20, sink_size=2, window_size=5)
        decoder.prefill(ids[:96], cache)
        policy.prepare(cache)
        policy.start_turn(Turn(96, 104))
        decoder.extend(ids[96:104], cache, policy)
        logits.append(decoder.decode(ids[104:105].to(device), cache, policy))
    assert_near(logits[1], logits[0], 3e-2)
