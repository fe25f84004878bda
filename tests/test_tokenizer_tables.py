"""The check that tiktoken reads as the model's own tokenizer, its verdict, and the file of both."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import small_bpe

from longread import tiktoken_bpe, tokenizer_files, tokenizer_tables
from longread.errors import ModelError
from longread.tokenizer import Tokenizer


def test_a_wrong_pattern_is_found_and_the_original_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = small_bpe.save(tmp_path, small_bpe.gpt2())
    monkeypatch.setattr(tiktoken_bpe, "_GPT2", r"\p{L}+|\s+|[^\p{L}\s]+")
    for _ in range(2):  # the second time from the cached verdict
        tokenizer = Tokenizer.load(directory)
        assert not tokenizer.is_fast and "differently" in tokenizer.fallback_reason
        monkeypatch.setattr(tokenizer_tables, "find_difference", None)
    original = small_bpe.original(directory)
    for text in small_bpe.texts(6, 20):
        assert tokenizer.encode(text) == original.encode(text, add_special_tokens=False).ids


def test_a_pattern_that_tiktoken_refuses_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiktoken_bpe, "_GPT2", r"\p{L}+|(")
    assert not Tokenizer.load(small_bpe.save(tmp_path, small_bpe.gpt2())).is_fast


@pytest.mark.parametrize("name", list(tokenizer_files._SPLITS))
def test_the_splits_of_converted_models_are_known(tmp_path: Path, name: str) -> None:
    spec = small_bpe.with_split(tokenizer_files._SPLITS[name])
    directory = small_bpe.save(tmp_path, spec)
    tokenizer, original = Tokenizer.load(directory), small_bpe.original(directory)
    assert tokenizer.is_fast, tokenizer.fallback_reason
    for text in small_bpe.texts(14):
        assert tokenizer.encode(text) == original.encode(text, add_special_tokens=False).ids


def test_what_tiktoken_cannot_express_is_left_to_the_original(tmp_path: Path) -> None:
    unknown_split = small_bpe.qwen()
    unknown_split["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{L}+|\P{L}+"
    prefix_space = small_bpe.gpt2()
    prefix_space["pre_tokenizer"]["add_prefix_space"] = True
    own_word = small_bpe.added()
    own_word["added_tokens"][-1]["single_word"] = True
    normalizer = {**small_bpe.gpt2(), "normalizer": {"type": "Lowercase"}}
    outside_merges = small_bpe.llama3()
    outside_merges["model"]["vocab"]["zzz"] = len(outside_merges["model"]["vocab"])
    priorities = small_bpe.gpt2()
    priorities["model"]["merges"].append(["s", "ee"])
    priorities["model"]["merges"].insert(0, ["se", "e"])
    priorities["model"]["vocab"].update({"ee": 900, "se": 901, "see": 902})
    specs = [unknown_split, prefix_space, own_word, normalizer, outside_merges, priorities]
    for number, spec in enumerate(specs):
        directory = small_bpe.save(tmp_path / str(number), spec)
        tokenizer, original = Tokenizer.load(directory), small_bpe.original(directory)
        assert not tokenizer.is_fast and tokenizer.fallback_reason
        for text in small_bpe.texts(7, 20):
            ids, starts, ends = tokenizer.encode_with_offsets(text)
            assert ids.tolist() == original.encode(text, add_special_tokens=False).ids
            assert (np.diff(starts) >= 0).all() and (np.diff(ends) >= 0).all()
            assert (starts < ends).all() and (ends <= len(text)).all()


def test_the_check_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = small_bpe.save(tmp_path, small_bpe.added())
    first = Tokenizer.load(directory)
    files = {path.name for path in directory.iterdir()}
    assert files == {"tokenizer.json", "tokenizer_tables.bin"}
    checks = []
    monkeypatch.setattr(tokenizer_tables, "find_difference", lambda *args: checks.append(args))
    second = Tokenizer.load(directory)
    assert not checks and second.is_fast and second.identity == first.identity
    for text in small_bpe.texts(8, 20):
        assert first.encode(text) == second.encode(text)

    cached = directory / "tokenizer_tables.bin"
    whole = cached.read_bytes()
    for damaged in (b"", whole[:1000], _flipped(whole)):
        cached.write_bytes(damaged)
        assert Tokenizer.load(directory).encode("the keeper") == first.encode("the keeper")
        assert len(checks) == 1 and cached.read_bytes() != damaged
        checks.clear()

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_tables, "_library_versions", lambda: ["99", "99"])
        Tokenizer.load(directory)
    assert len(checks) == 1
    checks.clear()
    Tokenizer.load(directory)
    assert len(checks) == 1
    checks.clear()

    small_bpe.save(directory, small_bpe.shuffled())
    other = Tokenizer.load(directory)
    assert len(checks) == 1 and other.identity != first.identity
    assert other.encode("the keeper") != first.encode("the keeper")


def _flipped(data: bytes) -> bytes:
    """`data` with one bit turned in the middle of the longest array."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def test_a_directory_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tokenizer_tables.tempfile, "mkstemp", refuse)
    assert Tokenizer.load(small_bpe.save(tmp_path, small_bpe.gpt2())).is_fast
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_errors_name_the_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: No such file.*longread models"):
        Tokenizer.load(tmp_path)
    word_piece = {**small_bpe.gpt2(), "model": {"type": "WordPiece", "vocab": {}}}
    bare = {**small_bpe.gpt2(), "pre_tokenizer": None, "decoder": None}
    cases = [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"model": {}}', "is not supported"),
        (json.dumps(word_piece), "it is a WordPiece model"),
        (json.dumps(bare), "neither byte-level nor SentencePiece"),
    ]
    for content, message in cases:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError, match=message) as caught:
            Tokenizer.load(tmp_path)
        assert "\n" not in str(caught.value)
