"""The 13 tasks of RULER (Hsieh et al. 2024, arXiv:2404.06654), of any length, from seeds.

Prompts, counts and scoring are those of NVIDIA/RULER at c3f5e3b4. Made anew, so no sample is equal
to one of RULER's own. What differs in kind:

- Documents and questions are read as in a session (prompt.py): our system prompt in the chat
  template's head, "Document 1" as a heading, an empty line and "Question: " before the question.
  RULER has no system prompt, heading or empty line, and that word not in niah; where it has the
  word, it stands here once too, and qa's instruction is the document's end as there.
- Prose comes from books in the public domain, not from Paul Graham's essays (ruler_essay.py).
- Lengths are fitted in smaller steps (ruler_length.py), and hold the document, the question and
  the beginning of the answer; template and answer are for the caller to take off.
- Keys and values are all different within a sample, so that one answer is right.
- The questions of qa are those in the data at hand, in an order of the seed; an answer's
  paragraphs stand there once (ruler_qa.py).
- Each sample has a seed of its own, where RULER shuffles all samples alike.

RULER's score of a length is the plain mean over the 13 tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from longread.evaluate.ruler_chain import Chain
from longread.evaluate.ruler_counts import CommonWords, FrequentWords
from longread.evaluate.ruler_needles import Needles
from longread.evaluate.ruler_qa import hotpotqa, squad
from longread.evaluate.task import Materials, Task

TASKS: dict[str, Callable[[Materials], Task]] = {
    "niah_single_1": partial(Needles, name="niah_single_1", haystack="noise"),
    "niah_single_2": partial(Needles, name="niah_single_2", haystack="essay"),
    "niah_single_3": partial(Needles, name="niah_single_3", haystack="essay", values="uuids"),
    "niah_multikey_1": partial(Needles, name="niah_multikey_1", haystack="essay", num_keys=4),
    "niah_multikey_2": partial(Needles, name="niah_multikey_2", haystack="needle"),
    "niah_multikey_3": partial(
        Needles, name="niah_multikey_3", haystack="needle", keys="uuids", values="uuids"
    ),
    "niah_multivalue": partial(Needles, name="niah_multivalue", haystack="essay", num_values=4),
    "niah_multiquery": partial(
        Needles, name="niah_multiquery", haystack="essay", num_keys=4, num_queries=4
    ),
    "vt": Chain,
    "cwe": CommonWords,
    "fwe": FrequentWords,
    "qa_1": squad,
    "qa_2": hotpotqa,
}
