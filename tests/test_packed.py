"""Packed weights: which matrices get how many bits, their file, the answers, what auto chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from converted import Log, run
from gguf import GGMLQuantizationType as Quant
from last_event import last_event
from longread_kernels import packed as ops
from tiny_gguf import write_gguf

from longread import packed
from longread.checkup import Check, checkup
from longread.config import Settings
from longread.errors import ModelError, StoreError
from longread.events import Answer, Opened
from longread.matrix import Int4Matrix, Int8Matrix
from longread.model import Decoder
from longread.model_files import weight_forms
from longread.packed import choose_weights, load_packed, make
from longread.policies import Dense, Turn
from longread.session import Session

pytestmark = pytest.mark.skipif(
    ops.kernels_missing() is not None, reason="no packed kernels on this machine"
)

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
FOUR_BIT = dict.fromkeys(MATRICES, Quant.Q4_1) | {"token_embd": Quant.Q8_0}
WITH_MORE = FOUR_BIT | {"attn_v": Quant.Q5_0, "ffn_down": Quant.Q8_0}


def ignore(event: object) -> None:
    pass


def gguf_model(tmp_path: Path, quants: dict[str, Quant], arch: str = "qwen2") -> Path:
    write_gguf(tmp_path / "tiny.gguf", arch, quants=quants)
    return run(tmp_path / "tiny.gguf", tmp_path)


def forms(model_dir: Path, form: str) -> dict[str, type]:
    make(model_dir, form, ignore, ignore)
    return {name: type(matrix) for name, matrix in load_packed(model_dir, form).items()}


def settings_for(model_dir: Path, tmp_path: Path, weights: str) -> Settings:
    return Settings(
        model=str(model_dir),
        weights=weights,
        device="cpu",
        cache_dir=tmp_path / "cache",
        models_dir=tmp_path / "models",
        max_tokens=6,
        window_size=16,
    )


def test_what_came_with_4_bits_keeps_them_and_the_rest_gets_8(tmp_path: Path) -> None:
    found = forms(gguf_model(tmp_path, WITH_MORE), "int4")
    assert "lm_head" not in found  # the vocabulary is no multiple of 16
    for i in range(2):
        assert found[f"layers.{i}.o"] is found[f"layers.{i}.gate_up"] is Int4Matrix
        assert found[f"layers.{i}.qkv"] is found[f"layers.{i}.down"] is Int8Matrix
    assert len(found) == 8


def test_what_came_whole_is_rounded_but_for_the_head(tmp_path: Path) -> None:
    model_dir = tiny.convert(tiny.save_hf_folder(tmp_path / "hf", "llama"), tmp_path)
    found = forms(model_dir, "int4")
    assert found.pop("lm_head") is Int8Matrix
    assert set(found.values()) == {Int4Matrix}
    assert set(forms(model_dir, "int8").values()) == {Int8Matrix}
    assert weight_forms(model_dir) == ["bf16", "int8", "int4"]


def test_shapes_that_the_product_does_not_take_stay(tmp_path: Path) -> None:
    models = []
    for hidden, intermediate in ((96, 100), (80, 104)):
        sizes = {"hidden_size": hidden, "intermediate_size": intermediate}
        folder = tiny.save_hf_folder(tmp_path / str(hidden), "qwen2", **sizes)
        models.append(tiny.convert(folder, tmp_path))
    found = forms(models[0], "int4")
    assert found["layers.0.qkv"] is found["layers.0.o"] is Int4Matrix
    assert "layers.0.gate_up" not in found  # 200 rows
    assert "layers.0.down" not in found  # 100 columns
    assert set(forms(models[1], "int8")) == {"layers.0.o", "layers.1.o"}
    for model_dir in models:
        for form in ("int8", "int4"):
            assert step_error(model_dir, form) < 0.5


def decoders(model_dir: Path, form: str) -> tuple[Decoder, Decoder]:
    make(model_dir, form, ignore, ignore)
    return (
        Decoder.load(model_dir, "cpu", "bfloat16"),
        Decoder.load(model_dir, "cpu", "bfloat16", weights=form),
    )


def step_error(model_dir: Path, form: str) -> float:
    """Relative RMS of a step's logits beside bf16's, on the same rows."""
    whole, narrow = decoders(model_dir, form)
    tokens = torch.arange(3, 60)
    found = []
    for decoder in (whole, narrow):
        cache, policy = decoder.new_cache(100), Dense()
        decoder.prefill(tokens, cache)
        policy.prepare(cache)
        policy.start_turn(Turn(cache.length, cache.length))
        found.append(decoder.decode(torch.tensor([7]), cache, policy).double())
    return float((found[1] - found[0]).norm() / found[0].norm())


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_step_of_a_4_bit_file_is_as_with_bf16(tmp_path: Path, arch: str) -> None:
    model_dir = gguf_model(tmp_path, FOUR_BIT, arch)
    assert step_error(model_dir, "int4") < 0.08
    assert step_error(model_dir, "int8") < 0.08


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_step_of_a_folder_is_close(tmp_path: Path, family: str) -> None:
    model_dir = tiny.convert(tiny.save_hf_folder(tmp_path / "hf", family), tmp_path)
    assert step_error(model_dir, "int8") < 0.08
    assert 0.05 < step_error(model_dir, "int4") < 0.5  # rounded to 4 bits, and not bf16 by mistake


def test_rows_of_a_document_do_not_depend_on_the_form(tmp_path: Path) -> None:
    model_dir = tiny.convert(tiny.save_hf_folder(tmp_path / "hf", "qwen2"), tmp_path)
    caches = []
    for decoder in decoders(model_dir, "int4"):
        cache = decoder.new_cache(64)
        for part in torch.arange(3, 60).split([50, 1, 6]):  # few rows too
            decoder.prefill(part, cache)
        caches.append(cache)
    for name in ("k", "v"):
        whole, narrow = (getattr(cache, name)[:, :, :57] for cache in caches)
        assert torch.equal(whole, narrow)


def test_long_questions_take_the_bf16_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, narrow = decoders(gguf_model(tmp_path, FOUR_BIT), "int4")
    applied = []
    apply = Int4Matrix.apply

    def counted(self: Int4Matrix, x: torch.Tensor) -> torch.Tensor:
        applied.append(x.shape[0])
        return apply(self, x)

    monkeypatch.setattr(Int4Matrix, "apply", counted)
    most = Int4Matrix.most_rows
    for num_tokens in (most, most + 1):
        cache, policy = narrow.new_cache(64), Dense()
        narrow.extend(torch.arange(3, 3 + num_tokens), cache, policy)
    assert set(applied) == {most}
    cache = narrow.new_cache(64)
    logits = narrow.all_logits(torch.arange(3, 43), cache, Dense())
    assert 40 in applied and logits.shape == (40, narrow.config.vocab_size)
    expected = whole.all_logits(torch.arange(3, 43), whole.new_cache(64), Dense())
    assert float((logits - expected).norm() / expected.norm()) < 0.15


def test_auto_is_int4_for_what_came_with_4_bits(tmp_path: Path) -> None:
    narrow, whole = tmp_path / "narrow", tmp_path / "whole"
    narrow.mkdir()
    model_dir = gguf_model(narrow, WITH_MORE)  # no layer's down has 4 bits: not a 4-bit file
    assert choose_weights(settings_for(model_dir, tmp_path, "auto"), model_dir, ignore, ignore) == (
        "bf16"
    )
    whole.mkdir()
    model_dir = gguf_model(whole, FOUR_BIT)
    log = Log()
    auto = settings_for(model_dir, tmp_path, "auto")
    assert choose_weights(auto, model_dir, log.take, log.take) == "int4"
    assert log.progress[-1].stage == "pack" and log.progress[-1].done == log.progress[-1].total
    assert log.notices[-1].startswith("answers are computed with int4 weights (")
    log = Log()
    assert choose_weights(auto, model_dir, log.take, log.take) == "int4"
    assert not log.progress  # the file is there
    exact = replace(auto, dtype="float32")
    assert choose_weights(exact, model_dir, ignore, ignore) == "bf16"
    with pytest.raises(ModelError, match="compute in bfloat16; leave --dtype float32 out"):
        choose_weights(replace(exact, weights="int8"), model_dir, ignore, ignore)


def test_auto_is_whole_for_what_came_whole(tmp_path: Path) -> None:
    model_dir = gguf_model(tmp_path, {})
    auto = settings_for(model_dir, tmp_path, "auto")
    assert choose_weights(auto, model_dir, ignore, ignore) == "bf16"
    assert weight_forms(model_dir) == ["bf16"]
    # That another form was asked for once is no reason to take it.
    assert choose_weights(replace(auto, weights="int4"), model_dir, ignore, ignore) == "int4"
    assert choose_weights(auto, model_dir, ignore, ignore) == "bf16"


def test_a_machine_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = gguf_model(tmp_path, FOUR_BIT)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    settings = settings_for(model_dir, tmp_path, "int4")
    with pytest.raises(ModelError, match="finds DEFAULT here; use --weights bf16"):
        choose_weights(settings, model_dir, ignore, ignore)
    auto = replace(settings, weights="auto")
    assert choose_weights(auto, model_dir, ignore, ignore) == "bf16"


def test_doctor_names_the_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_for(tmp_path, tmp_path, "auto")
    assert Check("weights", "ok", "bf16, int8 and int4 on the CPU") in checkup(settings)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    found = {check.name: check.found for check in checkup(settings)}
    assert found["weights"].startswith("bf16 alone on the CPU: torch has fast kernels")


def test_a_gpu_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = gguf_model(tmp_path, FOUR_BIT)
    monkeypatch.setattr(packed, "choose_device", lambda device: torch.device("cuda"))
    settings = settings_for(model_dir, tmp_path, "int4")
    with pytest.raises(ModelError, match="they are for the CPU"):
        choose_weights(settings, model_dir, ignore, ignore)
    auto = replace(settings, weights="auto")
    assert choose_weights(auto, model_dir, ignore, ignore) == "bf16"


def test_auto_does_without_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = gguf_model(tmp_path, FOUR_BIT)

    def full(directory: Path, num_bytes: int, what: str) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(packed.model_files, "require_free", full)
    log = Log()
    auto = settings_for(model_dir, tmp_path, "auto")
    assert choose_weights(auto, model_dir, log.take, log.take) == "bf16"
    assert log.notices == [
        "answers are computed with whole weights, which is slower: the disk is full"
    ]
    with pytest.raises(StoreError):
        choose_weights(replace(auto, weights="int4"), model_dir, ignore, ignore)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    model_dir = gguf_model(tmp_path, FOUR_BIT)
    with pytest.raises(ModelError, match="int8 weights .* are missing or damaged"):
        load_packed(model_dir, "int8")
    path = make(model_dir, "int8", ignore, ignore)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelError, match="remove that file"):
        load_packed(model_dir, "int8")
    other = tiny.convert(tiny.save_hf_folder(tmp_path / "hf", "qwen2"), tmp_path)
    path.write_bytes(make(other, "int8", ignore, ignore).read_bytes())
    with pytest.raises(ModelError, match="has shape"):
        load_packed(model_dir, "int8")


def test_a_failure_leaves_no_file_and_the_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = gguf_model(tmp_path, FOUR_BIT)
    before = sorted(model_dir.iterdir())
    num_threads = torch.get_num_threads()

    def fail(matrix: torch.Tensor) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(packed, "eight_bit", fail)
        with pytest.raises(RuntimeError, match="no"):
            make(model_dir, "int8", ignore, ignore)
    assert [path for path in sorted(model_dir.iterdir()) if path.suffix != ".lock"] == before
    make(model_dir, "int8", ignore, ignore)
    assert torch.get_num_threads() == num_threads


def test_a_session_answers_from_another_forms_rows(tmp_path: Path) -> None:
    folder = tiny.save_hf_folder(tmp_path / "hf", "qwen2", max_position_embeddings=16384)
    model_dir = tiny.convert(folder, tmp_path / "models")
    document = tmp_path / "text.txt"
    document.write_text("We the People of the United States. " * 40)
    for weights in ("bf16", "int8", "int4"):
        session = Session(settings_for(model_dir, tmp_path, weights))
        opened = last_event(session.open([str(document)]))
        assert isinstance(opened, Opened) and opened.cache.hit == (weights != "bf16")
        answer = last_event(session.ask("Who?"))
        assert isinstance(answer, Answer) and answer.usage.answer_tokens == 6
        assert session.turns[-1].settings["weights"] == weights


@pytest.mark.weights
def test_greedy_answers_of_a_4_bit_file(smollm2_dir: Path, tmp_path: Path) -> None:
    from longread.tokenizer import Tokenizer

    text = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
    token_ids = torch.tensor(Tokenizer.load(smollm2_dir).encode(text))
    answers = []
    for decoder in decoders(smollm2_dir, "int4"):
        cache, policy = decoder.new_cache(100), Dense()
        logits = decoder.extend(token_ids, cache, policy)
        answer = []
        for _ in range(12):
            answer.append(int(logits.argmax()))
            logits = decoder.decode(logits.argmax()[None], cache, policy)
        answers.append(answer)
    assert answers[0] == answers[1]
    matrices = load_packed(smollm2_dir, "int4")
    assert {type(m) for name, m in matrices.items() if name != "lm_head"} == {Int4Matrix}
