"""What all answers of a session rest on, and how a reply becomes an answer with its sources."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from longread.events import Answer, CacheUse, Timings, Usage
from longread.evidence import Evidence, Span, cut_passages
from longread.policies import Policy
from longread.prompt import DocumentPrompt
from longread.reply import Reply
from longread.trace import Trace


@dataclass(frozen=True, eq=False)
class Grounds:
    """The documents as they were read. blank: the `row_mass` of a question without words."""

    model: str
    prompt: DocumentPrompt
    blank: Tensor
    cache: CacheUse
    truncated: bool
    open_s: float
    prefill_s: float

    def answer(
        self,
        reply: Reply,
        trace: Trace,
        policy: Policy,
        policy_name: str,
        started: float,
        num_before: int,
    ) -> Answer:
        """started: time.perf_counter of the question; num_before: rows before what was read."""
        ended = time.perf_counter()
        evidence = Evidence(trace, self.prompt, self.blank, self._spans)
        num_document_rows = len(self.prompt.token_ids)
        return Answer(
            text="".join(reply.pieces).strip(),
            finish_reason=reply.finish_reason,
            model=self.model,
            citations=evidence.citations() if reply.ids else (),
            usage=Usage(
                document_tokens=num_document_rows,
                history_tokens=num_before + reply.num_pending - num_document_rows,
                question_tokens=reply.num_question,
                answer_tokens=len(reply.ids),
            ),
            cache=self.cache,
            selection=evidence.selection(policy_name, policy),
            timings=Timings(
                open_s=self.open_s,
                prefill_s=self.prefill_s,
                question_s=(reply.first_token_at or ended) - started,
                decode_s=ended - (reply.first_token_at or ended),
                total_s=ended - started,
            ),
            truncated=self.truncated,
            supported=evidence.supported or not reply.ids,
        )

    @cached_property
    def _spans(self) -> list[Span]:
        return cut_passages(self.prompt)
