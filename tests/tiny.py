"""Tiny random models of each family, as the Hugging Face folders that a user would have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from longread.events import Event
from longread.policies.predictor import Predictor, Shape
from longread.weights import ModelConfig, prepare

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
WINDOW = 1024


def train_tokenizer(texts: list[str], vocab_size: int = 400) -> Tokenizer:
    """A byte-level BPE with ChatML's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_hf_folder(directory: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """Save a random model of two layers, 6 query heads and 2 KV heads; returns the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    text = Path(__file__).parent.parent.joinpath("sample_docs/us_constitution.txt").read_text()
    tokenizer = train_tokenizer([text])
    values: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": WINDOW,
        "tie_word_embeddings": family == "qwen2",
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if family == "mistral":
        values["sliding_window"] = None
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(values | overrides))
    # A wide spread makes attention peaked, so that selection has something to find.
    config.initializer_range = 0.2
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def convert(folder: Path, models_dir: Path) -> Path:
    """The converted model directory of a Hugging Face folder."""

    def ignore(event: Event) -> None:
        pass

    return prepare(str(folder), models_dir, ignore, ignore)


def predictor(config: ModelConfig) -> Predictor:
    """One that was not trained."""
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        found = Predictor(Shape.of(config), width=8).requires_grad_(False)
        for producer in found.producers:
            producer.outer.weight *= 30.0  # so that rows are told apart
        return found


def use_untrained_predictor(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies find a predictor for this model in place of what the package has."""
    monkeypatch.setattr("longread.policies.butler.load_for", lambda *_: predictor(config))
