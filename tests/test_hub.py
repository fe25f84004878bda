"""The hub, without a network: given up in time, told apart from a refusal, and asked for little."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longread import hub
from longread.errors import ModelError
from longread.events import Progress

FILES = {
    "config.json": 10,
    "tokenizer.json": 20,
    "model.safetensors": 1000,
    "consolidated.safetensors": 1000,
    "pytorch_model.bin": 1000,
    "onnx/model.safetensors": 1000,
    "README.md": 5,
}


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def ignore(progress: Progress) -> None:
    pass


def answer_with(monkeypatch: pytest.MonkeyPatch, outcome: dict[str, int] | Exception) -> None:
    """The hub's list of a repository's files and sizes, or the error it raises."""

    def model_info(*_: Any, **__: Any) -> SimpleNamespace:
        if isinstance(outcome, Exception):
            raise outcome
        files = [SimpleNamespace(rfilename=name, size=size) for name, size in outcome.items()]
        return SimpleNamespace(siblings=files, sha="f" * 40)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)


def test_a_hub_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_TRY_S", 0.1)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: time.sleep(1.0))
    start = time.monotonic()
    with pytest.raises(hub.HubUnreachable, match="not reachable"):
        hub.download_file("nobody/toy", "toy.gguf", tmp_path, ignore)
    assert time.monotonic() - start < 0.9


def test_a_hub_that_is_switched_off_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(hub.HubUnreachable, match="HF_HUB_OFFLINE"):
        hub.download_file("nobody/toy", "toy.gguf", tmp_path, ignore)


def test_only_what_a_conversion_reads_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(repo: str, file: str, *, revision: str, tqdm_class: Any) -> str:
        asked.append(file)
        assert revision == "f" * 40
        with tqdm_class(total=FILES[file], desc=file) as bar:
            bar.update(FILES[file])
        return str(tmp_path / file)

    answer_with(monkeypatch, FILES)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    seen: list[Progress] = []
    assert hub.download_model("owner/toy", seen.append) == tmp_path
    assert asked == ["config.json", "model.safetensors", "tokenizer.json"]
    assert seen[-1] == Progress("download", 1030, 1030, "bytes")


def test_a_repository_without_safetensors(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, {"model.gguf": 1, "README.md": 1})
    with pytest.raises(ModelError, match=r"\.gguf file and pass its path"):
        hub.download_model("owner/toy-GGUF", ignore)


def test_what_the_hub_says_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, ConnectionError("https://user:secret@hub.example refused"))
    with pytest.raises(hub.HubUnreachable, match="cannot fetch owner/toy.*--model") as caught:
        hub.download_model("owner/toy", ignore)
    assert "secret" not in str(caught.value)
    answer_with(monkeypatch, OSError(28, "No space left on device"))
    with pytest.raises(ModelError, match="No space left"):
        hub.download_model("owner/toy", ignore)
