"""RULER's 13 tasks: what stands in a sample, how long it is, and that it is always the same."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from longread.errors import UsageError
from longread.evaluate.ruler import TASKS
from longread.evaluate.ruler_essay import BOOKS, Essay, sentences
from longread.evaluate.ruler_length import longest
from longread.evaluate.ruler_needles import NOISE
from longread.evaluate.ruler_words import WordLists
from longread.evaluate.task import Materials, Question, Sample

NUM_TOKENS = 4000
SEED = 1
NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.(?=\s|\Z)")
NIAH = [name for name in TASKS if name.startswith("niah")]
NUM_NEEDLES = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}
NUM_REFERENCES = {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3}
MAX_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
NUM_QUESTIONS = {"qa_1": 48, "qa_2": 12}


def count_tokens(text: str) -> int:
    return len(text) // 4


def write_data(folder: Path) -> None:
    """Books and questions made up here, in the form of the real ones."""
    for book, name in enumerate(BOOKS):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (f"In chapter {i} of book {book} Mr. Low\nsaw ship {i}." for i in range(2000))
        path.write_text("\n".join(lines), encoding="utf-8")
    (folder / "ruler").mkdir()
    articles = []
    for article in range(12):
        paragraphs = []
        for number in range(4):
            code = f"{article}x{number}"
            text = f"The bridge number {code} was built by Builder{code}. " + "It is long. " * 30
            asked = {
                "question": f"Who built bridge {code}?",
                "answers": [{"text": f"Builder{code}", "answer_start": 0}],
                "is_impossible": False,
            }
            without = {"question": "Why?", "answers": [], "is_impossible": True}
            paragraphs.append({"context": text, "qas": [without, asked]})
        articles.append({"title": str(article), "paragraphs": paragraphs})
    (folder / "ruler/squad.json").write_text(json.dumps({"data": articles}), encoding="utf-8")
    asked = [
        {
            "question": f"Which river crosses town {number}?",
            "answer": f"River{number}",
            "context": [
                [
                    f"Town {number}.{part}",
                    [f"River{number} is here.", f" It has {part} bridges." * 9],
                ]
                for part in range(10)
            ],
        }
        for number in range(12)
    ]
    (folder / "ruler/hotpotqa.json").write_text(json.dumps(asked), encoding="utf-8")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaldata")
    write_data(folder)
    return folder


Make = Callable[..., Sample]


@pytest.fixture(scope="module")
def make(data: Path) -> Make:
    """Makes a sample of a task from the data of this file."""
    tasks = {name: task(Materials(count_tokens, data)) for name, task in TASKS.items()}

    def sample(name: str, number: int = 0, num_tokens: int = NUM_TOKENS) -> Sample:
        return tasks[name].sample(number, num_tokens, SEED)

    return sample


def length(sample: Sample) -> int:
    question = sample.questions[0]
    return count_tokens(sample.document) + count_tokens(question.text + question.answer_prefix)


def body(sample: Sample) -> str:
    """The document without the solved example before it."""
    if sample.task not in ("vt", "cwe"):
        return sample.document
    start = sample.document[:20]
    return sample.document[sample.document.rindex(start) :]


def listed_words(text: str) -> list[str]:
    """The words of a numbered list, whose numbers must count up from 1."""
    items = re.findall(r"(\d+)\. (.+?)(?= \d+\. |\s*$)", text, re.DOTALL)
    assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
    return [word for _, word in items]


def test_ruler_has_13_tasks() -> None:
    assert list(TASKS) == [
        *("niah_single_1", "niah_single_2", "niah_single_3"),
        *("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
        *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
    ]


@pytest.mark.parametrize("num_tokens", [NUM_TOKENS, 7001, 16_000])
@pytest.mark.parametrize("name", TASKS)
def test_samples_are_full_and_hold_their_answers(make: Make, name: str, num_tokens: int) -> None:
    sample = make(name, 3, num_tokens)
    assert (sample.task, sample.number) == (name, 3)
    (question,) = sample.questions
    assert 0.95 * num_tokens < length(sample) <= num_tokens
    assert len(question.references) == NUM_REFERENCES.get(name, 1)
    assert all(reference in body(sample) for reference in question.references)
    assert question.max_tokens == MAX_TOKENS.get(name, 128)
    assert question.scoring == ("any" if name.startswith("qa") else "all")
    assert question.answer_prefix.startswith(" ")
    assert not sample.document.endswith("\n")  # the wrapper of the question brings an empty line
    assert question.text not in body(sample)
    assert question.score(", ".join(question.references)) == 1
    assert question.score("I do not know.") == 0


@pytest.mark.parametrize("name", TASKS)
def test_real_data(evaldata: Path, name: str) -> None:
    sample = TASKS[name](Materials(count_tokens, evaldata)).sample(5, 6000, SEED)
    assert 0.9 * 6000 < length(sample) <= 6000
    assert all(reference in body(sample) for reference in sample.questions[0].references)


@pytest.mark.parametrize("name", TASKS)
def test_samples_differ_by_number(make: Make, name: str) -> None:
    samples = [make(name, number) for number in range(5)]
    assert len({sample.questions for sample in samples}) == 5
    assert len({sample.document for sample in samples}) == 5


@pytest.mark.parametrize("name", ["niah_single_2", "vt", "cwe", "fwe", "qa_1"])
def test_seeds_give_other_samples(data: Path, name: str) -> None:
    task = TASKS[name](Materials(count_tokens, data))
    assert task.sample(0, NUM_TOKENS, 1).document != task.sample(0, NUM_TOKENS, 2).document


def digest(folder: Path) -> str:
    """Of the first samples of all tasks."""
    hashed = hashlib.sha256()
    for make_task in TASKS.values():
        hashed.update(repr(make_task(Materials(count_tokens, folder)).sample(1, 4096, 7)).encode())
    return hashed.hexdigest()


def test_other_processes_make_the_same_samples(data: Path) -> None:
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import test_ruler; "
        "print(test_ruler.digest(pathlib.Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(data)]
    runs = [subprocess.run(command, capture_output=True, text=True) for _ in range(2)]
    assert [run.stdout.strip() for run in runs] == [digest(data)] * 2, runs[0].stderr


def test_samples_stay_what_they_are(make: Make) -> None:
    """So results stay comparable over versions of Python and of the word lists."""
    assert make("vt").questions[0].references == ("XZCDZ", "EYVFF", "JRSTS", "WCIWA", "EMUXC")
    assert make("fwe").questions[0].references == ("djfnaa", "olqkzg", "bytgcw")
    needle = "One of the special magic numbers for efficient-reprocessing is: 8726858."
    assert needle in make("niah_single_1").document


@pytest.mark.parametrize("name", NIAH)
def test_needles(make: Make, name: str) -> None:
    sample = make(name)
    (question,) = sample.questions
    kind = "uuids" if name in ("niah_single_3", "niah_multikey_3") else "numbers"
    needles = NEEDLE.findall(sample.document)
    assert {found for found, _, _ in needles} == {kind}
    values = [value for _, _, value in needles]
    assert len(set(values)) == len(values)
    if name in ("niah_multikey_2", "niah_multikey_3"):
        lines = sample.document.splitlines()
        assert len(needles) == len(lines) - 1 > 40  # all but the first line
        assert len({key for _, key, _ in needles}) == len(needles)
    else:
        assert len(needles) == NUM_NEEDLES.get(name, 1)
    asked = [key for _, key, _ in needles if key in question.text]
    assert len(asked) == len(question.references)
    assert {value for _, key, value in needles if key in asked} == set(question.references)
    one = len(question.references) == 1
    assert sample.document.startswith("A special magic" if one else "Some special magic")
    assert question.text.startswith("What is the" if one else "What are all the")
    assert question.answer_prefix.endswith("text is" if one else "text are")
    assert (kind[:-1] if one else kind) in question.text.split()


def test_keys_and_values_of_needles(make: Make) -> None:
    def first(name: str) -> tuple[str, str, str]:
        return NEEDLE.findall(make(name).document)[0]

    uuid4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    _, key, value = first("niah_multikey_3")
    assert re.fullmatch(uuid4, key) and re.fullmatch(uuid4, value)
    _, key, value = first("niah_multikey_2")
    assert re.fullmatch(r"[1-9]\d{6}", value) and key.count("-") >= 1
    # The values of one key, and the keys of one question, in the words of RULER.
    assert re.search(
        r"for (\S+), (\S+), (\S+), and (\S+) men", make("niah_multiquery").questions[0].text
    )
    assert len({key for _, key, _ in NEEDLE.findall(make("niah_multivalue").document)}) == 1
    assert len({key for _, key, _ in NEEDLE.findall(make("niah_multiquery").document)}) == 4


def test_noise_is_whole_lines(make: Make) -> None:
    lines = make("niah_single_1", num_tokens=2000).document.splitlines()[1:]
    assert sum(line == NOISE for line in lines) == len(lines) - 1


def test_prose_is_the_first_words_of_the_books(make: Make, data: Path) -> None:
    context = make("niah_multivalue").document.split("\n", 1)[1].strip()
    prose = re.sub(r"One of the special magic numbers for .+? is: \d{7}\. ?", "", context).split()
    book = " ".join((data / name).read_text(encoding="utf-8") for name in BOOKS).split()
    assert prose == book[: len(prose)]
    before = re.split(r" ?One of the special magic", context)[:-1]
    # Needles stand between sentences.
    assert all(not text or text.endswith(".") for text in before)


def test_needles_stand_at_all_depths(make: Make) -> None:
    def depth(number: int) -> float:
        document = make("niah_single_2", number, 1500).document
        return document.index("One of the special") / len(document)

    depths = [depth(number) for number in range(60)]
    assert min(depths) < 0.15 and max(depths) > 0.9
    assert 0.35 < sum(depths) / len(depths) < 0.7


def test_sentences() -> None:
    text = 'Mr. A. Low came.  "Why?" asked\nshe. "Go!" He went... Was it 1.5 km? No.'
    found = sentences(text)
    assert found == [
        "Mr. A. Low came.",
        '"Why?" asked she.',
        '"Go!"',
        "He went...",
        "Was it 1.5 km?",
        "No.",
    ]
    assert sentences("  ") == []


def test_a_text_begins_again_past_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("One two. Three four five.", encoding="utf-8")
    essay = Essay.load([path])
    assert essay.first(0) == []
    assert essay.first(3) == ["One two.", "Three"]
    assert " ".join(essay.first(13)).split() == "One two. Three four five.".split() * 2 + [
        *("One", "two.", "Three")
    ]


def test_a_chain_leads_from_the_value_to_all_names(make: Make) -> None:
    sample = make("vt", 2)
    (question,) = sample.questions
    example, task = sample.document.split("\n\nMemorize")
    lines = [line for line in task.splitlines() if line.startswith("VAR ")]
    value = re.search(r"the value (\d{5}) in the text", question.text)
    assert value is not None
    assert lines[0] == f"VAR {question.references[0]} = {value[1]}"
    for line, (old, new) in zip(lines[1:], pairwise(question.references), strict=True):
        assert line == f"VAR {new} = VAR {old} "
    assert len(set(question.references)) == 5
    assert all(re.fullmatch("[A-Z]{5}", name) for name in question.references)
    assert set(task.splitlines()[2:]) - set(lines) == {NOISE}
    # The example: its own chain of short names, with the answer.
    names = example.rsplit(": ", 1)[1].split()
    assert len(names) == 5 and all(re.fullmatch("[A-Z]{3}", name) for name in names)
    assert all(f"VAR {new} = VAR {old} \n" in example for old, new in pairwise(names))
    assert 400 < count_tokens(example) < 500


@pytest.mark.parametrize(
    ("num_tokens", "repeats", "example_repeats", "example_words"),
    [(NUM_TOKENS, (30, 3), (10, 3), 40), (2000, (6, 1), (3, 1), 20)],
)
def test_cwe_counts(
    make: Make,
    num_tokens: int,
    repeats: tuple[int, int],
    example_repeats: tuple[int, int],
    example_words: int,
) -> None:
    sample = make("cwe", 0, num_tokens)
    (question,) = sample.questions

    def check(listing: str, common: tuple[str, ...], repeats: tuple[int, int]) -> int:
        counts = Counter(listed_words(listing))
        assert {counts.pop(word) for word in common} == {repeats[0]}
        assert set(counts.values()) == {repeats[1]}
        return len(counts) + len(common)

    example, task = sample.document.split("\nBelow")
    _, shown, solved = example.split("\n")
    answers = listed_words(solved.split("list are:")[1])
    assert solved.startswith(f"Question: {question.text}{question.answer_prefix} 1. ")
    assert len(answers) == 10
    assert check(shown, tuple(answers), example_repeats) == example_words
    assert check(task.split("\n")[1], question.references, repeats) > 20


def test_cwe_makes_words_where_the_lists_end() -> None:
    lists = WordLists.load()
    words = lists.at_least(100)
    more = lists.at_least(len(words) + 1)
    assert more[: len(words)] == words == sorted(set(words))
    made = more[len(words) :]
    assert len(made) == len(words) and len(set(more)) == len(more)
    assert all(re.fullmatch("([a-z][aeiou]){2,4}", word) for word in made)
    assert lists.at_least(len(words) + 1) == more


@pytest.mark.parametrize("num_tokens", [600, NUM_TOKENS])
def test_fwe_counts_fall_with_the_square_of_the_rank(make: Make, num_tokens: int) -> None:
    sample = make("fwe", 0, num_tokens)
    (question,) = sample.questions
    counts = Counter(sample.document.split("coded words. ")[1].split())
    ranked = counts.most_common()
    assert ranked[0][0] == "..."
    assert tuple(code for code, _ in ranked[1:4]) == question.references
    assert counts[question.references[2]] > ranked[4][1]
    assert all(re.fullmatch("[a-z]{6}", code) for code, _ in ranked[1:])
    for rank in (2, 3, 4):
        assert ranked[rank - 1][1] == pytest.approx(ranked[0][1] / rank**2, abs=1)
    assert len(ranked) <= num_tokens // 50


def documents(sample: Sample) -> list[str]:
    parts = re.split(r"Document (\d+):\n", sample.document)
    assert [int(number) for number in parts[1::2]] == list(range(1, len(parts) // 2 + 1))
    *texts, last = (text.strip() for text in parts[2::2])
    instruction = sample.document.split("\n\n", 1)[0]
    assert last.endswith(instruction)
    return [*texts, last.removesuffix(instruction).strip()]


def number_of(make: Make, name: str, query: str) -> int:
    """The sample of this file's seed that asks a question."""
    texts = [make(name, number).questions[0].text for number in range(NUM_QUESTIONS[name])]
    return texts.index(query)


def test_questions_go_round_articles_and_paragraphs(make: Make, data: Path) -> None:
    asked = [make("qa_1", number, 300).questions[0].text for number in range(48)]
    bridges = [re.findall(r"\d+", text) for text in asked]
    for start in range(0, 48, 12):
        assert len({article for article, _ in bridges[start : start + 12]}) == 12
    assert len(set(asked)) == 48
    task = TASKS["qa_1"](Materials(count_tokens, data))
    others = [task.sample(number, 300, SEED + 1).questions[0].text for number in range(48)]
    assert set(others) == set(asked) and others[:12] != asked[:12]
    # The same questions at every length, so that lengths compare.
    assert [make("qa_1", number, 2000).questions[0].text for number in range(5)] == asked[:5]


def test_a_paragraph_comes_twice_only_after_all_others(data: Path, tmp_path: Path) -> None:
    squad = json.loads((data / "ruler/squad.json").read_text(encoding="utf-8"))
    for article in squad["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["qas"] *= 3
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler/squad.json").write_text(json.dumps(squad), encoding="utf-8")
    task = TASKS["qa_1"](Materials(count_tokens, tmp_path))
    asked = [task.sample(number, 300, SEED).questions[0].text for number in range(144)]
    assert all(len(set(asked[start : start + 48])) == 48 for start in range(0, 144, 48))


def test_prompts_are_those_of_ruler(make: Make) -> None:
    """With the wrapper of prompt.py; a star stands for a value of the sample."""
    ends = {
        "niah_single_1": (
            "again.\n\nQuestion: What is the special magic number for * mentioned in the "
            "provided text? The special magic number for * mentioned in the provided text "
            "is"
        ),
        "vt": (
            "again.\n\nQuestion: Find all variables that are assigned the value * in the "
            "text above. Answer: According to the chain(s) of variable assignment in the "
            "text above, 5 variables are assigned the value *, they are: "
        ),
        "cwe": (
            "\n\nQuestion: What are the 10 most common words in the above list? Answer: The"
            " top 10 words that appear most often in the list are:"
        ),
        "fwe": (
            "\n\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text? "
            "Answer: According to the coded text above, the three most frequently appeared "
            "words are:"
        ),
        "qa_1": (
            "\n\nAnswer the question based on the given documents. Only give me the answer "
            "and do not output any other words.\n\nQuestion: Who built bridge *? Answer:"
        ),
    }
    for name in TASKS:
        sample = make(name)
        (question,) = sample.questions
        prompt = f"{sample.document}\n\nQuestion: {question.text}{question.answer_prefix}"
        assert prompt.count("Question: ") == (2 if name in ("vt", "cwe") else 1), name
        end = re.escape(ends.get(name, "")).replace(r"\*", r"\S+")
        assert re.search(rf"{end}\Z", prompt), prompt[-400:]


def test_squad_takes_the_rest_of_the_article_first(make: Make) -> None:
    place = number_of(make, "qa_1", "Who built bridge 1x2?")
    sample = make("qa_1", place)
    found = documents(sample)
    assert len(found) == len(set(found)) > 20
    own = {f"The bridge number 1x{number} was" for number in range(4)}
    assert own == {text[: len("The bridge number 1x0 was")] for text in found if " 1x" in text}
    assert own != {text[: len("The bridge number 1x0 was")] for text in found[:4]}
    few = documents(make("qa_1", place, 500))
    assert 1 < len(few) <= 4 and all(" 1x" in text for text in few)


def test_hotpotqa_keeps_the_ten_paragraphs(make: Make) -> None:
    found = documents(make("qa_2", number_of(make, "qa_2", "Which river crosses town 4?")))
    towns = [f"Town 4.{part}\nRiver4 is here. It has {part} bridges." for part in range(10)]
    assert all(sum(text.startswith(town) for text in found) == 1 for town in towns)
    assert len(found) == len(set(found)) > 10


def test_past_the_last_paragraph_only_others_are_repeated(make: Make) -> None:
    place = number_of(make, "qa_1", "Who built bridge 1x2?")
    found = Counter(documents(make("qa_1", place, 16_000)))
    gold = [text for text in found if "number 1x2" in text]
    assert len(found) == 48 and found[gold[0]] == 1
    assert set(found.values()) <= {1, 2, 3, 4} and max(found.values()) > 1


def test_one_long_paragraph_does_not_leave_the_prompt_short(data: Path, tmp_path: Path) -> None:
    asked = json.loads((data / "ruler/hotpotqa.json").read_text(encoding="utf-8"))
    asked[0]["context"][0][1].append("Long. " * 1500)
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler/hotpotqa.json").write_text(json.dumps(asked), encoding="utf-8")
    task = TASKS["qa_2"](Materials(count_tokens, tmp_path))
    for number in range(12):
        sample = task.sample(number, NUM_TOKENS, SEED)
        is_own = sample.questions[0].text == "Which river crosses town 0?"
        assert ("Long." in sample.document) == is_own
        assert length(sample) > 0.9 * NUM_TOKENS or is_own


def test_a_file_of_one_question(data: Path, tmp_path: Path) -> None:
    asked = json.loads((data / "ruler/hotpotqa.json").read_text(encoding="utf-8"))
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler/hotpotqa.json").write_text(json.dumps(asked[:1]), encoding="utf-8")
    with pytest.raises(UsageError, match="no paragraphs to hide those of sample 0 among"):
        TASKS["qa_2"](Materials(count_tokens, tmp_path)).sample(0, NUM_TOKENS, SEED)


@pytest.mark.parametrize("name", NUM_QUESTIONS)
def test_no_question_is_asked_twice(make: Make, name: str) -> None:
    last = NUM_QUESTIONS[name] - 1
    assert len({make(name, number).questions for number in range(last + 1)}) == last + 1
    with pytest.raises(UsageError, match=f"ask for at most {last + 1} samples"):
        make(name, last + 1)


@pytest.mark.parametrize("name", ["niah_single_2", "niah_multikey_1", "qa_1", "qa_2"])
def test_missing_data(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--data"):
        TASKS[name](Materials(count_tokens))
    with pytest.raises(UsageError, match="no such file"):
        TASKS[name](Materials(count_tokens, tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", '{"data": [{}]}', '{"data": []}'])
def test_a_file_of_other_data(tmp_path: Path, text: str) -> None:
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler/squad.json").write_text(text)
    with pytest.raises(UsageError, match="does not hold the questions of qa_1"):
        TASKS["qa_1"](Materials(count_tokens, tmp_path))


@pytest.mark.parametrize("name", ["niah_single_1", "vt", "fwe"])
def test_the_others_need_no_data(name: str) -> None:
    assert TASKS[name](Materials(count_tokens)).sample(0, 2000, SEED).document


@pytest.mark.parametrize("name", ["niah_single_1", "cwe"])
def test_without_word_lists(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    monkeypatch.delitem(sys.modules, "wonderwords.assets", raising=False)
    with pytest.raises(UsageError, match=re.escape("pip install 'longread[eval]'")):
        TASKS[name](Materials(count_tokens))


@pytest.mark.parametrize("name", TASKS)
def test_too_short(make: Make, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} takes .* tokens or more, not 60"):
        make(name, 0, 60)


@pytest.mark.parametrize("name", TASKS)
def test_texts_are_counted_a_few_times(data: Path, name: str) -> None:
    counted = []

    def count(text: str) -> int:
        counted.append(len(text) // 4)
        return counted[-1]

    TASKS[name](Materials(count, data)).sample(0, 16_000, SEED)
    assert sum(counted) < 6 * 16_000


@pytest.mark.parametrize("limit", [13, 14, 99, 100, 101, 5000])
@pytest.mark.parametrize("cost", [lambda n: n, lambda n: 7 * n // 2, lambda n: int(n**1.2)])
def test_the_longest_sample_that_fits(limit: int, cost: Callable[[int], int]) -> None:
    def build(units: int) -> Sample:
        return Sample("t", 0, "x" * (5 + cost(units)), (Question("", ()),))

    found = len(longest(build, len, limit, least=2, step=3).document)
    sizes = [5 + cost(units) for units in range(2, 6000, 3)]
    best = max(place for place, size in enumerate(sizes) if size <= limit)
    # Where each step costs more than the one before, the last may be taken for too long.
    assert sizes.index(found) in ((best - 1, best) if cost(1000) > 3500 else (best,))
