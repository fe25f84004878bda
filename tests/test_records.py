"""Document records: JSON with arrays, checksummed, absent when damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kv_rows import Notices, make_store

from longread.records import decode, encode

RECORD = {
    "pages": [{"page_idx": 0, "label": "iv", "text": "naïve \u2028 text"}, {"text": ""}],
    "kind": "pdf",
    "nothing": None,
    "spans": {"starts": np.arange(7, dtype=np.int32), "empty": np.zeros((0, 3), dtype=np.float32)},
    "ids": np.array([5, 1, 2**31 - 1], dtype=np.int32),
}


def assert_same(record: dict | None) -> None:
    assert record is not None
    assert record["pages"] == RECORD["pages"]
    assert (record["kind"], record["nothing"]) == ("pdf", None)
    np.testing.assert_array_equal(record["ids"], RECORD["ids"], strict=True)
    for name, array in RECORD["spans"].items():
        np.testing.assert_array_equal(record["spans"][name], array, strict=True)


def test_a_record_comes_back(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert store.load_record("ab" * 32) is None
    store.save_record("ab" * 32, RECORD)
    assert_same(store.load_record("ab" * 32))
    store.save_record("ab" * 32, {"text": "replaced"})
    assert store.load_record("ab" * 32) == {"text": "replaced"}
    assert (store.root / "documents" / ("ab" * 32)).stat().st_mode & 0o777 == 0o600


def test_every_flipped_byte_is_noticed() -> None:
    raw = encode({"text": "short", "ids": np.arange(3)})
    for position in range(len(raw)):
        altered = bytearray(raw)
        altered[position] ^= 32
        with pytest.raises(Exception, match="checksum"):
            decode(bytes(altered))
    for length in range(len(raw)):
        with pytest.raises(Exception, match="checksum"):
            decode(raw[:length])


def test_a_damaged_record_is_absent_and_removed(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save_record("abcd", RECORD)
    path = store.root / "documents" / "abcd"
    path.write_bytes(path.read_bytes()[:-1])
    notices = Notices()
    assert store.load_record("abcd", notice=notices) is None
    assert len(notices) == 1 and "abcd" in notices[0]
    assert not path.exists()
    store.save_record("abcd", RECORD)
    assert_same(store.load_record("abcd"))


def test_a_record_of_another_version_is_absent_and_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save_record("abcd", RECORD)
    path = store.root / "documents" / "abcd"
    path.write_bytes(path.read_bytes().replace(b"record 1\n", b"record 2\n"))
    notices = Notices()
    assert store.load_record("abcd", notice=notices) is None
    assert path.exists() and notices == []
    store.save_record("abcd", RECORD)
    assert_same(store.load_record("abcd"))


def test_a_left_over_temporary_file_is_swept(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save_record("abcd", RECORD)
    (store.root / "documents" / ".tmp-0000").write_bytes(b"half")
    store.save_record("abce", RECORD)
    names = sorted(path.name for path in (store.root / "documents").iterdir())
    assert names == ["abcd", "abce"]
