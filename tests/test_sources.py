"""`longread eval sources`: BM25, ways to rank, copying heads, the run, its file and its tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longread.cli import main
from longread.config import Settings
from longread.errors import StoreError, UsageError
from longread.evaluate import sources
from longread.evaluate.bm25 import bm25, coverage, words
from longread.evaluate.books_qa import BOOKS, BooksQA
from longread.evaluate.copy_heads import calibration, copying_heads
from longread.evaluate.source_ranks import METHODS, Looked, Method, first_place
from longread.evaluate.source_results import (
    SourceFile,
    place_figures,
    place_table,
    support_figures,
    support_table,
)
from longread.evaluate.sources import (
    BM25,
    CITED,
    METHOD_NAMES,
    SUPPORT,
    Sourced,
    SourceRunner,
    in_pages,
    samples,
)
from longread.evaluate.task import Materials
from longread.evaluate.variants import parse_variants
from longread.evidence import least_support
from longread.model import Decoder
from longread.prompt import ChatFormat
from longread.tokenizer import Tokenizer

Capture = pytest.CaptureFixture[str]
PORTS = ("Marsk", "Harwick", "Norrby", "Stavern", "Tolmin", "Vardo")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three books of six harbours each, two of which are asked for."""
    for folder in ("qa", "txt"):
        (tmp_path / "data/books" / folder).mkdir(parents=True)
    for number, book in enumerate(BOOKS):
        facts = [
            f"The wall of {port} number {number} was built in the year {1700 + 10 * number + at}."
            for at, port in enumerate(PORTS)
        ]
        filler = [f"The road to {port} goes along the river and over the hill." for port in PORTS]
        text = " ".join(f"{one} {two}" for one, two in zip(facts, filler, strict=True))
        asked = [
            {
                "question": f"When was the wall of {PORTS[at]} number {number} built?",
                "answers": [str(1700 + 10 * number + at)],
                "evidence": facts[at],
                "answerable": True,
            }
            for at in (1, 4)
        ]
        asked.append({"question": f"Who paid for book {number}?", "answerable": False})
        books = tmp_path / "data/books"
        (books / f"txt/{book}.txt").write_text(text)
        (books / f"qa/{book}.json").write_text(json.dumps({"questions": asked}))
    return tmp_path / "data"


@pytest.fixture
def tools(model_dir: Path) -> tuple[Decoder, Tokenizer, ChatFormat]:
    decoder = Decoder.load(model_dir, "cpu", "float32")
    return decoder, Tokenizer.load(model_dir), ChatFormat.load(model_dir)


def _task(tokenizer: Tokenizer, data: Path) -> BooksQA:
    return BooksQA(Materials(lambda text: len(tokenizer.encode(text)), data, tokenizer.encode))


def test_bm25_likes_rare_words_short_passages_and_what_is_said_often() -> None:
    passages = [
        "The keeper of the light.",
        "The light and the wall and the harbour of the town.",
        "Harbour.",
        "Nothing of the kind.",
    ]
    by_rare = bm25("keeper light", passages)
    assert by_rare[0] > by_rare[1] > by_rare[2] == by_rare[3] == 0.0
    by_len = bm25("harbour", passages)
    assert by_len[2] > by_len[1] > 0.0
    more = bm25("light", ["light here now", "light light now"])
    assert more[1] > more[0]
    assert bm25("HARBOUR!", passages) == by_len
    assert bm25("a", []) == [] and bm25("", passages) == [0.0] * 4


def test_bm25_is_the_formula() -> None:
    # N = 2, n = 1: idf = log(1 + 1.5 / 1.5); both passages have the mean length.
    (score, other) = bm25("a", ["a b", "b c"])
    assert score == pytest.approx(0.6931471805599453 * 2.5 / 2.5) and other == 0.0
    assert words("Don't 1,000 naïve_") == ["don", "t", "1", "000", "naïve"]


def test_coverage_is_the_share_of_the_questions_words() -> None:
    passages = ["the keeper", "the light", "the wall"]
    assert coverage("the keeper", passages, passages[:1]) == 1.0
    assert 0.0 < coverage("the keeper", passages, passages[1:]) < 0.2  # "the" is everywhere
    assert coverage("", passages, passages) == 0.0


def _looked() -> Looked:
    """Passage 0 draws attention always, 1 for the question, 2 for the answer; head 1 copies."""
    asked, said, blank = (torch.zeros(1, 2, 6) for _ in range(3))
    blank[0, 0, 0:2] = 0.4
    asked[0, 0, 0:2] = 0.4
    asked[0, 0, 2:4] = 0.15
    said[0, 0, 0:2] = 0.8
    said[0, 1, 4] = 0.6
    return Looked(
        asked=asked,
        said=said,
        num_said=2,
        blank=blank,
        copying=torch.tensor([[0.1, 0.9]]),
        starts=torch.tensor([0, 2, 4]),
        ends=torch.tensor([2, 4, 6]),
    )


@pytest.mark.parametrize(
    ("method", "best"),
    [
        (Method(), 0),
        (Method(passage="max"), 0),
        (Method(copying=True), 2),
        (Method(tokens="question"), 0),
        (Method(contrast="less"), 2),
        (Method(contrast="heads"), 2),
        (Method(contrast="ratio"), 2),
        (Method(contrast="less", tokens="question"), 1),
        (Method(contrast="less", tokens="answer"), 2),
    ],
)
def test_what_each_method_likes_best(method: Method, best: int) -> None:
    assert int(method.scores(_looked()).argmax()) == best


def test_scores_are_those_of_the_formula() -> None:
    looked = _looked()
    both = [(0.8 + 1.6) / 3, 0.3 / 3, 0.6 / 3]
    assert Method().scores(looked).tolist() == pytest.approx(both)
    assert Method(passage="mean").scores(looked).tolist() == pytest.approx([b / 2 for b in both])
    assert Method(passage="max").scores(looked).tolist() == pytest.approx([0.4, 0.05, 0.2])
    less = [both[0] - 0.8, *both[1:]]
    assert Method(contrast="less").scores(looked).tolist() == pytest.approx(less, abs=1e-7)
    one_token = replace(looked, num_said=0, said=torch.zeros(1, 2, 6))
    asked = Method(tokens="question").scores(one_token)
    assert torch.equal(Method(tokens="answer").scores(one_token), asked)
    assert torch.equal(Method().scores(one_token), asked)


def test_methods_have_names_of_their_own() -> None:
    names = [method.name for method in METHODS]
    assert len(set(names)) == len(names) == len(METHOD_NAMES) - 3
    assert names[0] == "attention" and "question only, less blank" in names


def test_first_place() -> None:
    assert first_place([2, 0, 1], [False, True, False]) == 3
    assert first_place([2, 0], [False, True, False]) == 0


def test_the_calibration_text_holds_what_it_asks_for() -> None:
    text, facts = calibration()
    assert (text, facts) == calibration()
    for fact, question, answer in facts:
        assert text.count(fact) == 1 and answer in fact
        assert question.endswith("?")


def test_copying_is_a_share_of_each_head(tools: tuple[Decoder, Tokenizer, ChatFormat]) -> None:
    decoder = tools[0]
    weights = copying_heads(*tools)
    config = decoder.config
    assert weights.shape == (config.num_hidden_layers, config.num_key_value_heads)
    assert ((weights > 0) & (weights < 1)).all()


def test_pages_are_the_text() -> None:
    text = "some words of a text " * 300 + "x" * 4000
    pages = in_pages(text)
    assert "".join(page.text for page in pages) == text
    assert max(len(page.text) for page in pages) <= sources.PAGE_CHARS
    assert [page.page_idx for page in pages] == list(range(len(pages)))
    assert pages[0].text.endswith(" ")


def test_documents_are_asked_of_what_they_lack_too(
    tools: tuple[Decoder, Tokenizer, ChatFormat], data: Path
) -> None:
    task = _task(tools[1], data)
    found = list(samples(task, 400, 100, 0))
    assert len(found) == task.num_samples(400) >= 3
    assert list(samples(task, 400, 2, 0))[0].number == 0
    for sample in found:
        kinds = [question.kind for question in sample.questions]
        assert kinds.count("elsewhere") == 2 and "answerable" in kinds
        for question in sample.questions:
            inside = question.evidence in sample.document
            assert (
                inside if question.kind == "answerable" else question.evidence == "" or (not inside)
            )


@pytest.mark.parametrize("policy", ["tokenselect", "dense", "snapkv"])
def test_every_method_places_the_gold_passage(
    policy: str, tools: tuple[Decoder, Tokenizer, ChatFormat], data: Path, settings: Settings
) -> None:
    decoder, tokenizer, chat = tools
    (variant,) = parse_variants(policy, "20%", settings)
    runner = SourceRunner(decoder, tokenizer, chat, variant)
    sample = next(samples(_task(tokenizer, data), 900, 1, 0))
    found = runner.ask(sample)
    assert [one.question for one in found] == [question.text for question in sample.questions]
    for one, question in zip(found, sample.questions, strict=True):
        assert SUPPORT in one.signs and one.kind == question.kind
        if one.kind != "answerable":
            assert one.places == {} and one.right == 0.0
            continue
        assert tuple(one.places) != () and set(one.places) == set(METHOD_NAMES)
        for name, (page, quote) in one.places.items():
            assert 1 <= page <= quote or name == CITED
        assert one.places[BM25][1] == 1  # number and name stand in that passage alone
        cited, less = one.places[CITED], one.places["less blank"]
        assert cited == less or cited[1] == 0
    assert found == runner.ask(sample)


def _sourced(kind: str, right: float, support: float, places: tuple[int, int] = (0, 0)) -> Sourced:
    found = dict.fromkeys(METHOD_NAMES, places) if kind == "answerable" else {}
    return Sourced("Q?", kind, "A", right, found, {SUPPORT: support, "other": support + 1})


LENGTH = 16_384
LEAST = least_support(LENGTH)
RESULTS = (
    _sourced("answerable", 1.0, 0.5, (1, 1)),
    _sourced("answerable", 1.0, 0.3, (3, 4)),
    _sourced("answerable", 0.0, LEAST / 2, (0, 0)),
    _sourced("answerable", 0.0, 0.2, (5, 7)),
    _sourced("unanswerable", 0.0, LEAST / 4),
    _sourced("elsewhere", 0.0, 0.4),
)


def test_figures_of_places() -> None:
    answered = [one for one in RESULTS if one.kind == "answerable"]
    assert place_figures(answered, CITED) == (0.25, 0.5, 0.75, 0.25)
    assert place_figures([], CITED) == (None,) * 4
    table = place_table("here", RESULTS)
    assert "% of 2 questions answered right and of all 4" in table.title
    assert table.rows[0] == (CITED, "50", "100", "100", "50", "25", "50", "75", "25")


def test_figures_of_support() -> None:
    figures = support_figures(RESULTS, SUPPORT, LENGTH)
    assert figures == {
        "AUC": pytest.approx(5 / 8),
        "below": LEAST,
        "told": 0.5,
        "precision": 0.5,
        "marked of right": 0.0,
    }
    other = support_figures(RESULTS, "other", LENGTH)
    assert other["AUC"] == figures["AUC"]
    assert other["told"] is not None and other["told"] >= 0.5
    table = support_table("here", RESULTS, LENGTH)
    assert table.rows[0] == (SUPPORT, "0.62", f"{LEAST:.3g}", "50", "50", "0")
    assert support_figures((), SUPPORT, LENGTH)["AUC"] is None


def test_results_are_kept_and_those_of_others_left_alone(tmp_path: Path) -> None:
    key = {"model": "a b/c", "length": 10, "policy": "dense", "seed": 0, "dtype": "float32"}
    SourceFile(tmp_path, key).add(3, RESULTS)
    assert [path.name for path in tmp_path.iterdir()] == ["a-b-c-10-dense-0.sources"]
    again = SourceFile(tmp_path, key)
    assert again.samples == {3: list(RESULTS)}
    again.add(1, RESULTS[:1])
    assert list(SourceFile(tmp_path, key).samples) == [1, 3]
    with pytest.raises(StoreError, match="give another --out"):
        SourceFile(tmp_path, key | {"dtype": "bfloat16"})
    next(tmp_path.iterdir()).write_text("{")
    with pytest.raises(StoreError, match="move it away"):
        SourceFile(tmp_path, key)


def test_the_command_prints_tables_and_goes_on(
    capsys: Capture, model_dir: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["eval", "sources", "--lengths", "600", "--samples", "2", "--data", str(data)]
    command += ["--model", str(model_dir), "--dtype", "float32", "--out", str(tmp_path / "out")]
    assert main([*command, "--limit-seconds", "0"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["samples_missing"] == 2
    assert main(command) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("hf at 600 tokens, tokenselect 20%, seed 0: gold")
    assert lines[1].split()[:4] == ["ranked", "by", "right:page@1", "right:page@3"]
    assert [line for line in lines if line.startswith("BM25, question ")]
    record = json.loads(lines[-1])
    assert record["samples_missing"] == 0
    found = record["lengths"]["600"]
    assert set(found["methods"]) == set(METHOD_NAMES)
    assert found["questions"]["elsewhere"] == 4
    monkeypatch.setattr(SourceRunner, "ask", None)  # all of it is stored
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == lines[:-1]


def test_what_cannot_be_measured_is_refused(capsys: Capture, model_dir: Path, data: Path) -> None:
    command = ["eval", "sources", "--model", str(model_dir), "--data", str(data)]
    for more in (["--policies", "dense"], ["--budgets", "5%"]):
        assert main([*command, *more]) == UsageError.exit_code
        assert "leave other tasks, --policies and --budgets out" in capsys.readouterr().err
    assert main(["eval", "books,sources", *command[2:]]) == UsageError.exit_code
    assert "by themselves" in capsys.readouterr().err
    for context in ("select", "yarn"):
        assert main([*command, "--context", context]) == UsageError.exit_code
        assert f"leave --context {context} out" in capsys.readouterr().err
    assert main([*command, "--lengths", "130"]) == UsageError.exit_code
    assert "no excerpt of 130 tokens holds a passage" in capsys.readouterr().err
    assert main([*command, "--lengths", "20000"]) == UsageError.exit_code
    assert "over the window of the model, which is 16,384" in capsys.readouterr().err
    assert main(command[:-2]) == UsageError.exit_code
    assert "name its folder with --data" in capsys.readouterr().err
