"""The ops of the decode path against naive arithmetic in float64."""

from __future__ import annotations

import pytest
import torch
from longread_kernels import dispatch as ops
from longread_kernels.reference import VOTES
from torch import Tensor

LENGTHS = (1, 63, 64, 65, 1000)
GROUP_SIZES = (1, 3, 4, 7)
NUM_KV_HEADS, HEAD_DIM = 2, 16


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _naive_attention(q: Tensor, k: Tensor, v: Tensor, rows: list[list[int]]) -> Tensor:
    """rows: for each query head, the rows it attends to."""
    out = []
    group_size = q.shape[0] // k.shape[0]
    for head, chosen in enumerate(rows):
        keys = k[head // group_size, chosen].double()
        values = v[head // group_size, chosen].double()
        probs = torch.softmax(keys @ q[head].double() * q.shape[1] ** -0.5, dim=0)
        out.append(probs @ values)
    return torch.stack(out)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("num_rows", LENGTHS)
def test_attend_equals_naive_softmax(num_rows: int, group_size: int) -> None:
    q = _random(NUM_KV_HEADS * group_size, HEAD_DIM)
    k = _random(NUM_KV_HEADS, num_rows, HEAD_DIM, seed=1)
    v = _random(NUM_KV_HEADS, num_rows, HEAD_DIM, seed=2)
    everything = [list(range(num_rows))] * q.shape[0]
    out, probs = ops.attend(q, k, v, None, HEAD_DIM**-0.5)
    torch.testing.assert_close(out, _naive_attention(q, k, v, everything).float())
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(q.shape[0]))


@pytest.mark.parametrize("sets", ("one", "kv", "query"))
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_attend_reads_only_the_chosen_rows(group_size: int, sets: str) -> None:
    num_rows, num_chosen = 65, 11
    num_heads = NUM_KV_HEADS * group_size
    num_sets = {"one": 1, "kv": NUM_KV_HEADS, "query": num_heads}[sets]
    generator = torch.Generator().manual_seed(3)
    indices = torch.stack(
        [torch.randperm(num_rows, generator=generator)[:num_chosen] for _ in range(num_sets)]
    )
    q = _random(num_heads, HEAD_DIM)
    k = _random(NUM_KV_HEADS, num_rows, HEAD_DIM, seed=1)
    v = _random(NUM_KV_HEADS, num_rows, HEAD_DIM, seed=2)
    per_head = [indices[h * num_sets // num_heads].tolist() for h in range(num_heads)]
    expected = _naive_attention(q, k, v, per_head)
    for kv_head in range(NUM_KV_HEADS):
        heads = range(kv_head * group_size, (kv_head + 1) * group_size)
        unread = sorted(set(range(num_rows)).difference(*(per_head[h] for h in heads)))
        k[kv_head, unread] = torch.nan
        v[kv_head, unread] = torch.nan
    out, _ = ops.attend(q, k, v, indices, HEAD_DIM**-0.5)
    torch.testing.assert_close(out, expected.float())


def test_attend_gives_no_weight_to_empty_places() -> None:
    q, k, v = _random(4, HEAD_DIM), _random(2, 9, HEAD_DIM, seed=1), _random(2, 9, HEAD_DIM, seed=2)
    indices = torch.tensor([[3, 5, -1, -1]])
    out, probs = ops.attend(q, k, v, indices, HEAD_DIM**-0.5)
    torch.testing.assert_close(out, _naive_attention(q, k, v, [[3, 5]] * 4).float())
    assert torch.equal(probs[:, 2:], torch.zeros(4, 2))


@pytest.mark.parametrize("num_rows", LENGTHS)
def test_score_takes_rows_of_any_dtype(num_rows: int) -> None:
    q = _random(NUM_KV_HEADS, 3, 8)
    codes = torch.randint(-127, 128, (NUM_KV_HEADS, num_rows, 8), dtype=torch.int8)
    expected = torch.einsum("hgd,hsd->hgs", q.double(), codes.double())
    torch.testing.assert_close(ops.score(q, codes).double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(ops.score(q, codes.float()), ops.score(q, codes))


def test_votes_rank_as_their_definitions_say() -> None:
    # Two KV heads of two query heads each, four rows.
    scores = torch.tensor(
        [[[4.0, 0.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0]], [[0.0, 0.0, 9.0, 0.0], [0.0, 0.0, 0.0, 1.0]]]
    )
    soft = torch.softmax(scores, dim=-1)
    torch.testing.assert_close(ops.vote(scores, "group"), scores.exp().sum(dim=1).log())
    torch.testing.assert_close(ops.vote(scores, "group-max"), scores.amax(dim=1))
    torch.testing.assert_close(ops.vote(scores, "all"), soft.sum(dim=(0, 1))[None])
    assert torch.equal(ops.vote(scores, "none"), scores.reshape(4, 4))


def test_threshold_counts_heads_over_their_median_then_asks_the_soft_vote() -> None:
    scores = torch.tensor([[[3.0, 2.0, 1.0, 0.0, -1.0], [3.0, 0.0, 2.0, 1.0, -1.0]]])
    ranking = ops.vote(scores, "threshold")[0]
    # Medians are 1: row 0 has both votes, rows 1 and 2 one each, of which row 1 and 2 tie.
    assert ranking.argmax() == 0
    assert ranking[0] > ranking[1] and ranking[1] > ranking[3]
    assert ranking[1].floor() == ranking[2].floor() == 1
    two = ops.vote(scores, "threshold", min_votes=2)[0]
    assert two[0] > 2 and torch.isneginf(two[1:]).all()


@pytest.mark.parametrize("vote", VOTES)
@pytest.mark.parametrize("budget", (1, 7, 1000))
def test_selected_rows_are_kept_rows_and_the_best_of_the_rest(vote: str, budget: int) -> None:
    scores = _random(2, 3, 65)
    kept = torch.tensor([0, 1, 40, 64])
    votes = ops.vote(scores, vote)
    rows = ops.select_rows(votes, kept, budget)
    assert rows.shape == (votes.shape[0], min(4 + budget, 65))
    for chosen, ranking in zip(rows.tolist(), votes, strict=True):
        filled = [row for row in chosen if row >= 0]
        assert len(set(filled)) == len(filled)
        assert chosen[:4] == kept.tolist()
        rest = [row for row in range(65) if row not in (0, 1, 40, 64)]
        best = sorted(rest, key=lambda row: -float(ranking[row]))[:budget]
        assert set(filled[4:]) <= set(best)
        assert vote == "threshold" or set(filled[4:]) == set(best)


def test_places_without_an_eligible_row_are_empty() -> None:
    votes = torch.tensor([[1.0, float("-inf"), 2.0, float("-inf"), 0.5]])
    rows = ops.select_rows(votes, torch.tensor([0]), 4)
    assert sorted(rows[0].tolist()) == [-1, -1, 0, 2, 4]


@pytest.mark.parametrize("normed", (False, True))
@pytest.mark.parametrize("num_tokens", (1, 65))
def test_rope_append_rotates_pairs_of_the_two_halves(num_tokens: int, normed: bool) -> None:
    heads = _random(num_tokens, 3 + 2 * NUM_KV_HEADS, HEAD_DIM)
    norms = (_random(HEAD_DIM, seed=5), _random(HEAD_DIM, seed=6)) if normed else None
    angles = torch.outer(torch.arange(num_tokens), torch.rand(HEAD_DIM // 2)).double()
    unit = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)

    def expected(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x.double()
        if weight is not None:
            x = x / (x.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        turned = torch.complex(x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]) * unit
        return torch.cat((turned.real, turned.imag), dim=-1).float()

    k, v = torch.full((2, NUM_KV_HEADS, num_tokens + 5, HEAD_DIM), torch.nan)
    cos, sin = angles.cos().float(), angles.sin().float()
    q = ops.rope_append(heads, cos, sin, norms, 1e-6, k, v, 2)
    written = slice(2, 2 + num_tokens)
    q_weight, k_weight = norms or (None, None)
    torch.testing.assert_close(q, expected(heads[:, :3], q_weight))
    own_k = expected(heads[:, 3 : 3 + NUM_KV_HEADS], k_weight)
    torch.testing.assert_close(k[:, written], own_k.transpose(0, 1))
    torch.testing.assert_close(v[:, written], heads[:, 3 + NUM_KV_HEADS :].transpose(0, 1))
    for slab in (k, v):
        assert slab[:, :2].isnan().all() and slab[:, 2 + num_tokens :].isnan().all()


def test_rms_norm_and_swiglu_equal_their_formulas() -> None:
    x, weight = _random(5, 32), _random(32, seed=1)
    expected = x / (x.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), expected)
    total, normed = ops.add_rms_norm(x - 1, torch.ones_like(x), weight, 1e-6)
    torch.testing.assert_close(total, x)
    torch.testing.assert_close(normed, expected)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(ops.swiglu(x.clone()), gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("chosen", (False, True))
def test_logits_of_bf16_heads_are_not_rounded(chosen: bool) -> None:
    """A large common part of the keys, as the first layers of real models have."""
    q = _random(4, HEAD_DIM).bfloat16()
    k = (_random(2, 65, HEAD_DIM, seed=1) + 200).bfloat16()
    v = _random(2, 65, HEAD_DIM, seed=2).bfloat16()
    indices = torch.arange(65)[None] if chosen else None
    _, probs = ops.attend(q, k, v, indices, HEAD_DIM**-0.5)
    keys = k.double().repeat_interleave(2, 0)
    logits = torch.einsum("hd,hsd->hs", q.double(), keys) * HEAD_DIM**-0.5
    assert logits.abs().max() > 50
    torch.testing.assert_close(probs, torch.softmax(logits, dim=1).float(), rtol=1e-3, atol=1e-4)
    scores = ops.score(q.view(2, 2, -1), k).flatten(0, 1)
    torch.testing.assert_close(scores * HEAD_DIM**-0.5, logits.float(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    "spec, capability, compiler, reason",
    (
        (None, (9, 0), "/usr/bin/cc", "not installed"),
        ("triton", (7, 5), "/usr/bin/cc", "7.5"),
        ("triton", (9, 0), None, "C compiler"),
        ("triton", (8, 0), "/usr/bin/cc", None),
    ),
)
def test_what_keeps_kernels_from_a_gpu_is_said(
    monkeypatch: pytest.MonkeyPatch,
    spec: str | None,
    capability: tuple[int, int],
    compiler: str | None,
    reason: str | None,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    monkeypatch.setattr("shutil.which", lambda name: compiler)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    ops.triton_missing.cache_clear()
    found = ops.triton_missing()
    ops.triton_missing.cache_clear()
    assert found is None if reason is None else reason in (found or "")
