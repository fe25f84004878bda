"""Hugging Face folders: every family, every RoPE, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import assert_same, fused, run, stored
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, WINDOW, save_hf_folder
from torch import Tensor

from longread.errors import ModelError
from longread.weights import load_config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for family in FAMILIES:
        save_hf_folder(root / family, family)
    return root


@pytest.fixture
def llama(folders: Path, tmp_path: Path) -> Path:
    """A llama folder to change at will."""
    return Path(shutil.copytree(folders / "llama", tmp_path / "llama"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def hf_parts(folder: Path) -> dict[str, Tensor]:
    names = {
        "self_attn.": "",
        "mlp.": "",
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "post_norm",
        "_proj.bias": "_bias",
        "_proj": "",
        ".weight": "",
        "model.": "",
    }
    parts = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old, new in names.items():
            name = name.replace(old, new)
        parts[name] = tensor
    return parts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_each_family(folders: Path, tmp_path: Path, family: str) -> None:
    path = run(folders / family, tmp_path)
    config = load_config(path)
    assert (config.family, config.name, config.torch_dtype) == (family, family, "float32")
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 2, 16)
    assert (config.window, config.qk_norm) == (WINDOW, family == "qwen3")
    assert config.tie_word_embeddings == (family == "qwen2")
    assert config.bos_token_id == 0
    assert {0, 2} <= set(config.eos_token_ids)  # <|endoftext|> and <|im_end|>
    parts = hf_parts(folders / family)
    if config.tie_word_embeddings:
        parts.pop("lm_head", None)
    found = stored(path)
    assert_same(found, fused(parts, config.num_hidden_layers))
    assert ("layers.0.qkv_bias" in found) == (family == "qwen2")
    assert (path / "tokenizer.json").read_bytes() == (
        folders / family / "tokenizer.json"
    ).read_bytes()
    chat = json.loads((path / "chat.json").read_text())
    assert chat["user_to_assistant"] == "<|im_end|>\n<|im_start|>assistant\n"


def test_attention_bias(tmp_path: Path) -> None:
    folder = save_hf_folder(tmp_path / "biased", "llama", attention_bias=True)
    found = stored(run(folder, tmp_path))
    assert found["layers.1.qkv_bias"].shape == (160,)
    assert_same(found, fused(hf_parts(folder), 2))


def test_shards_and_half_precision(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    index: dict[str, str] = {}
    for shard in range(2):
        name = f"model-0000{shard + 1}-of-00002.safetensors"
        names = sorted(halves)[shard::2]
        save_file({key: halves[key] for key in names}, llama / name)
        index |= dict.fromkeys(names, name)
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    path = run(llama, tmp_path)
    assert load_config(path).torch_dtype == "bfloat16"
    expected = halves["model.layers.1.mlp.down_proj.weight"].bfloat16()
    assert torch.equal(stored(path, torch.bfloat16)["layers.1.down"], expected)
    (llama / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="lacks model-00002-of-00002.safetensors"):
        run(llama, tmp_path / "other")


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": WINDOW},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": WINDOW // 4,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_rope_is_transformers_own(tmp_path: Path, parameters: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    parameters = {"rope_theta": 20000.0, **parameters}
    folder = save_hf_folder(tmp_path / "rope", "llama", rope_parameters=parameters)
    path = run(folder, tmp_path)
    config = load_config(path)
    rotary = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    assert torch.equal(stored(path, torch.bfloat16)["inv_freq"], rotary.inv_freq)
    assert config.attention_scaling == rotary.attention_scaling
    assert config.rope_type == parameters["rope_type"]
    assert config.rope_parameters["rope_theta"] == 20000.0
    assert config.window == (4 * WINDOW if config.rope_type == "yarn" else WINDOW)


def test_sliding_windows_cap_the_window(llama: Path, tmp_path: Path) -> None:
    mistral = save_hf_folder(tmp_path / "mistral", "mistral", sliding_window=128)
    assert load_config(run(mistral, tmp_path)).window == 128
    qwen = save_hf_folder(
        tmp_path / "qwen", "qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1
    )
    assert load_config(run(qwen, tmp_path)).window == 64
    full = save_hf_folder(
        tmp_path / "full", "qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=2
    )
    assert load_config(run(full, tmp_path)).window == WINDOW
    edit_config(llama, dual_chunk_attention_config={"original_max_position_embeddings": 256})
    assert load_config(run(llama, tmp_path)).window == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "supported families are llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "supported families"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": 97}, "not valid|has shape|config says"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1.0}}, "axial"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "not valid"),
        ({"num_attention_heads": 0}, "not valid"),
        ({"num_attention_heads": "six"}, "not valid"),
        ({"head_dim": 10**9}, "head size"),
        ({"num_hidden_layers": 3}, "has no tensor layers.2"),
        ({"num_hidden_layers": 1}, "holds layers.1"),
        ({"intermediate_size": 64}, r"gate \+ layers.0.up has shape \[256, 96\]"),
    ],
)
def test_what_a_folder_may_not_be(
    llama: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(llama, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        run(llama, tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "converted").exists() or not any(
        path.is_dir() for path in (tmp_path / "converted").iterdir()
    )


def test_broken_folders(llama: Path, tmp_path: Path) -> None:
    data = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ModelError, match="damaged"):
        run(llama, tmp_path)
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no model.safetensors"):
        run(llama, tmp_path)
    (llama / "config.json").write_text("{")
    with pytest.raises(ModelError):
        run(llama, tmp_path)
    (llama / "config.json").unlink()
    with pytest.raises(ModelError, match="no config.json"):
        run(llama, tmp_path)


def test_a_tokenizer_that_does_not_load(llama: Path, tmp_path: Path) -> None:
    (llama / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer"):
        run(llama, tmp_path)
