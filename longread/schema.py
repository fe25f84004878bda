"""The JSON documents of the command line, version 1; the README describes them for users."""

from __future__ import annotations

import dataclasses

from longread.events import Answer, Answered, CacheUse, Opened
from longread.questions import ListedQuestion

VERSION = 1


def answer_document(question: str, answer: Answer, *, with_selected: bool) -> dict[str, object]:
    """Return the document of one question, as `ask --json` prints it."""
    return {"version": VERSION, **_answer(question, answer, with_selected)}


def line_head(run: str) -> dict[str, object]:
    """Return how each line of `ask --questions` begins; run: its documents, settings and model."""
    return {"version": VERSION, "run": run}


def answer_line(
    run: str, question: ListedQuestion, answered: Answered, *, with_selected: bool
) -> dict[str, object]:
    """Return the document of one line, which has an `error` where there is no answer."""
    head = line_head(run) | {"id": question.id}
    if answered.answer is None:
        return head | {"question": question.text, "error": answered.why_not}
    return head | _answer(question.text, answered.answer, with_selected)


def ingest_document(opened: Opened, total_s: float) -> dict[str, object]:
    """Return the document of `ingest --json`."""
    return {
        "version": VERSION,
        "documents": [
            {"name": info.name, "num_pages": info.num_pages, "num_tokens": info.num_tokens}
            for info in opened.documents
        ],
        "cache": cache_record(opened.cache),
        "timings": {"total_s": total_s},
    }


def cache_record(cache: CacheUse) -> dict[str, object]:
    """Return how much came from the store, sizes in bytes."""
    return {
        "hit": cache.hit,
        "tokens_reused": cache.tokens_reused,
        "tokens_prefilled": cache.tokens_prefilled,
        "bytes": cache.store_bytes,
        "key": cache.key,
    }


def _answer(question: str, answer: Answer, with_selected: bool) -> dict[str, object]:
    selection = dataclasses.asdict(answer.selection)
    passages = selection.pop("passages")
    strip, heads = selection.pop("strip"), selection.pop("heads")
    if with_selected:
        selection |= {"passages": list(passages), "strip": list(strip), "heads": list(heads)}
    return {
        "question": question,
        "answer": answer.text,
        "citations": [dataclasses.asdict(citation) for citation in answer.citations],
        "usage": dataclasses.asdict(answer.usage),
        "cache": cache_record(answer.cache),
        "selection": selection,
        "timings": dataclasses.asdict(answer.timings),
        "model": answer.model,
        "supported": answer.supported,
        "truncated": answer.truncated,
        "interrupted": answer.finish_reason == "interrupted",
        "finish_reason": answer.finish_reason,
    }
