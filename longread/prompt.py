"""Documents and questions as token ids, and the way back from a token to its page and characters.

Owns the order of what the model reads. The part with the documents holds no file name and no
question, so its KV serves any question, a renamed file, and further documents after these ones.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longread.chat_format import ChatFormat, derive_chat_format
from longread.document import PAGE_SEPARATOR, Document, Page, document_text
from longread.tokenizer import Tokenizer

__all__ = [
    "ChatFormat",
    "DocumentPrompt",
    "TokenLocation",
    "TokenizedDocument",
    "build_prompt",
    "derive_chat_format",
    "question_ids",
    "tokenize_document",
]


@dataclass(frozen=True, eq=False)
class TokenizedDocument:
    """A document's own tokens. Characters count in `document_text(document)`."""

    document: Document
    token_ids: np.ndarray  # int32 [N]
    char_starts: np.ndarray  # int32 [N], monotone; the characters that each token touches
    char_ends: np.ndarray  # int32 [N], monotone
    page_char_starts: np.ndarray  # int32 [len(document.pages)], strictly increasing

    @property
    def page_token_starts(self) -> np.ndarray:
        """The first token of each page, int [len(document.pages)]."""
        return np.searchsorted(self.char_starts, self.page_char_starts)

    def renamed(self, name: str) -> TokenizedDocument:
        """The same under another file name."""
        return dataclasses.replace(self, document=dataclasses.replace(self.document, name=name))

    def first_tokens(self, num_tokens: int) -> TokenizedDocument:
        """The same document read only as far as its first `num_tokens` tokens."""
        names = ("token_ids", "char_starts", "char_ends")
        return dataclasses.replace(
            self, **{name: getattr(self, name)[:num_tokens] for name in names}
        )

    def to_record(self) -> dict[str, Any]:
        """JSON data and numpy arrays that `from_record` makes the document from again."""
        return {
            "document": dataclasses.asdict(self.document),
            "token_ids": self.token_ids,
            "char_starts": self.char_starts,
            "char_ends": self.char_ends,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> TokenizedDocument:
        """The document of a record that came back from the store, tuples as lists or not."""
        fields = dict(record["document"])
        fields["pages"] = tuple(Page(**page) for page in fields["pages"])
        fields["warnings"] = tuple(fields["warnings"])
        document = Document(**fields)
        names = ("token_ids", "char_starts", "char_ends")
        # Copies: arrays over a file's memory are read-only, which torch.from_numpy warns about.
        ids, starts, ends = (np.array(record[name], np.int32) for name in names)
        return cls(document, ids, starts, ends, _page_char_starts(document))


@dataclass(frozen=True)
class TokenLocation:
    """Where a token stands: characters count in `document_text` of its document."""

    document_idx: int
    page_idx: int  # place in `document.pages`, which is not the page's place in the file
    char_start: int
    char_end: int


@dataclass(frozen=True, eq=False)
class DocumentPrompt:
    """All that is read before the first question: the template's head, then each document."""

    token_ids: np.ndarray  # int32 [S]
    documents: tuple[TokenizedDocument, ...]
    head_len: int  # tokens before the first document's own
    document_spans: tuple[tuple[int, int], ...]  # per document: its own tokens in `token_ids`

    def locate(self, token_idx: int) -> TokenLocation | None:
        """The place of one token of the prompt; None for the template's and the headings'.

        A token over a page's end belongs to the page of its first character, and what stands
        between two pages to the first of them.
        """
        document_idx = bisect_right(self.document_spans, token_idx, key=lambda span: span[0]) - 1
        if document_idx < 0 or token_idx >= self.document_spans[document_idx][1]:
            return None
        own = self.documents[document_idx]
        row = token_idx - self.document_spans[document_idx][0]
        char_start = int(own.char_starts[row])
        page_idx = int(np.searchsorted(own.page_char_starts, char_start, side="right")) - 1
        return TokenLocation(document_idx, page_idx, char_start, int(own.char_ends[row]))


def tokenize_document(tokenizer: Tokenizer, document: Document) -> TokenizedDocument:
    """Tokens of all pages in one text; special-token strings in it are plain text."""
    ids, starts, ends = tokenizer.encode_with_offsets(document_text(document))
    return TokenizedDocument(document, ids, starts, ends, _page_char_starts(document))


def build_prompt(
    tokenizer: Tokenizer, chat: ChatFormat, documents: Sequence[TokenizedDocument]
) -> DocumentPrompt:
    """Head, then a numbered heading and the tokens of each document.

    Each part is tokenised by itself, so the prompt of some documents begins with the very ids of
    the prompt of the first few of them.
    """
    parts: list[Sequence[int] | np.ndarray] = [tokenizer.encode_template(chat.head)]
    length = len(parts[0])
    spans: list[tuple[int, int]] = []
    for number, own in enumerate(documents, 1):
        heading = tokenizer.encode(f"{'' if number == 1 else PAGE_SEPARATOR}Document {number}\n\n")
        start = length + len(heading)
        length = start + len(own.token_ids)
        parts += (heading, own.token_ids)
        spans.append((start, length))
    token_ids = np.concatenate([np.asarray(part, np.int32) for part in parts])
    head_len = spans[0][0] if spans else length
    return DocumentPrompt(token_ids, tuple(documents), head_len, tuple(spans))


def question_ids(
    tokenizer: Tokenizer, chat: ChatFormat, question: str, names: Sequence[str], first: bool
) -> list[int]:
    """What is read after the documents (`first`) or after an answer, up to the answer to come.

    names: the documents' file names in their order, told to the model with the first question where
    there are several. A later question brings the end token of the answer before it, which the KV
    lacks. Special-token strings in names and question are plain text.
    """
    to_answer = tokenizer.encode_template(chat.user_to_assistant)
    if not first:
        to_user = tokenizer.encode_template(chat.assistant_to_user)
        return to_user + tokenizer.encode(question) + to_answer
    listed = ""
    if len(names) > 1:
        numbered = (f"Document {number}: {name}" for number, name in enumerate(names, 1))
        listed = ", ".join(numbered) + "\n"
    # No instruction here: six wordings gave 18 to 25 right answers of 31, none gave 26 (1.5B).
    return tokenizer.encode(f"\n\n{listed}Question: {question}") + to_answer


def _page_char_starts(document: Document) -> np.ndarray:
    lens = [len(page.text) + len(PAGE_SEPARATOR) for page in document.pages]
    return np.cumsum([0, *lens], dtype=np.int32)[:-1]
