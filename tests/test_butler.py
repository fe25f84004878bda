"""TokenButler: the predictor's size and file, its training, and the rows that it chooses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import tiny
import torch
from last_event import last_event
from torch import Tensor

from longread.butler.lessons import losses, recall
from longread.butler.train import Recipe, Trainer, read_texts
from longread.cache import KVCache
from longread.cli import main
from longread.config import Settings
from longread.errors import DocumentError, ModelError, UsageError
from longread.events import Answer, Progress
from longread.model import Decoder
from longread.policies import Butler, Turn
from longread.policies.predicted import SmallKeys, chosen_rows
from longread.policies.predictor import (
    DIM,
    Origin,
    Predictor,
    Shape,
    fitting_width,
    load,
    load_for,
    to_bytes,
)
from longread.reread import DocumentRereader
from longread.session import Session
from longread.tokenizer import Tokenizer

TEXT = Path(__file__).parent.parent / "sample_docs/us_constitution.txt"
RECIPE = Recipe(steps=40, length=160, num_queries=24, sink_size=2, window_size=8)
# layers, query heads, KV heads, head size, and all parameters
MODELS = {
    "smollm2-135m": ((30, 9, 3, 64), 134_515_008),
    "qwen2.5-coder-0.5b": ((24, 14, 2, 64), 494_032_768),
    "qwen2.5-coder-1.5b": ((28, 12, 2, 128), 1_543_714_304),
    "llama-3.1-8b": ((32, 32, 8, 128), 8_030_261_248),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers: one alone, four with one producer, and one that is left."""
    root = tmp_path_factory.mktemp("butler")
    folder = tiny.save_hf_folder(root / "hf", "qwen2", num_hidden_layers=6)
    return tiny.convert(folder, root / "models")


@pytest.fixture(scope="module")
def decoder(model_dir: Path) -> Decoder:
    return Decoder.load(model_dir, "cpu", "float32")


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


def _trainer(decoder: Decoder, tokenizer: Tokenizer, recipe: Recipe = RECIPE) -> Trainer:
    return Trainer(decoder, tokenizer, read_texts([TEXT]), recipe)


def _ignore(progress: Progress) -> None:
    assert progress.done <= progress.total


@pytest.mark.parametrize("name", MODELS)
def test_a_predictor_has_under_one_percent_of_the_parameters(name: str) -> None:
    sizes, num_parameters = MODELS[name]
    shape = Shape(*sizes)
    width = fitting_width(shape, num_parameters)
    with torch.device("meta"):
        assert Predictor(shape, width).num_parameters < num_parameters / 100
        wider = Predictor(shape, width + 8)
    assert width == 512 or wider.num_parameters >= num_parameters / 100
    assert 128 <= width <= 512


@pytest.mark.parametrize("num_layers", (1, 2, 5, 6, 30))
def test_each_layer_has_one_producer_at_or_before_it(num_layers: int) -> None:
    shape = Shape(num_layers, 6, 2, 32)
    layers = [layer for group in shape.groups for layer in group]
    assert layers == list(range(num_layers))
    assert list(shape.groups[0]) == [0] and all(len(group) <= 4 for group in shape.groups)
    predictor = Predictor(shape, 8)
    q = torch.randn(3, 6, 32)
    for producer, group in enumerate(shape.groups):
        assert predictor.small_queries(producer, q).shape == (len(group), 3, 6, DIM)
    assert predictor.small_keys(num_layers - 1, torch.randn(2, 7, 32)).shape == (2, 7, DIM)


def test_training_lowers_the_loss_and_raises_recall(
    decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Heads of a random model look at places as much as at words, and each at others."""
    trainer = _trainer(decoder, tokenizer, dataclasses.replace(RECIPE, steps=150, width=64))
    before = trainer.recall()
    trainer.run(tmp_path / "checkpoint", _ignore)
    after = trainer.recall()
    assert len(trainer.losses) == trainer.step == 150
    assert sum(trainer.losses[-5:]) < 0.93 * sum(trainer.losses[:5])
    for layer, ((old, best), (new, same)) in enumerate(zip(before, after, strict=True)):
        assert best == same and old < new <= best, layer
    gained = sum(new - old for (old, _), (new, _) in zip(before, after, strict=True))
    possible = sum(best - old for old, best in before)
    assert gained > 0.15 * possible


def test_exact_queries_and_keys_have_no_loss_and_the_best_recall(
    decoder: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 16 channels: what is projected can be all of them, turned as attention has them."""
    trainer = _trainer(decoder, tokenizer)
    lesson, predictor = trainer.lesson(0), trainer.predictor
    _be_exact(monkeypatch, predictor, lesson.q, lesson.k)
    kept = RECIPE.kept
    for producer in range(len(predictor.shape.groups)):
        for loss in losses(predictor, lesson, kept, producer):
            assert abs(float(loss)) < 1e-4
    for found, best in recall(predictor, lesson, kept):
        assert found == pytest.approx(best, abs=1e-5)


def _be_exact(monkeypatch: pytest.MonkeyPatch, predictor: Predictor, q: object, k: Tensor) -> None:
    """Small queries and keys are these, whatever they are made from. q: by layer."""
    head_dim = k.shape[-1]

    def small_queries(producer: int, _: Tensor) -> Tensor:
        group = predictor.shape.groups[producer]
        return torch.stack([q[layer] for layer in group]) * head_dim**-0.5  # type: ignore[index]

    monkeypatch.setattr(predictor, "small_queries", small_queries)
    monkeypatch.setattr(predictor, "small_keys", lambda layer, _: k[layer].float())


class _Stopped(Exception):
    pass


@pytest.mark.parametrize("stop_at", (1, 4))
def test_a_stopped_training_goes_on_to_the_same_bits(
    decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path, stop_at: int
) -> None:
    recipe = dataclasses.replace(RECIPE, steps=7)
    whole = _trainer(decoder, tokenizer, recipe)
    whole.run(tmp_path / "whole", _ignore)

    def stop(progress: Progress) -> None:
        if progress.done == stop_at:
            raise _Stopped

    checkpoint = tmp_path / "checkpoint"
    with pytest.raises(_Stopped):
        _trainer(decoder, tokenizer, recipe).run(checkpoint, stop)
    again = _trainer(decoder, tokenizer, recipe)
    again.run(checkpoint, _ignore)
    assert len(again.losses) == 7 - stop_at and again.losses == whole.losses[stop_at:]
    for name, tensor in whole.predictor.state_dict().items():
        assert torch.equal(tensor, again.predictor.state_dict()[name]), name
    other = _trainer(decoder, tokenizer, dataclasses.replace(recipe, seed=1))
    with pytest.raises(UsageError, match="another training"):
        other.run(checkpoint, _ignore)
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(UsageError, match="damaged"):
        _trainer(decoder, tokenizer, recipe).run(checkpoint, _ignore)


def test_a_limit_of_time_ends_it(decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    trainer = _trainer(decoder, tokenizer, dataclasses.replace(RECIPE, steps=10**6, limit_s=0.4))
    trainer.run(tmp_path / "checkpoint", _ignore)
    assert trainer.share_done == 1 and 0 < trainer.step < 1000


def test_what_cannot_be_trained_on_is_told(
    decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="over the window"):
        _trainer(decoder, tokenizer, dataclasses.replace(RECIPE, length=tiny.WINDOW + 1))
    with pytest.raises(DocumentError, match="cannot read"):
        read_texts([tmp_path / "none.txt"])
    (tmp_path / "picture.txt").write_bytes(bytes(100))
    with pytest.raises(DocumentError, match="no text"):
        read_texts([tmp_path])
    (tmp_path / "short.txt").write_text("Too short.")
    texts = read_texts([tmp_path])
    assert texts == ["Too short."]
    with pytest.raises(DocumentError, match="too short"):
        Trainer(decoder, tokenizer, texts, RECIPE).train_step()


def test_a_file_gives_the_predictor_back_and_serves_one_model(tmp_path: Path) -> None:
    predictor, origin = Predictor(Shape(6, 4, 2, 32), 16), Origin("m", "abc", recall=(0.5, 0.25))
    path = tmp_path / "m.safetensors"
    path.write_bytes(to_bytes(predictor, origin))
    found, found_origin = load(path)
    assert found_origin == origin and found.shape == predictor.shape
    for name, tensor in predictor.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)
    assert load_for(str(path), "m", "abc").width == 16
    with pytest.raises(UsageError, match="other weights"):
        load_for(str(path), "m", "abd")
    with pytest.raises(ModelError, match="longread butler train"):
        load_for("", "m", "abc")
    with pytest.raises(UsageError, match="cannot be read"):
        load_for(str(tmp_path / "none"), "m", "abc")
    for data in (b"", b"no tensors", path.read_bytes()[:-9]):
        path.write_bytes(data)
        with pytest.raises(UsageError, match="no predictor"):
            load_for(str(path), "m", "abc")


@pytest.mark.parametrize("budget", (1, 7, 30))
@pytest.mark.parametrize("group_size", (1, 3))
def test_rows_with_the_best_votes_are_chosen(budget: int, group_size: int) -> None:
    scores = torch.randn(1, 2, group_size, 50, generator=torch.Generator().manual_seed(budget)) * 3
    can_choose = torch.ones(1, 50, dtype=torch.bool)
    can_choose[:, :4] = can_choose[:, 20:30] = can_choose[:, 44:] = False
    found = chosen_rows(scores, can_choose, budget, budget, 32, 0)
    assert found.shape == (1, 2, 32)
    for head in range(2):
        hidden = scores[0, head].masked_fill(~can_choose, -torch.inf)
        votes = torch.softmax(hidden, dim=-1).sum(dim=0)
        best = votes.topk(min(budget, 30)).indices.tolist()
        rows = found[0, head].tolist()
        assert rows[: len(best)] == best and set(rows[len(best) :]) <= {-1}


@pytest.mark.parametrize("neighbours", (1, 2, 5))
def test_neighbours_come_with_a_chosen_row_in_the_same_budget(neighbours: int) -> None:
    around = 2 * neighbours + 1
    scores = torch.zeros(1, 1, 2, 100)
    for rank, row in enumerate((60, 20, 8)):  # 8 is near rows that are kept anyway
        scores[..., row] = 9.0 - rank
    can_choose = torch.ones(1, 100, dtype=torch.bool)
    can_choose[:, :6] = can_choose[:, 90:] = False
    for budget in (1, around, around + 1, 2 * around, 3 * around, 90):
        rows = chosen_rows(scores, can_choose, budget, budget, 90, neighbours)[0, 0]
        read = [row for row in rows.tolist() if row >= 0]
        assert len(set(read)) == len(read) == min(budget, 84) and rows.shape == (90,)
        assert can_choose[0, read].all()
        whole = range(min(budget // around, 2))
        for peak in (60, 20)[: len(whole)]:
            assert {*range(peak - neighbours, peak + neighbours + 1)} <= {*read}


def _read(decoder: Decoder, num_rows: int) -> tuple[KVCache, DocumentRereader, Tensor]:
    ids = torch.randint(3, 400, (num_rows + 30,), generator=torch.Generator().manual_seed(1))
    cache = decoder.new_cache(num_rows + 30)
    decoder.prefill(ids[:num_rows], cache)
    return cache, DocumentRereader(decoder, ids[:num_rows]), ids


@torch.inference_mode()
def test_with_exact_scores_the_policy_reads_the_oracles_rows(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, rereader, _ = _read(decoder, 90)
    tiny.use_untrained_predictor(decoder.config, monkeypatch)
    policy = Butler(budget=12, sink_size=2, window_size=5)
    generator = torch.Generator().manual_seed(2)
    q = [torch.randn(6, 16, generator=generator) for _ in range(6)]
    predictor = tiny.predictor(decoder.config)
    monkeypatch.setattr("longread.policies.butler.load_for", lambda *_: predictor)
    policy.prepare(cache, rereader)
    assert policy._keys is not None
    policy._keys.values = cache.k  # projected to all of themselves
    policy._keys._num_done = [10**6] * 6
    _be_exact(monkeypatch, predictor, [own[None] for own in q], cache.k)
    policy.start_turn(Turn(40, 50))
    kept = {0, 1, *range(40, 50), *range(85, 90)}
    others = [row for row in range(90) if row not in kept]
    for layer_idx, own in enumerate(q):
        rows = policy.select(layer_idx, own, 90)
        assert rows is not None and rows.shape == (2, len(kept) + 12)
        for head in range(2):
            scores = own[3 * head : 3 * head + 3] @ cache.k[layer_idx, head, others].T / 4
            votes = torch.softmax(scores, dim=-1).sum(dim=0)
            best = {others[i] for i in votes.topk(12).indices.tolist()}
            assert set(rows[head].tolist()) == kept | best


@torch.inference_mode()
def test_a_choice_is_kept_for_so_many_tokens(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, rereader, ids = _read(decoder, 90)
    tiny.use_untrained_predictor(decoder.config, monkeypatch)
    for interval in (1, 2, 4, 8, 16):
        cache.truncate(90)
        policy = Butler(budget=12, sink_size=2, window_size=5, reselect=interval)
        policy.prepare(cache, rereader)
        policy.start_turn(Turn(90, 93))
        trace = decoder.new_trace(90, keep_steps=True)
        decoder.extend(ids[90:93], cache, policy)
        for token in ids[93:111]:
            decoder.decode(token[None], cache, policy, trace)
        for layer_idx in range(6):
            lists = [step[layer_idx][:, -12:].tolist() for step in trace.steps]  # type: ignore[index]
            for step in range(1, 18):
                is_same = lists[step] == lists[step - 1]
                assert is_same == (step % interval != 0), (layer_idx, step)


@torch.inference_mode()
def test_keys_follow_what_is_appended_undone_and_grown(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, rereader, ids = _read(decoder, 90)
    predictor = tiny.predictor(decoder.config)
    monkeypatch.setattr("longread.policies.butler.load_for", lambda *_: predictor)
    policy = Butler(budget=12, window_size=5)
    policy.prepare(cache, rereader)

    def check() -> None:
        decoder.decode(ids[:1], cache, policy)
        fresh = SmallKeys(cache, predictor, rereader)
        assert policy._keys is not None
        rows = slice(0, cache.length)
        torch.testing.assert_close(policy._keys.values[:, :, rows], fresh.values[:, :, rows])

    policy.start_turn(Turn(90, 100))
    decoder.extend(ids[90:100], cache, policy)
    check()
    cache.truncate(90)
    policy.start_turn(Turn(90, 97))
    decoder.extend(ids[20:27], cache, policy)
    check()
    decoder.extend(ids[:100], cache, policy)
    assert cache.capacity > 120
    check()


def _answers(settings: Settings, document: Path) -> list[str]:
    session, texts = Session(settings), []
    list(session.open([str(document)]))
    for question in ("Who makes laws?", "How long is a term?"):
        answer = last_event(session.ask(question))
        assert isinstance(answer, Answer) and answer.selection.fraction_kept < 0.6
        texts.append(answer.text)
    return texts


def test_the_commands_train_show_and_answer(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "p.safetensors", f"--model={model_dir}"
    command = ["butler", "train", str(TEXT), "--out", str(path), model, "--dtype=float32"]
    command += ["--steps=3", "--length=600", "--seed=5", "--width=24", "--quiet"]
    assert main(command) == 0
    assert "mean" in capsys.readouterr().out
    assert main(command) == 2 and "already" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.checkpoint"))
    assert main(["butler", "info", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["seed"], record["steps"], record["tokens"]) == (5, 3, 1800)
    assert record["texts"] == TEXT.name and len(record["recall"]) == 6
    assert record["shape"]["num_layers"] == 6 and record["shape"]["width"] == 24
    assert main(["butler", "info", str(TEXT)]) == 2

    document = tmp_path / "document.txt"
    document.write_text(TEXT.read_text()[:1000])
    settings = Settings(
        model=str(model_dir),
        dtype="float32",
        policy="butler",
        butler=str(path),
        cache_dir=tmp_path / "cache",
        max_tokens=6,
        window_size=16,
        neighbours=1,
    )
    first = _answers(settings, document)
    assert _answers(settings, document) == first  # from the stored entry
    with pytest.raises(ModelError, match="no predictor"):
        _answers(dataclasses.replace(settings, butler=""), document)
