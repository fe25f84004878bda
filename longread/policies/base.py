"""What a policy is: told of the cache once a document, of each turn, and asked at each step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from longread_kernels.tables import Kept
from torch import Tensor

from longread.cache import KVCache
from longread.index import KeyIndex


@dataclass(frozen=True)
class Turn:
    """Rows [question_start, question_end) hold the question that is being answered.

    listed: for the kernels, of each layer the rows that are read besides the kept ones where they
    are the same for all of an answer, [H_kv, n] int64 with -1 for empty places; num_listed: how
    many, in the mean over layers and heads; num_gone: rows that were evicted before, in the same
    mean. stand_ins: for the kernels, of each layer the row that stands in for those that are
    not read, where the policy's plan has any.
    """

    question_start: int = 0
    question_end: int = 0
    listed: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)
    num_listed: float = 0.0
    num_gone: float = 0.0
    stand_ins: tuple[StandIn | None, ...] = field(default=(), compare=False, repr=False)


class Listing(Protocol):
    """Lists the rows of some branches of a step at every token, in a captured step: it waits for
    nothing, and what it writes to stays where it is.

    reselect: it is asked every so many steps, and in dense ones; the lists stay in between.
    """

    reselect: int

    @property
    def state(self) -> Sequence[Tensor]:
        """What a step leaves to the next one, besides the lists."""

    def fits(self) -> bool:
        """Whether what was captured is still what the policies use."""

    def start_answer(self, rows: Sequence[int], num_shared: int) -> None:
        """The next tokens' rows, of all branches of the step; this is not captured."""

    def start_step(self) -> None:
        """Called before the first layer."""

    def list_rows(self, layer_idx: int, q: Tensor, chosen: Tensor) -> None:
        """Called when the tokens' keys are in the cache.

        q: [B, H_q, D] after RoPE and chosen: [B, H_kv, n] int32, -1 for empty, of all branches.
        """


class Lister(Protocol):
    """What a plan has whose rows are listed anew at every step, but by no index."""

    @property
    def kind(self) -> Hashable:
        """One listing serves all plans of a kind."""

    def listing(self, branches: Mapping[int, KernelPlan], kept: Kept) -> Listing:
        """Of a step in which these branches have plans of this kind."""


@dataclass(frozen=True)
class KernelPlan:
    """What the decode kernels must know of a policy. budget None reads all rows.

    Without an index the budget is the room for the rows that a turn or the lister lists. summed:
    the vote is `group` and not `group-max`; apart: each query head has rows of its own; reselect:
    rows are chosen anew every so many steps; stand_in: rows that are not read have one, of the
    turn's values and, where rows are chosen, of the weight that the votes give those left out.
    """

    budget: int | None = None
    sink_size: int = 0
    window_size: int = 0
    index: KeyIndex | None = None
    lister: Lister | None = None
    summed: bool = True
    apart: bool = False
    reselect: int = 1
    stand_in: bool = False


def listings(plans: Sequence[KernelPlan], kept: Kept) -> list[Listing]:
    """What lists the rows of a step's branches, one listing a kind."""
    found: dict[Hashable, tuple[Lister, dict[int, KernelPlan]]] = {}
    for branch, plan in enumerate(plans):
        if plan.lister is not None:
            _, branches = found.setdefault(plan.lister.kind, (plan.lister, {}))
            branches[branch] = plan
    return [lister.listing(branches, kept) for lister, branches in found.values()]


@dataclass(frozen=True)
class StandIn:
    """A row of each KV head for rows that are not read; it counts exp(log_weight) times.

    k, v: [H_kv, D] fp32, the key after RoPE; log_weight: [H_kv] fp32, or [H_q] for each query head
    its own, -inf for heads without.
    """

    k: Tensor
    v: Tensor
    log_weight: Tensor


class Rereader(Protocol):
    """Runs the model once more for a policy that needs queries of more than the question."""

    @property
    def num_rows(self) -> int:
        """Rows of the documents, from the cache's first."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def window(self) -> int:
        """Tokens that the model can read."""

    @property
    def model(self) -> str:
        """Its name."""

    @property
    def identity(self) -> str:
        """Of its weights."""

    def documents(self, cache: KVCache, observer: Policy) -> None:
        """Call observer.observe with the documents' queries; the cache stays as it is."""

    def rope_rows(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin by which rows [start, end) were turned, [T, D/2] fp32 each."""

    def text(self, token_ids: Tensor, observer: Policy) -> None:
        """Call observer.prepare with another cache, then observe with the queries of a text."""


@dataclass
class Policy:
    """Reads every row. A subclass overrides what it needs; the fields are its hyper-parameters."""

    evicts: ClassVar[bool] = False  # whether rows that it drops are never read again
    rebuilds: ClassVar[bool] = False  # whether it reads all rows, but in another form
    turn: Turn = field(default=Turn(), init=False, repr=False)

    def prepare(self, cache: KVCache, rereader: Rereader | None = None) -> None:
        """Called when the documents are in the cache; a policy that is prepared again begins anew.

        rereader: for policies that need more than the cache holds; others do without.
        """

    def start_turn(self, turn: Turn) -> None:
        """Called before the first answer token of each turn; a subclass calls it too."""
        self.turn = turn

    def observe(self, layer_idx: int, q: Tensor, start: int) -> None:
        """Called for each layer while rows [start, start + T) are read. q: [T, H_q, D]."""

    def appended(self, layer_idx: int, start: int, end: int) -> None:
        """Called when rows [start, end) of one layer have been written."""

    def left(self, layer_idx: int, num_rows: int) -> Tensor | None:
        """Which of rows [0, num_rows) a question may still read; None where nothing was evicted.

        int64 [H_kv, n] or [1, n] with -1 for empty places; rows from num_rows on are not named.
        """
        return None

    def read_from(self, cache: KVCache) -> KVCache:
        """The cache whose rows are attended to: the model's, or one of its own with as many.

        A captured step writes its token's row there; it is asked for after `kernel_turn`.
        """
        return cache

    def stand_in_of(self, layer_idx: int) -> StandIn | None:
        """What is attended to beside the rows that are left or selected."""
        return None

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        """Rows for one token: int64 [sets, n] with -1 for empty places; None means all rows.

        q: [H_q, D] after RoPE; rows [0, num_rows) are in the cache, the token's own among them.
        """
        return None

    def kernel_plan(self) -> KernelPlan | None:
        """How the decode kernels do what `select` does; None where they cannot."""
        return None

    def kernel_turn(self) -> Turn:
        """The turn as the decode kernels take it, the same object for all of an answer."""
        return self.turn
