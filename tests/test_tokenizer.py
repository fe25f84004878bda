"""Tokens: equal to the model's own tokenizer, exact in characters, safe with hostile text."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import small_bpe

from longread import tokenizer_tables
from longread.normal_form import nfc_with_spans
from longread.tokenizer import Tokenizer

REPO = Path(__file__).parents[1]
VARIANTS = list(small_bpe.VARIANTS)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: small_bpe.save(root / name, make()) for name, make in small_bpe.VARIANTS.items()}


def slow_twin(directory: Path) -> Tokenizer:
    """The same tokenizer with its ranks taken away, so that `tokenizers` does the work."""
    tables = tokenizer_tables.load_tables(directory)
    tables = tokenizer_tables.Tables(tables.identity, tables.vocabulary, None, "test")
    return Tokenizer(directory / "tokenizer.json", tables)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ids_are_those_of_the_models_tokenizer(directories: dict[str, Path], variant: str) -> None:
    tokenizer = Tokenizer.load(directories[variant])
    original = small_bpe.original(directories[variant])
    assert tokenizer.is_fast, tokenizer.fallback_reason
    for text in small_bpe.texts(1):
        assert tokenizer.encode(text) == original.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_engines_agree_on_ids_and_spans(directories: dict[str, Path], variant: str) -> None:
    fast, slow = Tokenizer.load(directories[variant]), slow_twin(directories[variant])
    for text in small_bpe.texts(2):
        for ours, theirs in zip(
            fast.encode_with_offsets(text), slow.encode_with_offsets(text), strict=True
        ):
            assert ours.dtype == np.int32 and ours.flags.writeable
            assert ours.tolist() == theirs.tolist(), text
        assert fast.encode_template(text) == slow.encode_template(text), text


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_token_maps_to_the_characters_it_touches(
    directories: dict[str, Path], variant: str
) -> None:
    tokenizer = Tokenizer.load(directories[variant])
    lost = set(small_bpe.MISSING) if variant == "missing" else set()
    for text in small_bpe.texts(3):
        text = unicodedata.normalize("NFC", text)
        ids, starts, ends = tokenizer.encode_with_offsets(text)
        assert ids.tolist() == tokenizer.encode(text)
        # One step at a time along the UTF-8 bytes that have a token.
        places = [
            (value, char_idx)
            for char_idx, char in enumerate(text)
            for value in char.encode()
            if value not in lost
        ]
        position = 0
        for token_id, start, end in zip(ids.tolist(), starts.tolist(), ends.tolist(), strict=True):
            data = tokenizer._vocabulary.token_bytes(token_id)
            touched = places[position : position + len(data)]
            assert bytes(value for value, _ in touched) == data
            assert (start, end) == (touched[0][1], touched[-1][1] + 1), text
            position += len(data)
        assert position == len(places)


@pytest.mark.parametrize("variant", ["qwen", "shuffled", "missing"])
def test_spans_lead_back_to_text_that_is_not_normalised(
    directories: dict[str, Path], variant: str
) -> None:
    tokenizer = Tokenizer.load(directories[variant])
    for text in small_bpe.texts(4):
        composed, from_starts, from_ends = nfc_with_spans(text)
        assert composed == unicodedata.normalize("NFC", text)
        ids, starts, ends = tokenizer.encode_with_offsets(text)
        ids_nfc, starts_nfc, ends_nfc = tokenizer.encode_with_offsets(composed)
        assert ids.tolist() == ids_nfc.tolist()
        assert starts.tolist() == [from_starts[start] for start in starts_nfc]
        assert ends.tolist() == [from_ends[end - 1] for end in ends_nfc]
        assert (np.diff(starts) >= 0).all() and (np.diff(ends) >= 0).all()


def test_nfc_maps_groups_to_groups() -> None:
    text = "ae\u0301\u0323 \u1112\u1161\u11ab\u212b\u09c7\u09bez"
    composed, starts, ends = nfc_with_spans(text)
    spans = [
        (char, text[start:end])
        for char, start, end in zip(composed, starts.tolist(), ends.tolist(), strict=True)
    ]
    assert spans == [
        ("a", "a"),
        ("\u1eb9", "e\u0301\u0323"),
        ("\u0301", "e\u0301\u0323"),
        (" ", " "),
        ("\ud55c", "\u1112\u1161\u11ab"),
        ("\u00c5", "\u212b"),
        ("\u09cb", "\u09c7\u09be"),
        ("z", "z"),
    ]
    for text in ("\u0301a", "\u0f73", ""):
        composed, starts, _ = nfc_with_spans(text)
        assert composed == unicodedata.normalize("NFC", text) and len(starts) == len(composed)


def test_spans_survive_characters_without_tokens(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(directories["missing"])
    ids, starts, ends = tokenizer.encode_with_offsets(".\x04\x7f! q the\x04")
    spans = [
        (tokenizer.decode([token_id]), start, end)
        for token_id, start, end in zip(ids.tolist(), starts.tolist(), ends.tolist(), strict=True)
    ]
    assert ("!", 3, 4) in spans
    assert any(text.endswith("e") and end == 10 for text, _, end in spans)
    assert max(ends) == 10
    ids, starts, ends = tokenizer.encode_with_offsets("\x04qZ")
    assert len(ids) == len(starts) == len(ends) == 0


def test_special_tokens_are_plain_text_except_in_templates(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(directories["added"])
    text = "<|start|>user <tool>x</tool><|end|><tool>\n<|start|><|pad|>"
    special = tokenizer._vocabulary.special_ids
    assert len(special) == 3
    assert not special & set(tokenizer.encode(text))
    assert not special & set(tokenizer.encode_with_offsets(text)[0].tolist())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode_template(text)
    assert len([token_id for token_id in ids if token_id in special]) == 4
    assert tokenizer.decode(ids) == "user <tool>x</tool><tool>\n"
    assert tokenizer.decode(ids, specials=True) == text


def test_added_tokens_take_white_space_where_they_say_so(tmp_path: Path) -> None:
    spec = small_bpe.added()
    by_content = {token["content"]: token for token in spec["added_tokens"]}
    by_content["<tool>"]["lstrip"] = True
    by_content["</tool>"]["rstrip"] = True
    by_content["<|end|>"]["rstrip"] = True
    tokenizer, original = (
        Tokenizer.load(small_bpe.save(tmp_path, spec)),
        small_bpe.original(tmp_path),
    )
    assert tokenizer.is_fast, tokenizer.fallback_reason
    for text in ("a <tool> b</tool>  c", "<tool>xy", "a <tool>x y", "<|end|> \n a <tool>"):
        encoding = original.encode(text, add_special_tokens=False)
        ids, starts, ends = tokenizer.encode_with_offsets(text)
        assert ids.tolist() == encoding.ids
        assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == encoding.offsets
        original.encode_special_tokens = False
        with_specials = original.encode(text, add_special_tokens=False).ids
        original.encode_special_tokens = True
        assert tokenizer.encode_template(text) == with_specials


def test_a_million_blanks_do_not_panic(
    directories: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.load(directories["qwen"])
    text = f"the{' ' * 1_000_000}keeper"
    ids, starts, ends = tokenizer.encode_with_offsets(text)
    original = small_bpe.original(directories["qwen"])
    assert ids.tolist() == original.encode(text, add_special_tokens=False).ids
    assert (starts[0], ends[-1]) == (0, len(text))
    assert capfd.readouterr().err == ""


def test_any_panic_falls_back_and_nothing_else_does(directories: dict[str, Path]) -> None:
    class PanicException(BaseException):
        pass

    class Broken:
        def __init__(self, error: type[BaseException]) -> None:
            self.error = error

        def encode_ordinary(self, text: str) -> list[int]:
            raise self.error("broken")

    tokenizer = Tokenizer.load(directories["gpt2"])
    expected = tokenizer.encode("the keeper")
    assert tokenizer._fast is not None
    tokenizer._fast.__dict__["_encoding"] = Broken(PanicException)
    assert tokenizer.encode("the keeper") == expected
    for other in (KeyboardInterrupt, MemoryError):
        tokenizer._fast.__dict__["_encoding"] = Broken(other)
        with pytest.raises(other):
            tokenizer.encode("the keeper")


@pytest.mark.parametrize("variant", ["gpt2", "qwen"])
def test_lone_surrogates_become_replacement_characters(
    directories: dict[str, Path], variant: str
) -> None:
    tokenizer = Tokenizer.load(directories[variant])
    text = "a\ud800b\udfffe\u0301\ud83d\ude00"
    clean = "a\ufffdb\ufffde\u0301\ufffd\ufffd"
    assert tokenizer.encode(text) == tokenizer.encode(clean)
    assert tokenizer.encode_template(text) == tokenizer.encode_template(clean)
    _, starts, ends = tokenizer.encode_with_offsets(text)
    assert starts[0] == 0 and ends[-1] == len(text)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_stream_yields_whole_characters(directories: dict[str, Path], variant: str) -> None:
    tokenizer = Tokenizer.load(directories[variant])
    original = small_bpe.original(directories[variant])
    source = random.Random(9)
    vocabulary = sorted(original.get_vocab().values())
    samples = [tokenizer.encode(text) for text in small_bpe.texts(9, 60)]
    samples += [source.choices(vocabulary, k=source.randint(1, 30)) for _ in range(60)]
    for ids in samples:
        for specials in (False, True):
            decoder = tokenizer.stream_decoder(specials=specials)
            streamed = "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()
            assert streamed == original.decode(ids, skip_special_tokens=not specials)
            assert streamed == tokenizer.decode(ids, specials=specials)
    for token_id in (-1, 10**6):  # a model's embedding may have more rows than the vocabulary
        assert tokenizer.decode([token_id]) == ""


def test_an_unfinished_character_is_held_back(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(directories["gpt2"])
    ids = tokenizer.encode("\u0d05")  # three bytes that nothing merges
    assert len(ids) == 3
    decoder = tokenizer.stream_decoder()
    assert [decoder.push(token_id) for token_id in ids] == ["", "", "\u0d05"]
    assert decoder.flush() == ""
    assert [decoder.push(token_id) for token_id in ids[:2]] == ["", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.push(tokenizer.encode("a")[0]) == "a"
    assert decoder.push(ids[0]) == ""
    assert decoder.push(tokenizer.encode("a")[0]) == "\ufffda"


@pytest.mark.parametrize("kind", ["normalizer", "metaspace"])
def test_sentencepiece_models_read_through_tokenizers(tmp_path: Path, kind: str) -> None:
    directory = small_bpe.save(tmp_path, small_bpe.sentencepiece(kind))
    original = small_bpe.original(directory)
    tokenizer = Tokenizer.load(directory)
    assert not tokenizer.is_fast and tokenizer.fallback_reason == "not a byte-level BPE"
    for text in small_bpe.texts(10, 60):
        ids, starts, ends = tokenizer.encode_with_offsets(text)
        assert ids.tolist() == original.encode(text, add_special_tokens=False).ids
        assert not tokenizer._vocabulary.special_ids & set(ids.tolist())
        assert (np.diff(starts) >= 0).all() and (np.diff(ends) >= 0).all()
        touched = np.zeros(len(text), bool)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            touched[start:end] = True
        assert touched.all()
        assert tokenizer.decode(ids.tolist()) == original.decode(ids.tolist())
    template = "<|start|>the keeper<|end|>"
    original.encode_special_tokens = False
    ids_of_template = original.encode(template, add_special_tokens=False).ids
    assert tokenizer.encode_template(template) == ids_of_template
    assert tokenizer.encode(template) != ids_of_template


@pytest.mark.weights
def test_a_real_model_reads_a_real_document(smollm2_dir: Path) -> None:
    tokenizer, original = Tokenizer.load(smollm2_dir), small_bpe.original(smollm2_dir)
    assert tokenizer.is_fast, tokenizer.fallback_reason
    text = (REPO / "sample_docs" / "northanger_abbey.txt").read_text(encoding="utf-8")
    text = unicodedata.normalize("NFKC", text)
    ids, starts, ends = tokenizer.encode_with_offsets(text)
    encoding = original.encode(text, add_special_tokens=False)
    assert ids.tolist() == encoding.ids
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == encoding.offsets
    assert tokenizer.decode(ids.tolist()) == text
    assert len(tokenizer.encode_template("<|im_start|>user\n")) == 3
    assert tokenizer.encode("\x04") == []  # one of its 21 bytes without a token
