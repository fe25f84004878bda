"""Coverage of what an answer copies: the rows, and which heads read them at which step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from test_evaluate_runner import GENTLE, LENGTH, OWN, TEXT, Model, _run, _sample
from torch import Tensor

from longread.config import Settings
from longread.document import Document, Page
from longread.evaluate import tables
from longread.evaluate.coreference import Coreference
from longread.evaluate.coverage import coverage, rows_of
from longread.evaluate.grid import Request
from longread.evaluate.groups import groups
from longread.evaluate.runner import Said
from longread.evaluate.task import Materials, Question, Sample
from longread.evaluate.together import Together
from longread.evaluate.variants import parse_variants
from longread.model import Decoder
from longread.policies import Dense, Policy, Streaming, TokenSelect
from longread.prompt import ChatFormat, build_prompt, tokenize_document
from longread.tokenizer import Tokenizer

NAME = "Velmarith"
QUESTION = "Who is it?"


@pytest.fixture
def model(settings: Settings) -> Model:
    path = Path(settings.model)
    decoder = Decoder.load(path, "cpu", "float32")
    return Model(decoder, Tokenizer.load(path), ChatFormat.load(path), settings)


def _asked(number: int = 0) -> Sample:
    """Two questions that copy a name in the middle of a text."""
    sample = _sample(number)
    middle = len(sample.document) // 2
    document = f"{sample.document[:middle]} {NAME}.{sample.document[middle:]}"
    questions = (
        Question(QUESTION, (NAME,), max_tokens=6, answer_prefix=" It is:", copied=NAME),
        Question("Where is it?", (NAME,), max_tokens=6, copied=NAME),
    )
    return replace(sample, document=document, questions=questions)


@pytest.mark.parametrize("text", ("We", NAME, "é of", "laws."))
def test_rows_are_the_tokens_that_touch_a_text(model: Model, text: str) -> None:
    document = f"We saw {NAME} at the café of laws."
    parts = Document("made", "", "text", "", 1, (Page(0, None, document),), ())
    tokenized = tokenize_document(model.tokenizer, parts)
    prompt = build_prompt(model.tokenizer, model.chat, [tokenized])
    rows = rows_of(text, document, prompt)
    ids = prompt.token_ids
    assert text in model.tokenizer.decode([int(ids[row]) for row in rows])
    for fewer in (rows[1:], rows[:-1]):
        assert text not in model.tokenizer.decode([int(ids[row]) for row in fewer])


@dataclass
class _Spied(TokenSelect):
    """Keeps what it selects, by the rows that are cached."""

    chosen: dict[int, list[Tensor]] = field(default_factory=dict)

    def select(self, layer_idx: int, q: Tensor, num_rows: int) -> Tensor | None:
        indices = super().select(layer_idx, q, num_rows)
        assert indices is not None
        self.chosen.setdefault(num_rows, []).append(indices)
        return indices


def _covered(
    model: Model, sample: Sample, policies: list[Policy], copied: list[int]
) -> tuple[list[dict[str, float]], range, int]:
    """The figures, the rows of the name, and the rows of document and question."""
    prompt = model.prompts().make(sample)
    cache = model.decoder.new_cache(2 * LENGTH)
    model.decoder.prefill(prompt.document, cache)
    group = Together(policies)
    group.prepare(cache)
    asked = prompt.questions[0]
    found = coverage(model.decoder, cache, group, asked, copied, prompt.copied[0])
    return found, prompt.copied[0], len(prompt.document) + len(asked)


@pytest.mark.parametrize("vote", ("group", "all", "none"))
def test_figures_are_those_of_what_is_selected(model: Model, vote: str) -> None:
    policy = _Spied(budget=200, window_size=16, vote=vote)
    copied = model.tokenizer.encode(f" {NAME}")
    sample = _asked()
    long = replace(sample.questions[0], copied=sample.document[700:900])
    sample = replace(sample, questions=(long,))
    (found,), rows, num_rows = _covered(model, sample, [policy], copied)
    config = model.decoder.config
    # A step for the question's last token, and one for each token of the name but the last.
    assert sorted(policy.chosen) == list(range(num_rows, num_rows + len(copied)))
    read: dict[tuple[int, int, int], set[int]] = {}
    for step, layers in sorted(policy.chosen.items()):
        assert len(layers) == config.num_hidden_layers
        for layer, indices in enumerate(layers):
            sets = [set(own) & set(rows) for own in indices.tolist()]
            for head in range(config.num_key_value_heads):
                share = len(sets) // config.num_key_value_heads
                own = sets[head * share : (head + 1) * share] if share else sets
                read[step, layer, head] = set().union(*own)
    first = [own for (step, _, _), own in read.items() if step == num_rows]
    assert found["coverage, heads"] == pytest.approx(sum(map(bool, first)) / len(first))
    share = sum(map(len, first)) / len(first) / len(rows)
    assert found["coverage, rows"] == pytest.approx(share)
    assert found["coverage, any"] == (set().union(*read.values()) == set(rows))
    assert 0 < found["coverage, rows"] < 1


def test_what_reads_all_covers_all_and_a_window_nothing(model: Model) -> None:
    copied = model.tokenizer.encode(f" {NAME}")
    policies = [
        Dense(),
        TokenSelect(budget=2 * LENGTH, window_size=16),
        Streaming(budget=32, window_size=16),
    ]
    found, _, _ = _covered(model, _asked(), policies, copied)
    assert [set(figures.values()) for figures in found] == [{1.0}, {1.0}, {0.0}]
    near = replace(_asked(), document=f"{TEXT[:2000]} {NAME}.")
    found, _, _ = _covered(model, near, [Streaming(budget=200, window_size=16)], copied)
    assert set(found[0].values()) == {1.0}


def _answers(model: Model, sample: Sample, policies: str) -> dict[str, list[Said]]:
    return model.answers(sample, policies, "10%")


def test_answers_are_as_without_coverage(model: Model) -> None:
    sample, policies = _asked(), ",".join((*GENTLE, *OWN))
    plain = replace(sample, questions=tuple(replace(q, copied="") for q in sample.questions))
    covered = _answers(model, sample, policies)
    assert {
        name: [replace(answer, measures={}) for answer in said] for name, said in covered.items()
    } == _answers(model, plain, policies)
    for name, said in covered.items():
        assert all(len(answer.measures) == 3 for answer in said), name
        if name.startswith(("dense", "xkv")):
            assert all(set(answer.measures.values()) == {1.0} for answer in said)
    # What is evicted for one question is there again for the next, which is asked by itself.
    for policy in OWN:
        alone = _answers(model, replace(sample, questions=sample.questions[1:]), policy)
        ((name, (answer,)),) = alone.items()
        assert answer == covered[name][1], name


def test_coreference_tells_the_coverage_of_its_name(model: Model, tmp_path: Path) -> None:
    encode = model.tokenizer.encode
    task = Coreference(Materials(lambda text: len(encode(text)), None, encode))
    sample = task.sample(0, LENGTH, 0)
    (question,) = sample.questions
    assert question.references == (question.copied,)
    variants = tuple(parse_variants("dense,streaming", "5%", model.settings))
    outcome, _ = _run(model, tmp_path, Request((task,), (LENGTH,), variants, 2, 0))
    (group,) = groups(outcome.cells)
    table = tables.measure_table(group, "coreference")
    assert table is not None
    assert [row[0] for row in table.rows] == [
        "name tokens",
        "coverage, heads",
        "coverage, rows",
        "coverage, any",
    ]
    assert {row[1:] for row in table.rows[1:]} == {("100.0 (2)", "0.0 (2)")}
    told = tables.summary(group)["variants"]
    assert isinstance(told, list)
    measures = [variant["tasks"]["coreference"]["measures"] for variant in told]
    assert [own["coverage, heads"] for own in measures] == [
        {"n": 2, "mean": 1.0},
        {"n": 2, "mean": 0.0},
    ]
