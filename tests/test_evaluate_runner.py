"""The runner of `longread eval`: a session's answers, on one prefill, and nothing leaks between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from longread_kernels import dispatch as ops

from longread.config import Settings
from longread.errors import ContextError, UsageError
from longread.evaluate import grid
from longread.evaluate.cells import CellFolder, read_cells
from longread.evaluate.grid import Grid, Outcome, Request
from longread.evaluate.runner import Prompts, Runner, Said
from longread.evaluate.task import Question, Sample
from longread.evaluate.variants import Variant, parse_variants
from longread.events import Answer, Event
from longread.model import Decoder
from longread.prompt import ChatFormat
from longread.session import Session
from longread.tokenizer import Tokenizer

CONSTITUTION = (Path(__file__).parent.parent / "sample_docs/us_constitution.txt").read_text()
TEXT = " ".join(CONSTITUTION[:9000].split())
QUESTIONS = ("Who makes laws?", "How long is a term?", "Who may vote?")
LENGTH = 1500
MAX_TOKENS = 6
GENTLE = ("dense", "tokenselect", "tokenselect:vote=none", "tokenselect:index=exact", "quest")
OWN = ("streaming", "snapkv", "pyramidkv", "h2o", "razor:period=64", "xkv")


@dataclass
class Model:
    decoder: Decoder
    tokenizer: Tokenizer
    chat: ChatFormat
    settings: Settings

    def prompts(self) -> Prompts:
        return Prompts(self.tokenizer, self.chat)

    def answers(self, sample: Sample, policies: str, budgets: str) -> dict[str, list[Said]]:
        """By the names of the variants."""
        variants = parse_variants(policies, budgets, self.settings)
        runner = Runner(self.decoder, self.tokenizer, variants, LENGTH)
        said = runner.answers(self.prompts().make(sample), variants)
        return {variant.name: answers for variant, answers in said.items()}


@pytest.fixture
def model(settings: Settings) -> Model:
    path = Path(settings.model)
    decoder = Decoder.load(path, "cpu", "float32")
    return Model(decoder, Tokenizer.load(path), ChatFormat.load(path), settings)


def _sample(number: int = 0, in_conversation: bool = False, text: str = TEXT) -> Sample:
    """Three questions; each sample begins elsewhere in the text, and is one page of it."""
    document = text[100 * number : 100 * number + 2800].strip()
    questions = tuple(
        Question(text, ("a",), max_tokens=MAX_TOKENS, kind=f"turn {turn}")
        for turn, text in enumerate(QUESTIONS, 1)
    )
    return Sample("made", number, document, questions, in_conversation)


def _of_a_session(
    settings: Settings, sample: Sample, folder: Path, variant: Variant
) -> list[tuple[str, float]]:
    """Answers and fractions kept."""
    path = folder / "document.txt"
    path.write_text(sample.document)
    settings = replace(
        settings,
        no_cache=True,
        policy=variant.policy,
        budget=str(getattr(variant.make(LENGTH), "budget", None) or "100%"),
        **{name: value for name, value in variant.fields if hasattr(settings, name)},
    )
    session = Session(settings)
    list(session.open([str(path)]))
    found = []
    for question in sample.questions:
        *_, answer = session.ask(question.text)
        assert isinstance(answer, Answer)
        found.append((answer.text, answer.selection.fraction_kept))
        if not sample.in_conversation:
            session.undo()
            session.configure(settings)
    return found


@pytest.mark.parametrize("in_conversation", (False, True))
@pytest.mark.parametrize("policy", (*GENTLE, *(name for name in OWN if ":" not in name)))
def test_answers_are_those_of_a_session(
    model: Model, tmp_path: Path, policy: str, in_conversation: bool
) -> None:
    sample = _sample(in_conversation=in_conversation)
    (variant,) = parse_variants(policy, "10%", model.settings)
    (said,) = model.answers(sample, policy, "10%").values()
    expected = _of_a_session(model.settings, sample, tmp_path, variant)
    assert [answer.text for answer in said] == [text for text, _ in expected]
    for answer, (_, fraction_kept) in zip(said, expected, strict=True):
        if answer.rows_cached:
            assert answer.rows_read / answer.rows_cached == pytest.approx(fraction_kept, abs=1e-4)


@pytest.mark.parametrize("in_conversation", (False, True))
def test_no_variant_changes_what_another_says(model: Model, in_conversation: bool) -> None:
    sample = _sample(in_conversation=in_conversation)
    names = (*OWN[:3], *GENTLE, *OWN[3:])
    together = model.answers(sample, ",".join(names), "5%,20%")
    assert len(together) == 2 * len(names) - 1
    assert len({tuple(answer.text for answer in said) for said in together.values()}) > 5
    for policy in names:
        for name, said in model.answers(sample, policy, "20%").items():
            assert said == together[name], name


def test_a_whole_budget_is_dense_answer_by_answer(model: Model) -> None:
    for in_conversation in (False, True):
        sample = _sample(in_conversation=in_conversation)
        said = model.answers(sample, ",".join((*GENTLE, *OWN)), "100%")
        expected = [answer.text for answer in said["dense"]]
        for name, answers in said.items():
            assert [answer.text for answer in answers] == expected, name
            for answer in answers:
                assert answer.rows_read == answer.rows_cached


def test_samples_follow_each_other_on_one_cache(model: Model) -> None:
    variants = parse_variants(",".join((*GENTLE, *OWN)), "10%", model.settings)
    runner = Runner(model.decoder, model.tokenizer, variants, LENGTH)
    indexes = [getattr(runner._policies[v], "_index", None) for v in runner._policies]
    for number in (3, 1, 2):
        sample = _sample(number)
        prompt = model.prompts().make(sample)
        said = runner.answers(prompt, variants)
        alone = Runner(model.decoder, model.tokenizer, variants, LENGTH).answers(prompt, variants)
        assert said == alone
        if number != 3:
            found = [getattr(runner._policies[v], "_index", None) for v in runner._policies]
            assert all(a is b for a, b in zip(found, indexes, strict=True))
        indexes = [getattr(runner._policies[v], "_index", None) for v in runner._policies]


def test_the_prefix_of_an_answer_is_its_own_turn(model: Model) -> None:
    question = Question("Who?", ("x",), answer_prefix=" It is")
    prompt = model.prompts().make(Sample("made", 0, "Some text.", (question,)))
    ids = [*prompt.document.tolist(), *prompt.questions[0]]
    text = model.tokenizer.decode(ids, specials=True)
    assert text.endswith("Some text.\n\nQuestion: Who?<|im_end|>\n<|im_start|>assistant\n It is")
    assert model.prompts().overhead == len(ids) - sum(
        len(model.tokenizer.encode(text)) for text in ("Some text.", "Who?", " It is")
    )


def test_the_window_is_named_where_a_sample_passes_it(model: Model) -> None:
    with pytest.raises(ContextError, match="sample 0 of made takes .* 16,384: .*--lengths"):
        model.answers(replace(_sample(), document=TEXT * 12), "dense", "")


def test_a_long_conversation_makes_the_cache_grow(model: Model) -> None:
    sample = replace(_sample(in_conversation=True), document=TEXT[:2000])
    turns = [replace(question, max_tokens=2000) for question in sample.questions]
    variants = parse_variants("dense,tokenselect", "10%", model.settings)
    runner = Runner(model.decoder, model.tokenizer, variants, LENGTH)
    small = replace(sample, questions=sample.questions[:1])
    short = runner.answers(model.prompts().make(small), variants)
    capacity = runner._cache.capacity
    runner._read(model.prompts().make(replace(sample, questions=tuple(turns))), 1)
    assert runner._cache.capacity > capacity
    assert runner.answers(model.prompts().make(small), variants) == short


def test_each_policy_keeps_its_captured_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = model.decoder
    variants = parse_variants(",".join(GENTLE), "10%,20%", model.settings)
    runner = Runner(decoder, model.tokenizer, variants, LENGTH)
    kept = []
    for number in (0, 1):
        runner.answers(model.prompts().make(_sample(number)), variants)
        policies = list(runner._policies.values())
        with monkeypatch.context() as patch:
            patch.setattr(ops, "on_triton", lambda x: True)
            kept.append([decoder.captured.step(runner._cache, policy, None) for policy in policies])
    assert [graph is None for graph in kept[0]] == [p.kernel_plan() is None for p in policies]
    assert len({id(graph) for graph in kept[0] if graph is not None}) == 9
    assert all(a is b for a, b in zip(*kept, strict=True))
    other = decoder.new_cache(LENGTH)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "on_triton", lambda x: True)
        assert decoder.captured.step(other, policies[0], None) not in kept[0]
        assert len(decoder.captured._steps) == 10, "those of a cache that lives are kept"
        decoder.captured.clear()
        decoder.captured.most = 1
        for policy in policies:
            decoder.captured.step(runner._cache, policy, None)
            assert len(decoder.captured._steps) == int(policy.kernel_plan() is not None)


@pytest.mark.gpu
def test_captured_steps_answer_alike_alone_and_in_turns(model_dir: Path) -> None:
    settings = Settings(model=str(model_dir), window_size=16)
    decoder = Decoder.load(model_dir, "cuda", "bfloat16")
    model = Model(decoder, Tokenizer.load(model_dir), ChatFormat.load(model_dir), settings)
    names = "dense,tokenselect,tokenselect:vote=group-max,tokenselect:index=exact,snapkv"
    variants = parse_variants(names, "10%,20%", settings)
    runner = Runner(decoder, model.tokenizer, variants, LENGTH)
    side_by_side = 0
    for number in range(3):
        for in_conversation in (False, True):
            prompt = model.prompts().make(_sample(number, in_conversation))
            together = runner.answers(prompt, variants)
            graphs = dict(decoder.captured._steps)
            side_by_side = side_by_side or len(graphs)
            alone = 0 if number == 0 and not in_conversation else len(variants)
            assert len(graphs) == side_by_side + alone and side_by_side < len(variants)
            assert runner.answers(prompt, variants) == together
            assert all(decoder.captured._steps[key] is graph for key, graph in graphs.items())
    another = Runner(decoder, model.tokenizer, variants, LENGTH)  # a cache of the same size
    for variant in variants:
        assert another.answers(prompt, [variant]) == {variant: together[variant]}


@dataclass
class Made:
    """A task of a few samples."""

    name: str = "made"
    num_samples: int = 100
    in_conversation: bool = False

    def sample(self, number: int, num_tokens: int, seed: int) -> Sample:
        if number >= self.num_samples:
            raise UsageError(f"there are {self.num_samples} samples")
        return replace(_sample(number + seed, self.in_conversation), task=self.name, number=number)


def _run(model: Model, folder: Path, request: Request) -> tuple[Outcome, list[Event]]:
    events: list[Event] = []
    cells = CellFolder(folder)
    rest = (model.tokenizer, model.chat, cells, events.append, events.append)
    return Grid(model.decoder, *rest).run(request), events


def _files(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def _request(model: Model, policies: str, num_samples: int, **changes: object) -> Request:
    variants = tuple(parse_variants(policies, "5%,20%", model.settings))
    tasks = (Made(), Made("talk", in_conversation=True))
    request = Request(tasks, (LENGTH,), variants, num_samples, 0, command="longread eval made")
    return replace(request, **changes)


def test_a_resumed_run_leaves_what_one_run_does(model: Model, tmp_path: Path) -> None:
    policies = "dense,tokenselect,snapkv"
    outcome, _ = _run(model, tmp_path / "whole", _request(model, policies, 3))
    assert (outcome.num_done, outcome.num_missing) == (6, 0)
    parts = tmp_path / "parts"
    stopped, _ = _run(model, parts, _request(model, policies, 3, limit_s=0.0))
    assert (stopped.num_done, stopped.num_missing) == (1, 5)
    _run(model, parts, _request(model, "snapkv", 2))
    rest, _ = _run(model, parts, _request(model, policies, 3))
    assert rest.num_done == 5
    again, _ = _run(model, parts, _request(model, policies, 3))
    assert again.num_done == 0
    assert [cell.to_json() for cell in again.cells] == [c.to_json() for c in outcome.cells]
    assert _files(parts) == _files(tmp_path / "whole")
    assert len(read_cells([parts])) == 2 * 5


def test_a_task_may_have_fewer_samples(model: Model, tmp_path: Path) -> None:
    tasks = (Made("few", num_samples=1), Made("none", num_samples=0), Made("many"))
    outcome, events = _run(model, tmp_path, _request(model, "dense", 3, tasks=tasks))
    assert {cell.key.task: len(cell.results) for cell in outcome.cells} == {"few": 1, "many": 3}
    told = [event.message for event in events if hasattr(event, "message")]
    assert len(told) == 2 and "few at 1,500, sample 1: there are 1 samples" in told
    with pytest.raises(UsageError, match="no task has a sample"):
        _run(model, tmp_path / "b", _request(model, "dense", 3, tasks=(Made("none", 0),)))


def test_a_share_counts_from_a_short_document_itself(model: Model) -> None:
    (variant,) = parse_variants("tokenselect", "10%", model.settings)
    runner = Runner(model.decoder, model.tokenizer, [variant], LENGTH)
    budgets = []
    for text in (TEXT[:600], TEXT[:1200], TEXT):
        prompt = model.prompts().make(_sample(text=text))
        runner.answers(prompt, [variant])
        (policy,) = runner._policies.values()
        is_about_as_long = len(prompt.document) >= 0.8 * LENGTH
        num_rows = LENGTH if is_about_as_long else len(prompt.document)
        assert policy.budget == -(-num_rows // 10)  # type: ignore[attr-defined]
        budgets.append(policy.budget)  # type: ignore[attr-defined]
    assert budgets[0] < budgets[1] < budgets[2] == LENGTH // 10


def test_long_answers_are_set_beside_denses_whichever_run_gave_it(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "COMPARED", ("made",))
    policies = "dense,tokenselect,snapkv"
    outcome, _ = _run(model, tmp_path / "whole", _request(model, policies, 2))
    dense = outcome.cells[0]
    assert dense.key.policy == "dense" and not dense.results[0].places
    encode = model.tokenizer.encode
    places = []
    for cell in outcome.cells[1:]:
        for number, own in cell.results.items():
            if cell.key.task == "talk":
                assert own.places == ()
                continue
            answers = zip(own.answers, dense.results[number].answers, strict=True)
            assert len(own.places) == len(QUESTIONS)
            for place, (answer, reference) in zip(own.places, answers, strict=True):
                places.append(place)
                assert (place is None) == (answer == reference)
                if place is not None:
                    ids, others = encode(answer), encode(reference)
                    assert ids[: place.token] == others[: place.token]
                    assert ids[place.token :][:1] != others[place.token :][:1]
    assert None in places and len(set(places)) > 2
    _run(model, tmp_path / "parts", _request(model, "snapkv,tokenselect", 2))
    (cell, *_) = read_cells([tmp_path / "parts"])
    assert not cell.results[0].places
    again, _ = _run(model, tmp_path / "parts", _request(model, policies, 2))
    assert [cell.to_json() for cell in again.cells] == [c.to_json() for c in outcome.cells]
    assert _files(tmp_path / "parts") == _files(tmp_path / "whole")


@pytest.mark.weights
def test_real_answers_are_those_of_a_session(smollm2_dir: Path, tmp_path: Path) -> None:
    settings = Settings(
        model=str(smollm2_dir), window_size=32, max_tokens=MAX_TOKENS, weights="bf16"
    )
    model = Model(
        Decoder.load(smollm2_dir, "cpu", "auto"),
        Tokenizer.load(smollm2_dir),
        ChatFormat.load(smollm2_dir),
        settings,
    )
    (variant,) = parse_variants("tokenselect", "100", settings)
    for in_conversation in (False, True):
        sample = _sample(in_conversation=in_conversation)
        said = model.answers(sample, "dense,tokenselect,snapkv", "100")
        expected = _of_a_session(settings, sample, tmp_path, variant)
        assert [answer.text for answer in said["tokenselect:window_size=32 100"]] == [
            text for text, _ in expected
        ]
        assert len(said) == 3 and all(answer.text for answer in said["dense"])
