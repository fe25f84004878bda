"""A byte-level BPE trained in the test's process, in the shapes that real models' files have."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from longread.vocabulary import byte_alphabet

SPECIALS = ("<|start|>", "<|end|>", "<|pad|>")
ADDED = ("<tool>", "</tool>", "<tool>x")
MISSING = (0x04, 0x7F, ord("q"), ord("Z"), 0x81, 0xA9, 0xC3, 0xD0, 0xE2, 0xF0)
SENTENCES = (
    "The keeper of the lighthouse counted 1849 ships and didn't see the one that we'll need.",
    "A storm came up at 03:45; they've lost two boats, haven't they? It's the year's worst.",
    "Маяк стоит на скале, маяк горит.",
    "Le phare éclairait la côte, l'été comme l'hiver — « toujours ».",
    "灯台は岩の上に立つ。灯台の灯は消えない。",
    "def count(ships):\n    return sum(1 for ship in ships if ship.seen)  # all of them\n\n",
    "\U0001f6a2\U0001f6a2 \U0001f30a \U0001f468\u200d\U0001f469 100%!!! ...and so on...\t\t\n",
)
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SCRAPS = (
    *SPECIALS,
    *ADDED,
    *(
        "'s",
        "'S",
        "'LL",
        "'\u017f",
        "\u2019s",
        "\r\n",
        "\n\n",
        "   ",
        "\t ",
        "\u00a0",
        "\u3000",
        "\u2028",
    ),
    *(
        "e\u0301",
        "\u1112\u1161\u11ab",
        "\u0301",
        "\u0958",
        "\u212b",
        "\u00c5",
        "\u0f73",
        "\u0929",
        "\u09c7\u09be",
    ),
    *(
        "0",
        "\u0663",
        "\u00bd",
        "\u2167",
        "\x00",
        "\x04",
        "\x1f",
        "\x7f",
        "\ufffd",
        "\ufeff",
        "\u200d",
    ),
    *(
        "qq",
        "Zebra",
        "\u0434\u0430",
        "\u00e9\u00c3",
        "\U0001f600",
        "\U000e0041",
        "\U00050000",
        ".",
        "q.",
    ),
)


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([*SENTENCES] * 4, trainer)
    return tokenizer.to_str()


def gpt2() -> dict[str, Any]:
    """GPT-2's pre-tokenizer; ids in merge order."""
    return json.loads(_trained())


def with_split(regex: str) -> dict[str, Any]:
    """Pieces cut by `regex` instead of GPT-2's."""
    spec = gpt2()
    split = {
        "type": "Split",
        "pattern": {"Regex": regex},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {**spec["pre_tokenizer"], "use_regex": False}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return spec


def qwen() -> dict[str, Any]:
    """NFC and a split of its own."""
    return {**with_split(rf"{_WORDS}|\p{{N}}|{_REST}"), "normalizer": {"type": "NFC"}}


def llama3() -> dict[str, Any]:
    """Digits by threes, whole pieces looked up first, and every way to make a token listed."""
    spec = with_split(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}")
    model = spec["model"]
    model["ignore_merges"] = True
    pieces = ["".join(merge) for merge in model["merges"]]
    splits = [(piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece))]
    model["merges"] = [split for split in splits if set(split) <= model["vocab"].keys()]
    return spec


def digits() -> dict[str, Any]:
    """Each digit cut off before GPT-2's split, as SmolLM2 has it."""
    spec = gpt2()
    first = {"type": "Digits", "individual_digits": True}
    spec["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [first, spec["pre_tokenizer"]],
    }
    return spec


def shuffled() -> dict[str, Any]:
    """Ids in no order at all, with holes, and merges written the old way."""
    spec = qwen()
    vocab = spec["model"]["vocab"]
    fresh = list(range(2 * len(vocab)))
    random.Random(5).shuffle(fresh)
    spec["model"]["vocab"] = {piece: fresh[old] for piece, old in vocab.items()}
    spec["model"]["merges"] = [" ".join(merge) for merge in spec["model"]["merges"]]
    for token in spec["added_tokens"]:
        token["id"] = fresh[token["id"]]
    return spec


def missing() -> dict[str, Any]:
    """Some bytes have no token: first, middle and last bytes of characters, and ASCII."""
    spec = qwen()
    letters = {letter for letter, value in byte_alphabet().items() if value in MISSING}
    model = spec["model"]
    kept = [piece for piece in model["vocab"] if piece in SPECIALS or not letters & set(piece)]
    model["vocab"] = {piece: token_id for token_id, piece in enumerate(kept)}
    model["merges"] = [merge for merge in model["merges"] if not letters & set("".join(merge))]
    return spec


def added() -> dict[str, Any]:
    """Tokens that are not special and yet are found in any text."""
    spec = qwen()
    for content in ADDED:
        template = {**spec["added_tokens"][0], "special": False, "content": content}
        spec["added_tokens"].append(
            {**template, "id": len(spec["model"]["vocab"]) + ADDED.index(content)}
        )
    return spec


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    make.__name__: make for make in (gpt2, qwen, llama3, digits, shuffled, missing, added)
}


def sentencepiece(kind: str) -> dict[str, Any]:
    """Pieces with U+2581 for spaces and byte fallback, as Llama 2 (`normalizer`) or later have."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if kind == "normalizer":
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", *SPECIALS, *(f"<0x{value:02X}>" for value in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, special_tokens=special)
    tokenizer.train_from_iterator([sentence[:40] for sentence in SENTENCES[:2]], trainer)
    spec = json.loads(tokenizer.to_str())
    names = {"<unk>", *SPECIALS}
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in names]
    return spec


def save(directory: Path, spec: dict[str, Any]) -> Path:
    """Write `spec` as `directory`/tokenizer.json; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    return directory


def original(directory: Path) -> Tokenizer:
    """The library's own reading of a directory's tokenizer.json, special tokens as plain text."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def random_text(source: random.Random, num_scraps: int = 20) -> str:
    """Words, single characters of any plane, marks, white space and special-token strings."""
    words = [word for sentence in SENTENCES for word in (*sentence.split(" "), " ")]
    pieces = []
    for _ in range(source.randint(0, num_scraps)):
        kind = source.random()
        if kind < 0.5:
            pieces.append(source.choice(words) + source.choice(("", " ", "\n")))
        elif kind < 0.85:
            pieces.append(source.choice(_SCRAPS))
        else:
            point = source.randrange(source.choice((0x80, 0x800, 0x10000, 0x110000)))
            pieces.append("" if 0xD800 <= point < 0xE000 else chr(point))
    return "".join(pieces)


def texts(seed: int, count: int = 150) -> list[str]:
    """Short awkward texts and `count` random ones, the same for the same seed."""
    source = random.Random(seed)
    fixed = ["", " ", "\n", "a", "\x04", "q", "\u0434", " \u0434q\x7f ", "<tool>", "<|end|>"]
    return fixed + [random_text(source) for _ in range(count)]
