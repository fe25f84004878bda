"""Several policies on one cache: they read a question as one, and answer side by side.

Policies for which there are decode kernels answer as branches of one step; the others answer one
after the other in torch operations, which is the runner's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longread.cache import KVCache
from longread.model import Decoder
from longread.policies import Butler, KernelPlan, Policy, Quest, Rereader, TokenSelect, Turn
from longread.policies.kept import rows_read
from longread.step_buffers import share_rows

_LEAST_BRANCH_ROWS = 128  # most answers are shorter, and so one captured step serves all tasks


@dataclass
class Together(Policy):
    """Policies that read every row of a question. Those that select share what they score."""

    policies: Sequence[Policy]
    _borrowers: list[Policy] = field(default_factory=list, init=False, repr=False)

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        indexes: dict[tuple[str, int], TokenSelect] = {}
        bounds: dict[int, Quest] = {}
        keys: dict[str, Butler] = {}
        self._borrowers.clear()
        for policy in self.policies:
            if isinstance(policy, TokenSelect):
                key = policy.index, policy.index_dim
                if (owner := indexes.setdefault(key, policy)) is not policy:
                    policy.borrow_index(owner)
                    self._borrowers.append(policy)
                    continue
            elif isinstance(policy, Quest):
                if (other := bounds.setdefault(policy.block_len, policy)) is not policy:
                    policy.borrow_bounds(other)
                    self._borrowers.append(policy)
                    continue
            elif isinstance(policy, Butler) and policy.budget is not None:
                if (first := keys.setdefault(policy.butler, policy)) is not policy:
                    policy.borrow_keys(first)
                    self._borrowers.append(policy)
                    continue
            policy.prepare(cache, rereader)

    def begin_anew(self, cache: KVCache, rereader: Rereader | None) -> None:
        """Prepare those again on which an earlier question has left its mark."""
        for policy in self.policies:
            if policy.evicts or policy.rebuilds:
                policy.prepare(cache, rereader)

    def start_turn(self, turn: Turn) -> None:
        super().start_turn(turn)
        for policy in self.policies:
            policy.start_turn(turn)

    def observe(self, layer_idx: int, q: Tensor, start: int) -> None:
        for policy in self.policies:
            policy.observe(layer_idx, q, start)

    def appended(self, layer_idx: int, start: int, end: int) -> None:
        for policy in self.policies:
            if not any(policy is borrower for borrower in self._borrowers):
                policy.appended(layer_idx, start, end)


@dataclass
class Answer:
    """Token ids. Rows are those of one head in the mean over layers, summed over the steps."""

    ids: list[int]
    rows_read: float = 0.0
    rows_cached: int = 0


@torch.inference_mode()
def answer_together(
    decoder: Decoder,
    cache: KVCache,
    policies: Sequence[Policy],
    logits: Tensor,
    most_tokens: int,
) -> dict[int, Answer]:
    """Greedy answers from `logits` [V] on, by a policy's place in `policies`, as far as the kernels
    can. The cache needs `room_for_branches` rows; its length is not changed.
    """
    found: dict[int, Answer] = {}
    for read, places, plans in _groups(decoder, cache, policies):
        step = decoder.captured.branches(read, plans, branch_rows(most_tokens))
        if step is None:
            continue
        turns = [policies[place].kernel_turn() for place in places]
        answers = [Answer([]) for _ in places]
        tokens = logits.argmax(dim=-1).expand(len(places))
        ended = [False] * len(places)
        for row in range(cache.length, cache.length + most_tokens):
            for branch, token_id in enumerate(tokens.tolist()):
                ended[branch] = ended[branch] or token_id in decoder.config.eos_token_ids
                if not ended[branch]:
                    answers[branch].ids.append(token_id)
            if all(ended) or row + 1 == cache.length + most_tokens:
                break
            with decoder.on_device():
                rows = [row] * len(places)
                tokens = step.step_branches(tokens, rows, turns, cache.length).argmax(dim=-1)
            for branch, answer in enumerate(answers):
                if not ended[branch]:
                    answer.rows_read += rows_read(plans[branch], turns[branch], row + 1)
                    answer.rows_cached += row + 1
        found.update(zip(places, answers, strict=True))
    return found


def branch_rows(most_tokens: int) -> int:
    """Rows that an answer of at most so many tokens gets."""
    return max(_LEAST_BRANCH_ROWS, 1 << (most_tokens - 1).bit_length())


def room_for_branches(num_policies: int, most_tokens: int) -> int:
    """Rows that a cache needs past its length."""
    return num_policies * branch_rows(most_tokens)


def _groups(
    decoder: Decoder, cache: KVCache, policies: Sequence[Policy]
) -> list[tuple[KVCache, list[int], list[KernelPlan]]]:
    """The cache, places and plans of the policies that can be branches of one step: those that
    choose rows alike, and with the first of these all that choose none. Shares of one size are part
    of it, so that no answer depends on the budgets beside it.
    """
    groups: dict[object, tuple[KVCache, list[int], list[KernelPlan]]] = {}
    plans = [
        None if decoder.is_past_window else decoder.captured.plan(cache, policy)
        for policy in policies
    ]
    choosing = [plan for plan in plans if plan is not None and plan.index is not None]
    together = next((_kind(plan, cache) for plan in choosing if not plan.apart), None)
    for place, plan in enumerate(plans):
        if plan is not None:
            policies[place].kernel_turn()  # before it a policy has no cache of its own
            read = policies[place].read_from(cache)
            chooses = plan.index is not None or plan.reselect > 1
            key: object = _kind(plan, cache) if chooses else together
            key = key if read is cache else id(read)
            _, places, group = groups.setdefault(key, (read, [], []))
            places.append(place)
            group.append(plan)
    return list(groups.values())


def _kind(plan: KernelPlan, cache: KVCache) -> tuple[int, ...]:
    num_rows = share_rows(cache.capacity, plan.budget or 0)
    return id(plan.index), plan.apart, plan.summed, plan.reselect, plan.stand_in, num_rows
