"""A chat template cut where user and assistant speak, once, when a model is converted.

Owns the rendering of templates and chat.json. prompt.py puts documents and questions between the
parts. Templates run in jinja2's sandbox, set up the way transformers does it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from longread.errors import ModelError

if TYPE_CHECKING:
    import jinja2

# Tuned by measurement on question sets. It is part of the KV: a change means reading anew.
SYSTEM_PROMPT = (
    "You are a helpful assistant. Answer from the document, in few words, and quote names, numbers "
    "and dates exactly as it gives them."
)

_FILE = "chat.json"
# Some templates print today's date. Theirs must not change with the day, or no document's KV could
# be used again; this is the date that Llama's own templates fall back to.
_DATE = datetime(2024, 7, 26)
_SYSTEM = "%SYSTEM_PROMPT%"  # stands for it in chat.json, which outlives changes of its wording
_QUESTION, _ANSWER, _FOLLOW_UP = "FirstQuestion7Q", "FirstAnswer7A", "SecondQuestion7Q"


class _Unusable(Exception):
    """A template does not put the parts of a conversation where they can be cut apart."""


@dataclass(frozen=True)
class ChatFormat:
    """What stands around the users' words; text in which special tokens are recognised."""

    head: str  # up to the first user's content, BOS included where the model has one
    user_to_assistant: str
    assistant_to_user: str  # begins with the token that ends an answer, which the KV lacks

    @property
    def identity(self) -> str:
        """SHA-256 of the parts, hex."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()

    @classmethod
    def load(cls, model_dir: Path) -> ChatFormat:
        """Read `model_dir`/chat.json. Raises ModelError."""
        path = model_dir / _FILE
        try:
            return cls.from_fields(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{path} is missing or damaged ({error!r}); "
                f"run `longread models rm {model_dir.name}` and try again"
            ) from error

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> ChatFormat:
        """The format that `derive_chat_format` found, with our system prompt in its place."""
        return cls(
            head=fields["head"].replace(_SYSTEM, SYSTEM_PROMPT),
            user_to_assistant=fields["user_to_assistant"],
            assistant_to_user=fields["assistant_to_user"],
        )


def derive_chat_format(
    template: str | None, *, bos_token: str | None, eos_token: str | None
) -> dict[str, str]:
    """What chat.json holds: the fields of a ChatFormat, and `source`: how they were found.

    Our instructions go into the system role, or, where the template refuses or moves that, in front
    of the user's content. A plain format stands in for a template that is absent or unusable.
    """
    if not template:
        return {**_plain(bos_token), "source": "plain: the model has no chat template"}
    try:
        try:
            return {**_cut(template, bos_token, eos_token, system=True), "source": "template"}
        except _Unusable:
            found = _cut(template, bos_token, eos_token, system=False)
            return {**found, "source": "template without its system role"}
    except _Unusable as error:
        return {**_plain(bos_token), "source": f"plain: the chat template failed ({error})"}


def _plain(bos_token: str | None) -> dict[str, str]:
    return {
        "head": f"{bos_token or ''}{_SYSTEM}\n\n",
        "user_to_assistant": "\n\nAnswer:",
        "assistant_to_user": "\n\n",
    }


def _cut(
    template: str, bos_token: str | None, eos_token: str | None, *, system: bool
) -> dict[str, str]:
    """Render a first question, then a whole turn and a second one, and cut them at our words."""
    first = [{"role": "user", "content": _QUESTION}]
    if system:
        first.insert(0, {"role": "system", "content": _SYSTEM})
    turn = [{"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _FOLLOW_UP}]
    tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
    head, user_to_assistant = _between(_render(template, first, tokens), _QUESTION)
    later = _between(_render(template, first + turn, tokens), _QUESTION, _ANSWER, _FOLLOW_UP)
    if later[0] != head:
        raise _Unusable("the text before the first question changes with later turns")
    if system and _SYSTEM not in head:
        raise _Unusable("the system role does not stand first")
    assistant_to_user = later[2]
    # Where a template marks an answer's end at all, it does so with something like <|im_end|>.
    if eos_token and not assistant_to_user.lstrip().startswith((eos_token, "<")):
        assistant_to_user = eos_token + assistant_to_user
    return {
        "head": head if system else f"{head}{_SYSTEM}\n\n",
        "user_to_assistant": user_to_assistant,
        "assistant_to_user": assistant_to_user,
    }


def _between(text: str, *words: str) -> list[str]:
    """`text` cut at `words`, each of which must stand in it once, in this order."""
    found = []
    for word in words:
        before, mark, text = text.partition(word)
        if not mark or word in text:
            raise _Unusable("a turn is missing, repeated or out of order")
        found.append(before)
    return [*found, text]


def _render(template: str, messages: list[dict[str, str]], tokens: dict[str, str]) -> str:
    try:
        return (
            _environment()
            .from_string(template)
            .render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                enable_thinking=False,
                **tokens,
            )
        )
    except Exception as error:  # a template is a program: it can raise anything
        raise _Unusable(" ".join(str(error).split())[:200]) from error


def _environment() -> jinja2.Environment:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the answers for training; here its body simply stands."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def as_json(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = _DATE.strftime
    return environment
