"""A conversation for reading elsewhere: Markdown for people, JSON for programs.

Owns the look of an exported session. What a session holds and how it is kept is history.py's.
"""

from __future__ import annotations

from pathlib import Path

from longread.errors import UsageError
from longread.events import Answer
from longread.history import SavedSession, Turn, session_record
from longread.output_file import check_output, output_path, write_output
from longread.plain_text import NO_SUPPORT, clean, count_text, json_text, place_text

FORMATS = ("md", "json")
_MARKS = (b"\nDocuments:\n\n", b'"sha256s": ')  # tell our files from others


def export(session: SavedSession, format_name: str) -> str:
    """Return the session as `md` or `json`; UsageError for another format."""
    if format_name not in FORMATS:
        raise UsageError(f"there is no format {format_name!r}; choose md or json")
    return export_json(session) if format_name == "json" else export_markdown(session)


def export_json(session: SavedSession) -> str:
    """Return the session as one JSON document; unsafe characters are escaped."""
    return json_text(session_record(session), indent=2) + "\n"


def export_markdown(session: SavedSession) -> str:
    """Return the conversation as Markdown: questions as headings, sources under each answer."""
    lines = [f"# {session.name}", "", f"Model: {session.model}  ", f"Begun: {session.created}"]
    if session.pages is not None:
        lines[-1] += "  "
        lines.append(f"Pages: {session.pages}")
    lines += ["", "Documents:", ""]
    for source, sha256 in zip(session.sources, session.sha256s, strict=True):
        lines.append(f"- {Path(source).name} ({source}), SHA-256 {sha256}")
    for turn in session.turns:
        lines += _turn_lines(turn)
    return clean("\n".join(lines) + "\n")


def write_export(session: SavedSession, file: str, format_name: str | None = None) -> Path:
    """Write a conversation to a file, by default in the format of its ending; return its path.

    Raises UsageError where it cannot be written, is one of the conversation's documents, or is a
    file of another kind.
    """
    path = output_path(file, session.sources)
    check_output(path, *_MARKS)
    if format_name is None:
        format_name = "json" if path.suffix.lower() == ".json" else "md"
    text = export(session, format_name)
    write_output(path, text.encode("utf-8", "replace"))
    return path


def _turn_lines(turn: Turn) -> list[str]:
    answer = turn.answer
    lines = ["", f"## {' '.join(turn.question.split())}", "", answer.text.strip()]
    if answer.finish_reason == "interrupted":
        lines += ["", "*(interrupted)*"]
    if not answer.supported:
        lines += ["", f"*({NO_SUPPORT})*"]
    if answer.citations:
        lines += ["", "Sources:", ""]
    for number, citation in enumerate(answer.citations, 1):
        place = place_text(citation.page, citation.page_label)
        quote = " ".join(citation.quote.split())
        lines.append(f"{number}. {citation.document}, {place}: “{quote}”")
    return [*lines, "", f"*{_settings_line(turn)}*"]


def _settings_line(turn: Turn) -> str:
    """What the answer was made with: of the settings those that change what it says."""
    answer: Answer = turn.answer
    selection, usage = answer.selection, answer.usage
    words = [f"Model {answer.model}", f"policy {selection.policy}"]
    words += [f"vote {selection.vote}"] if selection.vote else []
    words += [f"index {selection.index}"] if selection.index else []
    if selection.budget is not None:
        words.append(f"budget {count_text(selection.budget, 'token')} per KV head")
    words += [f"{name.replace('_', ' ')} {value}" for name, value in turn.settings.items()]
    words.append(f"{selection.fraction_kept:.1%} of the cached rows read")
    read = usage.document_tokens + usage.history_tokens + usage.question_tokens
    words.append(f"{read:,} tokens read, {usage.answer_tokens:,} said")
    words += ["the documents were cut to fit"] if answer.truncated else []
    return "; ".join(words)
