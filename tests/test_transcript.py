"""Exported sessions, and the files that they and reports are written to."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path

import pytest
from fake_session import make_answer

from longread import transcript
from longread.config import Settings
from longread.errors import UsageError
from longread.history import SavedSession, Turn, answer_settings
from longread.output_file import check_output, output_path, write_output
from longread.plain_text import NO_SUPPORT

MARK = b"<!-- ours -->"


def make_session() -> SavedSession:
    answer = make_answer("A date: \x1b[31m“May 7”\ud800", "interrupted")
    settings = answer_settings(Settings(temperature=0.5, seed=3))
    return SavedSession(
        name="book",
        created="2026-01-01T00:00:00+00:00",
        model="fake-model",
        sources=("/docs/book.txt", "-"),
        sha256s=("a" * 64, "b" * 64),
        pages="3,10-40",
        turns=(
            Turn("When?\nReally?", answer, settings),
            Turn("Why?", make_answer("Because.")),
        ),
    )


def test_markdown_has_questions_answers_sources_and_settings() -> None:
    text = transcript.export(make_session(), "md")
    assert "## When? Really?" in text
    assert "1. book.txt, p. 12 (label xii): “a quote [p. 3] with brackets”" in text
    assert "(interrupted)" in text
    assert "- book.txt (/docs/book.txt), SHA-256 aaaa" in text
    assert "Pages: 3,10-40" in text
    assert "policy tokenselect; vote group; index int8; budget 20 tokens per KV head;" in text
    assert "temperature 0.5" in text
    assert "seed 3" in text
    assert "25.0% of the cached rows read; 110 tokens read, 5 said" in text


def test_markdown_holds_no_control_characters() -> None:
    text = transcript.export(make_session(), "md")
    assert "\x1b" not in text
    text.encode("utf-8")


def test_json_holds_the_whole_session() -> None:
    text = transcript.export(make_session(), "json")
    record = json.loads(text)
    assert record["version"] == 1
    assert record["turns"][0]["settings"]["seed"] == 3
    assert record["turns"][1]["answer"]["text"] == "Because."
    assert record["turns"][1]["answer"]["citations"][0]["page"] == 12
    assert "\x1b" not in text


def test_an_answer_without_support_is_marked_in_both() -> None:
    session = make_session()
    assert NO_SUPPORT not in transcript.export(session, "md")
    doubtful = dataclasses.replace(session.turns[0].answer, supported=False)
    turns = (dataclasses.replace(session.turns[0], answer=doubtful), session.turns[1])
    session = dataclasses.replace(session, turns=turns)
    assert transcript.export(session, "md").count(f"*({NO_SUPPORT})*") == 1
    record = json.loads(transcript.export(session, "json"))
    assert [turn["answer"]["supported"] for turn in record["turns"]] == [False, True]


def test_other_formats_are_refused() -> None:
    with pytest.raises(UsageError, match="md or json"):
        transcript.export(make_session(), "docx")


def test_the_format_is_that_of_the_ending_or_as_asked(tmp_path: Path) -> None:
    session = make_session()
    assert json.loads(transcript.write_export(session, f"{tmp_path}/a.JSON").read_text())
    assert transcript.write_export(session, f"{tmp_path}/a.txt").read_text().startswith("# book")
    path = transcript.write_export(session, f"{tmp_path}/b.json", "md")
    assert path.read_text().startswith("# book")


def test_an_export_is_whole_or_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = transcript.write_export(make_session(), f"{tmp_path}/a.md")
    old = path.read_bytes()

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    shorter = dataclasses.replace(make_session(), turns=())
    with pytest.raises(UsageError, match="No space left on device; name another file"):
        transcript.write_export(shorter, f"{tmp_path}/a.md")
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["a.md"]


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_output(tmp_path / "link", b"data")
    assert (tmp_path / "there").read_bytes() == b"data"
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) & 0o600 == 0o600


def test_a_device_stays_one() -> None:
    write_output(Path("/dev/null"), b"data")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_documents_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "book.txt")
    with pytest.raises(UsageError, match="document of the conversation"):
        output_path(str(tmp_path / "link"), [str(tmp_path / "book.txt")])


def test_only_files_of_ours_are_written_over(tmp_path: Path) -> None:
    check_output(tmp_path / "new", MARK)
    (tmp_path / "empty").touch()
    check_output(tmp_path / "empty", MARK)
    (tmp_path / "old").write_bytes(b"<!doctype html>" + MARK)
    check_output(tmp_path / "old", MARK)
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="not as longread writes it"):
        check_output(tmp_path / "mine", MARK)
    with pytest.raises(UsageError, match="it is a folder"):
        check_output(tmp_path, MARK)
    with pytest.raises(UsageError, match="there is no folder"):
        check_output(tmp_path / "no" / "x", MARK)
    with pytest.raises(UsageError, match="there is no folder"):
        check_output(tmp_path / "mine" / "x", MARK)


def test_an_export_takes_no_file_of_another_kind(tmp_path: Path) -> None:
    mine = tmp_path / "mine.md"
    mine.write_text("precious")
    with pytest.raises(UsageError, match="not as longread writes it"):
        transcript.write_export(make_session(), str(mine))
    assert mine.read_text() == "precious"
    ours = tmp_path / "ours"
    for format_name in ("md", "json", "md"):  # our own are written over
        transcript.write_export(make_session(), str(ours), format_name)
    assert ours.read_text().startswith("# ")
