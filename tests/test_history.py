"""Saved sessions: what is written comes back, damage is an error that says what to do."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import time
from pathlib import Path

import pytest
from fake_session import make_answer

from longread import history
from longread.config import Settings
from longread.errors import StoreError, UsageError
from longread.history import SavedSession, Turn


def make_session(name: str = "book") -> SavedSession:
    answer = make_answer("A date: \x1b[31m“May 7”\ud800", "interrupted")
    return SavedSession(
        name=name,
        created="2026-01-01T00:00:00+00:00",
        model="fake-model",
        sources=("/docs/book.txt", "-"),
        sha256s=("a" * 64, "b" * 64),
        pages="3,10-40",
        turns=(Turn("When?\nReally?", answer), Turn("Why?", make_answer("Because."))),
    )


def test_round_trip(tmp_path: Path) -> None:
    saved = make_session()
    path = history.save(tmp_path / "deep" / "sessions", saved)
    assert history.load(path.parent, "book") == saved
    assert history.list_names(path.parent) == ["book"]
    assert history.exists(path.parent, "book")
    assert os.listdir(path.parent) == ["book.json"]


def test_settings_of_a_turn_come_back_and_may_lack(tmp_path: Path) -> None:
    turn = Turn("When?", make_answer("Then."), history.answer_settings(Settings(seed=7)))
    assert turn.settings["seed"] == 7
    saved = dataclasses.replace(make_session(), turns=(turn,))
    path = history.save(tmp_path, saved)
    assert history.load(tmp_path, "book") == saved
    record = json.loads(path.read_text())
    del record["turns"][0]["settings"], record["checksum"]
    path.write_text(json.dumps(record))
    assert history.load(tmp_path, "book").turns[0].settings == {}


def test_sessions_of_before_support_was_told_are_read(tmp_path: Path) -> None:
    selection = make_answer("x").selection
    passage = dataclasses.replace(selection.passages[0], marks=((0, 3), (4, 11)))
    selection = dataclasses.replace(selection, passages=(passage,), heads=((0.5, 0.25),))
    answer = dataclasses.replace(make_answer("x"), selection=selection, supported=False)
    saved = dataclasses.replace(make_session(), turns=(Turn("When?", answer),))
    path = history.save(tmp_path, saved)
    assert history.load(tmp_path, "book") == saved
    record = json.loads(path.read_text())
    old = record["turns"][0]["answer"]
    del (
        record["checksum"],
        old["supported"],
        old["selection"]["heads"],
        old["selection"]["passages"][0]["marks"],
    )
    path.write_text(json.dumps(record))
    loaded = history.load(tmp_path, "book").turns[0].answer
    assert loaded.supported
    assert loaded.selection.heads == loaded.selection.passages[0].marks == ()


def test_private(tmp_path: Path) -> None:
    directory = tmp_path / "sessions"
    directory.mkdir(mode=0o755)
    path = history.save(directory, make_session())
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_of_others_is_not_shut(tmp_path: Path) -> None:
    (tmp_path / "something else").touch()
    tmp_path.chmod(0o777)
    path = history.save(tmp_path, make_session())
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o777
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_is_closed_but_never_opened(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    if os.getuid() == 0:  # who may write all the same
        history.save(tmp_path, make_session())
    else:
        with pytest.raises(StoreError, match="Permission denied"):
            history.check_writable(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o500
    tmp_path.chmod(0o700)


def test_saving_again_replaces(tmp_path: Path) -> None:
    history.save(tmp_path, make_session())
    shorter = dataclasses.replace(make_session(), turns=())
    history.save(tmp_path, shorter)
    assert history.load(tmp_path, "book") == shorter


def test_a_copy_under_another_name_does_not_replace_what_it_was_made_from(tmp_path: Path) -> None:
    path = history.save(tmp_path, make_session())
    (tmp_path / "copy.json").write_bytes(path.read_bytes())
    copy = history.load(tmp_path, "copy")
    history.save(tmp_path, dataclasses.replace(copy, turns=()))
    assert history.load(tmp_path, "book") == make_session()
    assert history.load(tmp_path, "copy").turns == ()


def test_altered_words_are_damage(tmp_path: Path) -> None:
    path = history.save(tmp_path, make_session())
    path.write_text(path.read_text().replace("May 7", "May 9"))
    with pytest.raises(StoreError, match="damaged.*sessions rm book"):
        history.load(tmp_path, "book")


def test_what_killed_processes_left_goes_and_what_others_write_now_stays(tmp_path: Path) -> None:
    history.save(tmp_path, make_session())
    for name, age_s in (("old", 7200), ("now", 0), ("after the clock was wrong", -7200)):
        left = tmp_path / f".saving-{name}"
        left.write_text("what was said")
        os.utime(left, (time.time() - age_s, time.time() - age_s))
    history.save(tmp_path, make_session())
    assert sorted(os.listdir(tmp_path)) == [".saving-now", "book.json"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "ä", "a\n", "x" * 101])
def test_names_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="name"):
        history.save(tmp_path, make_session(name))
    with pytest.raises(UsageError, match="name"):
        history.load(tmp_path, name)


def test_missing_session_names_those_there_are(tmp_path: Path) -> None:
    history.save(tmp_path, make_session("here"))
    with pytest.raises(UsageError, match="here"):
        history.load(tmp_path, "gone")
    with pytest.raises(UsageError, match="gone"):
        history.remove(tmp_path, "gone")
    history.remove(tmp_path, "here")
    assert history.list_names(tmp_path) == []
    assert history.list_names(tmp_path / "no such folder") == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: '{"version": 1}',
        lambda text: "[" * 100_000,
        lambda text: text.replace('"citations"', '"quotations"'),
        lambda text: text.replace('"turns": [', '"turns": [7, '),
        lambda text: text.replace('"sources": [', '"sources": ["more", '),
    ],
)
def test_damage_is_one_line_with_a_remedy(tmp_path: Path, damage: object) -> None:
    path = history.save(tmp_path, make_session())
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with pytest.raises(StoreError, match="sessions rm book"):
        history.load(tmp_path, "book")


def test_a_newer_format_asks_for_an_update(tmp_path: Path) -> None:
    path = history.save(tmp_path, make_session())
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(StoreError, match="update longread"):
        history.load(tmp_path, "book")


def test_a_full_or_closed_disk_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot save"):
        history.save(tmp_path / "file", make_session())
