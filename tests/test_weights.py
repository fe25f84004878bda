"""A converted model's life on disk, loading it, and which model a name means."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from converted import Log, run, stored
from safetensors.torch import load, save_file
from tiny import save_hf_folder
from tiny_gguf import write_gguf
from torch import Tensor

from longread import catalog, convert, hub
from longread.errors import ModelError, StoreError
from longread.weights import load_config


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf_folder(tmp_path_factory.mktemp("folders") / "llama", "llama")


@pytest.fixture
def llama(tiny_folder: Path, tmp_path: Path) -> Path:
    """A llama folder to change at will."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "llama"))


def test_a_second_time_converts_nothing(llama: Path, tmp_path: Path) -> None:
    first, again = Log(), Log()
    path = run(llama, tmp_path, first)
    total = first.progress[-1].total
    assert [e.done for e in first.progress] == sorted(e.done for e in first.progress)
    assert (first.progress[-1].stage, first.progress[-1].done) == ("convert", total)
    assert run(llama, tmp_path, again) == path
    assert again.progress == []
    assert run(path, tmp_path, again) == path  # the converted directory names itself
    assert run("llama", tmp_path, again) == path  # and so does its name
    assert again.progress == []


def test_the_same_content_elsewhere_is_the_same_model(llama: Path, tmp_path: Path) -> None:
    path = run(llama, tmp_path)
    copy = Path(shutil.copytree(llama, tmp_path / "copy"))
    assert run(copy, tmp_path) == path
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    changed = run(copy, tmp_path)
    assert changed != path
    assert load_config(changed).identity != load_config(path).identity


def test_a_catalogue_file_has_its_name_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "download.gguf", "llama")
    sha256 = catalog.file_sha256(tmp_path / "download.gguf")
    toy = catalog.ModelSource("toy", "toy.gguf", sha256, 1, "MIT", "owner/toy", (), 8)
    monkeypatch.setattr(catalog, "CATALOG", {"toy": toy})
    path = run(tmp_path / "download.gguf", tmp_path)
    assert load_config(path).name == "toy"
    assert catalog.list_models(tmp_path)[0].path == path
    assert run("toy", tmp_path) == path


def test_two_at_once_convert_once(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    write_tensors = convert.write_tensors

    def counted(*arguments: Any) -> None:
        calls.append(arguments)
        write_tensors(*arguments)

    monkeypatch.setattr(convert, "write_tensors", counted)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(run(llama, tmp_path))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert found[0] == found[1]


def test_a_conversion_that_fails_leaves_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: Any, position: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "_write_at", full)
        with pytest.raises(StoreError, match="No space left"):
            run(llama, tmp_path)
    left = [path for path in (tmp_path / "converted").iterdir() if path.suffix != ".lock"]
    assert left == []
    path = run(llama, tmp_path)
    # What a killed conversion leaves has another name, and the next one clears it.
    killed = path.rename(path.with_name(".tmp-" + path.name))
    assert run(llama, tmp_path) == path
    assert not killed.exists()


def test_free_space_is_checked_first(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(StoreError, match="not enough disk space"):
        run(llama, tmp_path)


def test_loading_maps_the_file(llama: Path, tmp_path: Path) -> None:
    path = run(llama, tmp_path)
    tensors = stored(path)
    maps = Path("/proc/self/maps")
    if maps.exists():
        lines = [line.split()[0] for line in maps.read_text().splitlines() if str(path) in line]
        spans = [tuple(int(end, 16) for end in line.split("-")) for line in lines]
        for name, tensor in tensors.items():
            assert any(low <= tensor.data_ptr() < high for low, high in spans), name
    halves = stored(path, torch.bfloat16)
    assert halves["layers.0.qkv"].dtype == torch.bfloat16
    assert halves["inv_freq"].dtype == torch.float32


def test_damaged_weights(llama: Path, tmp_path: Path) -> None:
    path = run(llama, tmp_path)
    file = path / "model.safetensors"
    data = file.read_bytes()
    for broken in (data[:-1], data + b"x", data[:7], b"", b"\xff" * 100):
        file.write_bytes(broken)
        with pytest.raises(ModelError, match="longread models rm llama"):
            stored(path)
    tensors = load(data)
    save_file({k: v for k, v in tensors.items() if k != "norm"}, file)
    with pytest.raises(ModelError, match="norm"):
        stored(path)
    file.unlink()
    with pytest.raises(ModelError, match="models rm"):
        stored(path)
    (path / "config.json").write_text('{"format": "longread-weights", "format_version": 1}')
    with pytest.raises(ModelError, match="config.json is damaged"):
        load_config(path)
    (path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"not a model that this version.*models rm {path.name}"):
        load_config(path)
    with pytest.raises(ModelError, match="config.json"):
        load_config(tmp_path)
    assert catalog.remove_model(tmp_path, path.name) > 0  # the remedy that was named


@pytest.mark.parametrize("model", ["", "gpt-5", "./nothing.gguf", "a/b/c", "x" * 5000, "~nobody/x"])
def test_names_that_are_no_model(tmp_path: Path, model: str) -> None:
    with pytest.raises(ModelError, match="qwen2.5-coder-1.5b, qwen2.5-coder-0.5b, smollm2-135m"):
        run(model, tmp_path)


def test_hub_ids(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="cannot fetch owner/toy.*--model"):
        run("owner/toy", tmp_path)
    monkeypatch.setattr(hub, "download_model", lambda repo, progress: llama)
    path = run("owner/toy", tmp_path)
    assert load_config(path).name == "owner/toy"
    monkeypatch.setattr(hub, "download_model", None)  # once converted, the hub is not asked
    assert run("owner/toy", tmp_path) == path


@pytest.mark.weights
def test_smollm2_is_what_its_gguf_says(smollm2_dir: Path) -> None:
    config = load_config(smollm2_dir)
    assert (config.family, config.window) == ("llama", 8192)
    tensors = stored(smollm2_dir, torch.bfloat16)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    source = smollm2_dir.parent.parent / "gguf" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not source.is_file():
        pytest.skip("the GGUF file was read from the hub's cache")
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}

    def rows(name: str) -> Tensor:
        tensor = reader[name]
        return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).bfloat16()

    assert torch.equal(tensors["embed_tokens"], rows("token_embd.weight"))
    assert torch.equal(tensors["layers.7.down"], rows("blk.7.ffn_down.weight"))
    # llama.cpp keeps the rows of a head as pairs of the two halves
    pairs = rows("blk.7.attn_q.weight").view(9, 32, 2, 576)
    assert torch.equal(
        tensors["layers.7.qkv"][:576], torch.cat([pairs[:, :, 0], pairs[:, :, 1]], 1).view(576, 576)
    )
