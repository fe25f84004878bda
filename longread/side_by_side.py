"""Questions of a session that are answered several at once: how many, in which places, and with
which policies. What a step of all is, is batch.py's and branches.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from longread.batch import Places, Question, Siblings, TorchPlaces, affordable_places, answer_each
from longread.branches import BranchPlaces
from longread.cache import KVCache
from longread.config import Settings
from longread.context import answering_policy, rows_for
from longread.events import Answered
from longread.grounds import Grounds
from longread.model import Decoder
from longread.policies import Policy
from longread.reread import DocumentRereader
from longread.tokenizer import Tokenizer


def answer_all(
    decoder: Decoder,
    cache: KVCache,
    policy: Policy,
    settings: Settings,
    grounds: Grounds,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    most: int,
) -> Iterator[Answered]:
    """Answer questions that fit the window, up to `most` at once, in no order.

    policy: prepared on the cache, which holds the documents alone, and not asked since.
    """
    num_rows = cache.length
    token_ids = torch.from_numpy(grounds.prompt.token_ids).long()
    make_policy = partial(answering_policy, settings, decoder, num_rows)
    siblings = Siblings(policy, make_policy, cache, DocumentRereader(decoder, token_ids))
    rows_alone = rows_for(settings, decoder.config, num_rows)
    places = make_places(decoder, cache, siblings, questions, most, rows_alone)
    for asked in answer_each(decoder, places, questions, partial(decoder.new_trace, num_rows)):
        reply = asked.reply
        reply.pieces.append(tokenizer.decode(reply.ids))
        answer = grounds.answer(
            reply, asked.trace, policy, settings.policy, asked.started, num_rows
        )
        yield Answered(asked.question.number, answer)


def make_places(
    decoder: Decoder,
    cache: KVCache,
    siblings: Siblings,
    questions: Sequence[Question],
    most: int,
    rows_alone: int,
) -> Places:
    """Places for up to `most` of the questions, as memory allows, by kernels where they can.

    rows_alone: of a cache for one question.
    """
    num_own = max((len(item.ids) + item.max_tokens for item in questions), default=1)
    most = min(most, len(questions))
    siblings.reserve(affordable_places(decoder, cache, siblings.policies[0], most, num_own))
    by_kernels = BranchPlaces.make(decoder, cache, siblings, num_own, rows_alone)
    return by_kernels or TorchPlaces(decoder, cache, siblings)
