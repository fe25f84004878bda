"""Questions on whole documents that others collected: L-Eval, LooGLE and LongBench.

L-Eval (arXiv:2307.11088) and LooGLE (arXiv:2311.04939) are read from longqa/, LongBench
(arXiv:2308.14508) from longbench/*.jsonl, its own files, where a user has them. A document is asked
whole or not at all: those longer than the length are skipped, and a shorter one stays short.

LongBench's instructions and answer lengths are those of its config/dataset2prompt.json and
dataset2maxlen.json, but for what stands there before the document, which comes first here. Where
they end with "Question: ", that word is the wrapper's (prompt.py), and what stands before it ends
the document. Its summaries, code and examples are left out: their scorings are not ours.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from longread.errors import UsageError
from longread.evaluate.book_text import check_number
from longread.evaluate.task import Materials, Question, Sample, Task, read_text

Row = dict[str, Any]


@dataclass(frozen=True)
class Style:
    """How a set asks: {} is its own question; ending: what the document ends with."""

    scoring: str
    max_tokens: int
    wording: str = "{}"
    prefix: str = ""
    ending: str = ""

    def question(self, text: str, references: tuple[str, ...], kind: str = "") -> Question:
        text = self.wording.replace("{}", text.strip())
        return Question(text, references, self.scoring, self.max_tokens, self.prefix, kind)


def _leval(row: Row, style: Style) -> tuple[str, list[Question]]:
    pairs = zip(row["instructions"], row["outputs"], strict=True)
    return row["input"], [style.question(text, (_reference(out, style),)) for text, out in pairs]


def _reference(output: str, style: Style) -> str:
    """The letter of "(B) Because ..."; all of any other answer."""
    if style.scoring == "choice" and output.startswith("("):
        return output[1]
    return output.strip()


def _loogle(row: Row, style: Style) -> tuple[str, list[Question]]:
    questions = []
    for pair in ast.literal_eval(row["qa_pairs"]):  # Python's notation, not JSON
        kind = pair.get("type", "")
        questions.append(style.question(pair["Q"], (str(pair["A"]).strip(),), kind))
    return row["input"], questions


def _cloze(row: Row, style: Style) -> tuple[str, list[Question]]:
    """Each mask of a text is a question."""
    questions = []
    for pair in ast.literal_eval(row["qa_pairs"]):
        masks = pair["A"] if isinstance(pair["A"], dict) else ast.literal_eval(pair["A"])
        for mask, name in masks.items():
            text = f"{pair['Q'].strip()}\n\nWho or what is {mask}? Answer with the name alone."
            question = Question(text, (name,), style.scoring, style.max_tokens, f"{mask} is")
            questions.append(question)
    return row["input"], questions


def _longbench(row: Row, style: Style) -> tuple[str, list[Question]]:
    document = row["context"] + (f"\n\n{style.ending}" if style.ending else "")
    return document, [style.question(row["input"], tuple(row["answers"]))]


Read = Callable[[Row, Style], tuple[str, list[Question]]]


@dataclass
class LongQA:
    """The documents of one file in their order, each with all its questions."""

    materials: Materials
    name: str
    file: str
    read: Read
    style: Style
    _num_tokens: dict[int, int] = field(default_factory=dict, repr=False)
    _path: Path = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._path = self.materials.path(self.file)

    @cached_property
    def _documents(self) -> list[tuple[str, list[Question]]]:
        documents = []
        # Not splitlines(): a string may hold U+2028, which ends a line of text but not of JSON.
        for number, line in enumerate(read_text(self._path).split("\n"), 1):
            if not line.strip():
                continue
            try:
                document, questions = self.read(json.loads(line), self.style)
                answers = (text for question in questions for text in question.references)
                if not all(isinstance(text, str) for text in (document, *answers)):
                    raise TypeError("a text is no text")
                documents.append((document, questions))
            except (ValueError, SyntaxError, LookupError, TypeError, AttributeError) as error:
                what = f"line {number} of {self._path} is not of the form that {self.name} has"
                raise UsageError(f"{what}: fetch the file again") from error
        return [document for document in documents if document[1]]

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        """The seed changes nothing: no order of these documents is better than another."""
        fitting = list(islice(self._fitting(num_tokens), number + 1))
        check_number(self.name, number, len(fitting), num_tokens)
        document, questions = self._documents[fitting[number]]
        return Sample(self.name, number, document, tuple(questions))

    def _fitting(self, num_tokens: int) -> Iterator[int]:
        """The documents that fit with the longest of their questions."""
        return (n for n in range(len(self._documents)) if self._length(n) <= num_tokens)

    def _length(self, place: int) -> int:
        if place not in self._num_tokens:
            count_tokens = self.materials.count_tokens
            document, questions = self._documents[place]
            asked = (
                count_tokens(question.text) + count_tokens(question.answer_prefix)
                for question in questions
            )
            self._num_tokens[place] = count_tokens(document) + max(asked)
        return self._num_tokens[place]


_LETTERS = Style(
    "choice",
    16,
    "{}\n\nThere may be one right option or several. Answer with the letters alone, such as A or "
    "BD.",
    "Answer:",
)
_LETTER = Style("choice", 16, "{}\n\nAnswer with the letter of the right option alone.", "Answer:")
_NAMED = Style("words", 32)
_FEW_WORDS = Style("f1", 32, "{}\nAnswer in a few words.")
_ONE_SENTENCE = Style("f1", 64, "{}\nAnswer in one short sentence.")
_SENTENCES = Style("f1", 128)
_BRIEF = Style("f1", 96, "{}\nAnswer as briefly as you can.")
_SPAN = Style("f1", 128, "{}\nQuote the passage of the contract and nothing else.")
_CLOZE = Style("words", 16)

_ONLY = "only give me the answer and do not output any other words."
_PHRASE = "as concisely as you can, using a single phrase"
_NOTHING_ELSE = "Do not provide any explanation."
_PASSAGES = Style(
    "f1",
    32,
    "{}\nAnswer:",
    ending="Answer the question based on the given passages. Only give me the answer and do not "
    "output any other words.",
)

LEVAL = {
    "coursera": _LETTERS,
    "quality": _LETTER,
    "topic_retrieval_longchat": _NAMED,
    "natural_question": _FEW_WORDS,
    "multidoc_qa": _ONE_SENTENCE,
    "financial_qa": _SENTENCES,
    "legal_contract_qa": _SPAN,
}
LOOGLE: dict[str, tuple[Read, Style]] = {
    "shortdep_qa": (_loogle, _ONE_SENTENCE),
    "longdep_qa": (_loogle, _BRIEF),
    "shortdep_cloze": (_cloze, _CLOZE),
}
LONGBENCH = {
    "narrativeqa": Style(
        "f1",
        128,
        "{}\n\nAnswer:",
        ending=f"Now, answer the question based on the story {_PHRASE} if possible. "
        f"{_NOTHING_ELSE}",
    ),
    "qasper": Style(
        "f1",
        128,
        "{}\n\nAnswer:",
        ending=f"Answer the question based on the above article {_PHRASE} or sentence if possible. "
        "If the question cannot be answered based on the information in the article, write "
        '"unanswerable". If the question is a yes/no question, answer "yes", "no", or '
        '"unanswerable". '
        f"{_NOTHING_ELSE}",
    ),
    "multifieldqa_en": Style(
        "f1",
        64,
        "{}\nAnswer:",
        ending=f"Now, answer the following question based on the above text, {_ONLY}",
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "passage_retrieval_en": Style(
        "words",
        32,
        "The following is an abstract.\n\n{}\n\nPlease enter the number of the paragraph that the "
        'abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: ",
    ),
}


def _tasks() -> dict[str, Callable[[Materials], Task]]:
    tasks: dict[str, Callable[[Materials], Task]] = {}

    def add(family: str, folder: str, name: str, read: Read, style: Style) -> None:
        task, file = f"{family}_{name}", f"{folder}/{name}.jsonl"
        tasks[task] = partial(LongQA, name=task, file=file, read=read, style=style)

    for name, style in LEVAL.items():
        add("leval", "longqa/leval", name, _leval, style)
    for name, (read, style) in LOOGLE.items():
        add("loogle", "longqa/loogle", name, read, style)
    for name, style in LONGBENCH.items():
        add("longbench", "longbench", name, _longbench, style)
    return tasks


TASKS = _tasks()
