"""The tasks beside RULER's: what stands in a sample, its length, how an answer to it is scored."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from longread.errors import UsageError
from longread.evaluate import coreference_lists, needles
from longread.evaluate.book_text import NOVELS, BookText, cut, normal, units
from longread.evaluate.books_qa import BOOKS, BooksQA
from longread.evaluate.coreference import Coreference, token_accuracy
from longread.evaluate.follow_ups import FACTS, MAX_TOKENS, FollowUps
from longread.evaluate.long_answers import SHOWN, LongAnswers, drift
from longread.evaluate.long_qa import LONGBENCH, LongQA
from longread.evaluate.ruler_essay import BOOKS as PROSE
from longread.evaluate.task import ANSWER_ROOM, SCORINGS, Materials, Question, Sample, right_lines
from longread.evaluate.tasks import TASKS, make_tasks

SEED = 3
LENGTHS = (2000, 9000)
IN_NOVELS = ("needles", "coreference_far", "follow_ups")


def count_tokens(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def num_used(question: Question, document: str) -> int:
    return sum(map(count_tokens, (document, question.text, question.answer_prefix)))


@pytest.fixture(scope="module")
def novels(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    """Novels made up here: numbered sentences in lines, paragraphs and chapters."""
    folder = tmp_path_factory.mktemp("novels")
    for book, name in enumerate(NOVELS):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        sentences = [f"In book {book} Mr. Low saw\nwhale {number}." for number in range(1500)]
        parts = ["\n".join(sentences[start : start + 7]) for start in range(0, 1500, 7)]
        path.write_text("CHAPTER 1\n\n" + " \n\n\n".join(parts), encoding="utf-8")
    return Materials(count_tokens, folder)


def materials_of(folder: Path) -> Materials:
    return Materials(count_tokens, folder)


def samples_of(name: str, materials: Materials, num_tokens: int) -> list[Sample]:
    """All samples that a task has of a length."""
    task = TASKS[name](materials)
    samples: list[Sample] = []
    while True:
        try:
            samples.append(task.sample(len(samples), num_tokens, SEED))
        except UsageError as error:
            assert f"{len(samples)} samples" in str(error)
            return samples


@pytest.mark.parametrize(
    ("scoring", "references", "right", "wrong"),
    [
        ("all", ("a1", "B2"), "A1 and b2", "neither"),
        ("any", ("a1", "B2"), "it is b2.", "neither"),
        ("f1", ("The red house", "x"), "a red, house!", "no"),
        ("choice", ("BD",), "B, D", "B"),
        ("choice", ("C",), "The answer is C.", "Can it be D?"),
        ("choice", ("B",), "A detailed reading shows that B is right", "A"),
        ("choice", ("A",), "A The man went away", "A man went to B"),
        ("choice", ("B",), "Option A is wrong, so the answer is (B), not C", "The answers: A, B"),
        ("choice", ("B",), "A and D are wrong. The right option is: **B**", "A is right, B is not"),
        ("choice", ("B",), "B is right, not A.", "A because of B."),
        ("choice", ("B",), "It is not Vitamin C but B.", "Vitamin C is what B means"),
        ("choice", ("A",), "A\nBecause it is.", "A man came: B."),
        ("choice", ("A",), "(A) Because", "D'Artagnan"),
        ("choice", ("B",), "B\n\nQuestion: Why?\nAnswer: C", "C.\n\nThe answer is B"),
        ("choice", ("B",), "BADE or B", "BADE"),
        ("choice", ("ABD",), "A, B, and D", "A and D"),
        ("choice", ("ACD",), "I think that A, C and D are right", "I think that A, C are right."),
        ("words", ("8",), "No. 8, I think", "18"),
        ("words", ("1,000 feet",), "1000 feet", "1,000,000 feet"),
        ("words", ("thirty-four guineas", "34 guineas"), "Thirty four guineas.", "thirty guineas"),
        ("words", ("two thirds",), '"two-thirds"', "two and one third"),
        ("start", ("Velmarith",), "**velmarith**, it says", "It is Velmarith"),
        ("start", ("Velmarith",), "Velmarith", "Velmarithon"),
        ("refusal", (), "The text doesn't say.", "The horse is called Star."),
        ("refusal", (), "That is not mentioned anywhere.", "Not at all: it is twelve."),
        ("refusal", (), "The fee is not set.", "The law may not set a fee of 5 dollars."),
        ("refusal", (), "It does not give a number.", "He would not give it for 9 pounds."),
        ("refusal", (), "Unknown.", "A State shall not name or fix it before 1808."),
        ("refusal", (), "It can't be determined.", "Ships must not provide or include 3 of them."),
        ("refusal", (), "The book doesn\u2019t tell.", "She could not say more than two words."),
        ("lines", ("13. A: 1", "14. B: 2"), "13. A:  1\n14. B: 2", "13. A: 2\n14. B: 1"),
    ],
)
def test_scorings(scoring: str, references: tuple[str, ...], right: str, wrong: str) -> None:
    question = Question("?", references, scoring)
    assert question.score(right) == 1
    assert question.score(wrong) == 0
    assert question.score("") == 0


@pytest.mark.parametrize("scoring", sorted(set(SCORINGS) - {"refusal"}))
def test_without_references_no_answer_is_right(scoring: str) -> None:
    assert Question("?", (), scoring).score("anything") == 0


def test_scorings_in_part() -> None:
    assert Question("?", ("a1", "b2", "c3"), "all").score("b2") == pytest.approx(1 / 3)
    assert Question("?", ("one two three",), "f1").score("two") == pytest.approx(0.5)
    assert Question("?", ("1. A: 1", "2. B: 2"), "lines").score("1. A: 1") == 0.5


def test_right_lines_go_on_after_a_line_left_out() -> None:
    wanted = tuple(f"{place}. N{place % 4}: {place}" for place in range(1, 9))
    without = [*wanted[:2], *(f"{place}. N{place + 1}" for place in range(9))]
    assert right_lines("\n".join(without), wanted) == [True] * 2 + [False] * 6
    renumbered = [
        line.replace(f"{place}.", f"{place - 1}.") for place, line in enumerate(wanted, 1)
    ]
    skipped = [*wanted[:3], *renumbered[4:]]
    assert right_lines("\n".join(skipped), wanted) == [True] * 3 + [False] + [True] * 4
    assert sum(right_lines("\n".join(reversed(wanted)), wanted)) == 1


def test_units_are_the_text() -> None:
    text = normal("A  heading\n\nOne day\nMr. Low came. He said: “Go!” And\nso on.\n \n\nEnd")
    assert text == "A heading\n\nOne day Mr. Low came. He said: “Go!” And so on.\n\nEnd"
    found = units(text)
    assert "".join(found) == text
    assert found[1:3] == ["\n\nOne day Mr. Low came.", " He said: “Go!”"]
    assert units("") == []


@pytest.mark.parametrize("num_tokens", (0, 5, 6, 7, 100, 101))
def test_cut_takes_all_that_fits_and_goes_round(num_tokens: int) -> None:
    book = ["One two.", " Three four five.", " Six."]  # 3, 4 and 2 tokens
    taken = cut(book, 1, num_tokens, count_tokens)
    whole = [book[place % 3] for place in range(1, 60)]
    assert taken == whole[: len(taken)]
    assert count_tokens("".join(taken)) <= num_tokens
    assert count_tokens("".join(whole[: len(taken) + 1])) > num_tokens


def test_cut_uses_what_units_count_too_much() -> None:
    def joined(text: str) -> int:
        return 1 + len(text)  # as a tokenizer that begins each text with a token of its own

    assert len(cut(["ab"] * 9, 0, 13, joined)) == 5  # 4 by their own counts


def test_inserts_stand_at_their_depths(novels: Materials) -> None:
    text = BookText(novels)
    document = text.document(
        1, random.Random("x"), [(0.0, "AA."), (0.5, " BB."), (1.0, " CC.")], 4000
    )
    assert document.startswith("AA.")
    assert document.endswith(" CC.")
    assert document.index(" BB.") / len(document) == pytest.approx(0.5, abs=0.02)
    assert 3980 < count_tokens(document) <= 4000
    assert "In book 1 Mr. Low saw whale" in document
    with pytest.raises(UsageError, match="too few for a document that must hold 9"):
        text.document(1, random.Random("x"), [(0.5, "one two three " * 3)], 8)


@pytest.mark.parametrize("name", IN_NOVELS)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_samples_in_novels(name: str, num_tokens: int, novels: Materials) -> None:
    """References stand in the document once, and little of the length is left."""
    task = TASKS[name](novels)
    documents = set()
    for number in range(12):
        sample = task.sample(number, num_tokens, SEED)
        assert (sample.task, sample.number) == (name, number)
        assert sample == task.sample(number, num_tokens, SEED)
        for question in sample.questions:
            assert all(re.findall(rf"\b{r}\b", sample.document) for r in question.references)
            assert question.score(question.references[0]) == 1
            assert question.score("none") == 0
        used = max(num_used(question, sample.document) for question in sample.questions)
        least = num_tokens - (110 if sample.in_conversation else 30)
        assert least < used <= num_tokens
        documents.add(sample.document)
    assert len(documents) == 12
    assert task.sample(0, num_tokens, SEED + 1).document not in documents
    with pytest.raises(UsageError, match="too few"):
        task.sample(0, 60, SEED)


def test_needles_are_alike_and_at_their_depths(novels: Materials) -> None:
    seen = []
    for number in range(20):
        sample = TASKS["needles"](novels).sample(number, 6000, SEED)
        (question,) = sample.questions
        found = re.findall(r"The (\w+) code of (\w+) is (\d{6})\.", sample.document)
        assert len(found) == len(set(found)) == needles.NUM_NEEDLES
        assert all(len(set(column)) == needles.NUM_NEEDLES for column in zip(*found, strict=True))
        asked = re.fullmatch(r"What is the (\w+) code of (\w+)\?", question.text)
        assert asked is not None
        assert (*asked.groups(), *question.references) in found
        depth = float(question.kind.removeprefix("depth ").removesuffix("%"))
        seen.append(depth)
        place = sample.document.index(question.references[0]) / len(sample.document)
        assert place == pytest.approx(depth / 100, abs=0.02)
    assert seen == list(needles.DEPTHS) * 2
    wordings = needles.ADJECTIVES + needles.NAMES
    assert len(set(wordings)) == len(wordings)


def test_follow_ups_ask_for_what_the_last_turn_skipped(novels: Materials) -> None:
    task = FollowUps(novels)
    firsts = set()
    for number in range(12):
        sample = task.sample(number, 3000, SEED)
        assert sample.in_conversation
        assert [turn.kind for turn in sample.questions] == ["turn 1", "turn 2", "turn 3"]
        assert len({turn.text for turn in sample.questions}) == 3
        asked = "".join(turn.text for turn in sample.questions)
        read = count_tokens(sample.document) + count_tokens(asked) + 2 * MAX_TOKENS
        assert 2970 < read <= 3000
        places = {}
        for fact in FACTS:
            words = {key: rf"(?P<{key}>(?:\w+ )?\w+)" for key in ("of", "value")}
            pattern = re.escape(fact.statement).replace(r"\{", "{").replace(r"\}", "}")
            found = re.search(rf"(?<=\s){pattern.format(**words)}(?=\s|$)", sample.document)
            if found:
                question = fact.question.format(**found.groupdict())
                places[question] = (found.start(), found["value"])
        order = [question for question, _ in sorted(places.items(), key=lambda item: item[1])]
        assert len(order) == 6
        at = [order.index(turn.text) for turn in sample.questions]
        assert all(abs(one - next_) > 1 for one, next_ in zip(at, at[1:], strict=False))
        for turn in sample.questions:
            assert turn.references == (places[turn.text][1],)
            assert turn.references[0].lower() not in asked.lower()
        firsts.add(at[0])
    assert len(firsts) > 3


def test_facts_are_told_apart() -> None:
    for fact in FACTS:
        assert ("{of}" in fact.question) == ("{of}" in fact.statement) == (fact.of != ("",))
        assert "{value}" in fact.statement and "{value}" not in fact.question
        assert len(set(fact.values)) == len(fact.values) >= 6


def test_coreference_at_its_own_length() -> None:
    task = Coreference(Materials(count_tokens))  # needs no files
    for number in range(20):
        sample = task.sample(number, 1000, SEED)
        (question,) = sample.questions
        (name,) = question.references
        assert sample.document.count(name) == 1
        assert name not in question.text + question.answer_prefix
        place = next(
            i for i, (said, _) in enumerate(coreference_lists.PLACES) if said in sample.document
        )
        said, asked = coreference_lists.PLACES[place]
        assert sample.document.startswith(f"{said} {name}. ")
        assert (question.answer_prefix, question.text.split("?")[0]) == (f"{asked}:", asked)
        assert 250 < num_used(question, sample.document) < 400
        assert (question.scoring, question.score(f" {name}.")) == ("any", 1)
    with pytest.raises(UsageError, match="tokens, not 200"):
        task.sample(0, 200, SEED)


def test_coreference_far_puts_a_novel_between(novels: Materials) -> None:
    near = TASKS["coreference"](novels).sample(4, 800, SEED)
    far = TASKS["coreference_far"](novels).sample(4, 5000, SEED)
    assert near.questions == far.questions
    name, rest = near.questions[0].references[0], near.document.partition(". ")[2]
    before, after = far.document.split(name)
    assert len(before) < 150 and after.endswith(rest)
    assert "Mr. Low saw whale" in after and count_tokens(after) > 4900


def test_names_are_chosen_by_their_tokens() -> None:
    def count(text: str) -> int:
        return 4 if text == " Ubrexil" else 2

    task = Coreference(Materials(count))
    assert {task.sample(n, 100, SEED).questions[0].references for n in range(9)} == {("Ubrexil",)}


def test_coreference_lists_are_of_our_own_and_whole() -> None:
    lists = coreference_lists
    for texts in (lists.PLACES, lists.NAMES, lists.PHILOSOPHY, lists.FOOD, lists.MATH):
        assert len(set(texts)) == len(texts) > 20
    for said, asked in lists.PLACES:
        assert not said.endswith(".") and not asked.endswith("?")
    assert all(re.fullmatch("[A-Z][a-z]+", name) for name in lists.NAMES)
    assert all(text.endswith(".") for text in lists.PHILOSOPHY + lists.FOOD + lists.MATH)


def test_token_accuracy() -> None:
    def encode(text: str) -> list[int]:
        return [ord(char) for char in text[1:]]

    assert token_accuracy("  abcd, it is", "abcd", encode) == 1
    assert token_accuracy("abxd", "abcd", encode) == 0.75
    assert token_accuracy("ab", "abcd", encode) == 0.5
    assert token_accuracy("", "abcd", encode) == 0


def test_coreference_measures_the_tokens_of_the_name() -> None:
    def encode(text: str) -> list[int]:
        return [ord(char) for char in text[1:]]

    sample = Coreference(Materials(count_tokens, None, encode)).sample(0, 2000, SEED)
    (question,) = sample.questions
    (name,) = question.references
    assert question.measure is not None
    assert question.measure(name) == {"name tokens": 1.0}
    half = name[: len(name) // 2]
    assert question.measure(half) == {"name tokens": len(half) / len(name)}
    (unmeasured,) = Coreference(Materials(count_tokens)).sample(0, 2000, SEED).questions
    assert unmeasured.measure is None and unmeasured == question


def test_drift_tells_where_along_the_answer_the_right_lines_are() -> None:
    wanted = tuple(f"{n}. name {n}: {n + 20}" for n in range(1, 11))
    found = drift("\n".join([*wanted[:4], "5. name 5: 1", *wanted[5:7]]), wanted)
    assert list(found.values()) == [1.0, 1.0, 0.5, 0.5, 0.0]
    assert list(found)[0] == "part 1 of 5"


BOOK_LENGTHS = (600, 3000, 12_000, 200_000)


@pytest.mark.parametrize("num_tokens", BOOK_LENGTHS)
def test_books_ask_each_question_once_where_it_is_answered(num_tokens: int, evaldata: Path) -> None:
    samples = samples_of("books", materials_of(evaldata), num_tokens)
    questions = [question for sample in samples for question in sample.questions]
    assert len({question.text for question in questions}) == len(questions) == 36
    assert [question.kind for question in questions].count("unanswerable") == 6
    assert len(samples) == 3 if num_tokens == 200_000 else len(samples) > 3
    for sample in samples:
        assert not sample.in_conversation
        for question in sample.questions:
            assert num_used(question, sample.document) <= num_tokens
            answerable = question.kind == "answerable"
            assert question.scoring == ("words" if answerable else "refusal")
            assert question.score("The text does not state it.") == (not answerable)
            # What answers stands in the document, so quoting all of that would be right.
            assert question.score(sample.document) == 1 or not answerable
        if len(sample.questions) < 10:  # not a whole book
            longest = max(num_used(question, sample.document) for question in sample.questions)
            assert longest > 0.9 * num_tokens


def test_books_by_seed(evaldata: Path) -> None:
    task = BooksQA(materials_of(evaldata))
    one, other = (task.sample(0, 3000, seed) for seed in (1, 2))
    assert one == BooksQA(materials_of(evaldata)).sample(0, 3000, 1)
    assert one.document != other.document
    with pytest.raises(UsageError, match="no passage of books fits in 20 tokens"):
        task.sample(0, 20, 1)


@pytest.mark.parametrize("num_tokens", BOOK_LENGTHS)
def test_counterfactual_books_are_changed_everywhere(num_tokens: int, evaldata: Path) -> None:
    edits = {}
    for path in (evaldata / "books/qa").glob("*.json"):
        for question in json.loads(path.read_text(encoding="utf-8"))["questions"]:
            if "counterfactual" in question:
                edits[question["question"]] = (question["counterfactual"], question["answers"])
    samples = samples_of("books_counterfactual", materials_of(evaldata), num_tokens)
    asked = {question.text: sample for sample in samples for question in sample.questions}
    assert asked.keys() == edits.keys()
    for sample in samples:
        for question in sample.questions:
            edit, answers = edits[question.text]
            assert edit["find"] not in sample.document
            assert edit["replace"] in sample.document
            assert question.references[0] == edit["new_answer"]
            assert question.score(f"It was {edit['new_answer']}.") == 1
            assert not any(question.score(answer) for answer in answers)
            assert num_used(question, sample.document) <= num_tokens
    if num_tokens == 200_000:
        (abbey,) = {asked[text].document for text in edits if "lodge" in text}
        assert "Pulteney" not in abbey
        assert abbey.count("Larkhall Street") == 14


def test_long_answers_are_right_by_what_is_told(novels: Materials) -> None:
    task = LongAnswers(novels, max_tokens=600)
    sample = task.sample(1, 3000, SEED)
    (question,) = sample.questions
    tens = "twenty thirty forty fifty sixty seventy eighty ninety".split()
    ones = "one two three four five six seven eight nine".split()
    told = re.findall(r"Visitor (\d+) was (\w+ \w+) with (.+?)\.", sample.document)
    numbers: dict[str, int] = {}
    lines, num_far = [], 0
    last: dict[str, int] = {}
    for place, (number, name, words) in enumerate(told, 1):
        if words == "as many sheep as before":
            num_far += place - last[name] > 15
        else:
            assert name not in numbers
            ten, one = words.removesuffix(" sheep").split("-")
            numbers[name] = 10 * (tens.index(ten) + 2) + ones.index(one) + 1
        last[name] = place
        lines.append(f"{number}. {name}: {numbers[name]}")
        assert int(number) == place
    shown = len(SHOWN)
    assert question.answer_prefix == "".join(f"{line}\n" for line in lines[:shown])
    assert question.references == tuple(lines[shown:])
    assert 580 < sum(count_tokens(line) for line in lines[shown:]) <= 600
    assert num_far > len(told) / 5
    assert question.max_tokens == 600
    room = 3000 - (600 - ANSWER_ROOM)  # a length counts the answer too
    assert room - 50 < num_used(question, sample.document) <= room

    answer = [line.partition(" ")[2] for line in question.references]
    assert question.score("\n".join(lines[shown:])) == question.score("\n".join(answer)) == 1
    half = len(answer) // 2
    assert question.score("\n".join(answer[:half])) == half / len(answer)
    assert question.score("\n".join(line.replace(":", ": 1") for line in answer)) == 0
    assert sample == task.sample(1, 3000, SEED)
    with pytest.raises(UsageError, match="answers of more than 20 tokens"):
        dataclasses.replace(task, max_tokens=20).sample(0, 3000, SEED)


def test_long_answers_outlast_the_names(novels: Materials) -> None:
    sample = LongAnswers(novels, max_tokens=4000).sample(0, 13000, SEED)
    assert len(sample.questions[0].references) > 400


@pytest.fixture
def collected(tmp_path: Path) -> Materials:
    """Files in the forms of L-Eval, LooGLE and LongBench, one document of each too long."""

    def write(name: str, *rows: dict[str, object]) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    short, long = "One\u2028two three.", "word " * 3000
    for name, outputs in {
        "coursera": ["BD", "A"],
        "quality": ["(B) Because", "(C) No"],
        "natural_question": ["April 25", "13"],
    }.items():
        rows = [
            {"input": text, "instructions": ["Q one?", "Q two?"], "outputs": outputs}
            for text in (long, short, short)
        ]
        write(f"longqa/leval/{name}.jsonl", *rows)
    pairs = [{"Q": "Where?", "A": "In Rome.", "type": "computation"}, {"Q": "Who?", "A": 4}]
    write("longqa/loogle/longdep_qa.jsonl", {"input": short, "qa_pairs": repr(pairs)})
    masked = [{"Q": "<mask-0> met <mask-1>.", "A": "{'<mask-0>': 'Ann', '<mask-1>': 'Ben'}"}]
    write("longqa/loogle/shortdep_cloze.jsonl", {"input": short, "qa_pairs": repr(masked)})
    for name in LONGBENCH:
        row = {"input": "Who {was} it?", "context": short, "answers": ["Ann", "Anna"], "length": 3}
        write(f"longbench/{name}.jsonl", row | {"context": long}, row)
    return materials_of(tmp_path)


def test_leval(collected: Materials) -> None:
    for name, right in {
        "leval_coursera": [("BD",), ("A",)],
        "leval_quality": [("B",), ("C",)],
        "leval_natural_question": [("April 25",), ("13",)],
    }.items():
        samples = samples_of(name, collected, 500)
        assert [sample.document for sample in samples] == ["One\u2028two three."] * 2
        questions = samples[0].questions
        assert [question.references for question in questions] == right
        assert [question.text.split("\n")[0] for question in questions] == ["Q one?", "Q two?"]
        assert all(question.score(f"{question.references[0]}") == 1 for question in questions)
        assert len(samples_of(name, collected, 4000)) == 3


def test_loogle(collected: Materials) -> None:
    (sample,) = samples_of("loogle_longdep_qa", collected, 500)
    assert [question.kind for question in sample.questions] == ["computation", ""]
    assert sample.questions[0].score("in rome") == 1
    assert sample.questions[1].references == ("4",)
    (sample,) = samples_of("loogle_shortdep_cloze", collected, 500)
    assert [q.answer_prefix for q in sample.questions] == ["<mask-0> is", "<mask-1> is"]
    assert [q.score("Ben.") for q in sample.questions] == [0, 1]
    assert all(q.text.startswith("<mask-0> met <mask-1>.\n") for q in sample.questions)


@pytest.mark.parametrize("name", LONGBENCH)
def test_longbench(name: str, collected: Materials) -> None:
    (sample,) = samples_of(f"longbench_{name}", collected, 500)
    (question,) = sample.questions
    assert question.text.count("Who {was} it?") == 1
    assert "Question:" not in question.text + sample.document  # the wrapper brings it
    ending = LONGBENCH[name].ending
    assert sample.document == "One\u2028two three." + (f"\n\n{ending}" if ending else "")
    assert ending.endswith((" words.", "Do not provide any explanation.")) or (
        name == "passage_retrieval_en" and question.text.startswith("The following is an abstract.")
    )
    assert question.references == ("Ann", "Anna")
    assert question.score("Anna") == 1


def test_documents_are_counted_as_far_as_they_are_asked_for(collected: Materials) -> None:
    task = TASKS["leval_natural_question"](collected)
    task.sample(0, 4000, SEED)
    assert isinstance(task, LongQA) and list(task._num_tokens) == [0]


def test_collected_files_that_are_missing_or_damaged(tmp_path: Path, collected: Materials) -> None:
    with pytest.raises(UsageError, match="needs longqa/leval/coursera.jsonl.*--data"):
        TASKS["leval_coursera"](Materials(count_tokens)).sample(0, 500, SEED)
    path = tmp_path / "longbench/hotpotqa.jsonl"
    number = '{"input": "Who?", "context": 7, "answers": ["Ann"]}'
    for damaged in ('{"input": "', '{"input": "Who?"}', "[]", "7", number):
        path.write_text(f"\n{damaged}\n", encoding="utf-8")
        with pytest.raises(UsageError, match=r"line 2 of .*hotpotqa.jsonl is not of the form"):
            TASKS["longbench_hotpotqa"](collected).sample(0, 500, SEED)


def test_collected_questions_are_all_read(evaldata: Path) -> None:
    """Each file's questions, and of each an answer that is right."""
    numbers = {}
    for name in TASKS:
        if name.startswith(("leval", "loogle")):
            samples = samples_of(name, materials_of(evaldata), 10**9)
            questions = [question for sample in samples for question in sample.questions]
            numbers[name] = (len(samples), len(questions))
            assert all(question.score(question.references[0]) == 1 for question in questions), name
            assert all(question.max_tokens <= 128 for question in questions)
    assert numbers == {
        "leval_coursera": (15, 172),
        "leval_quality": (15, 202),
        "leval_topic_retrieval_longchat": (50, 150),
        "leval_natural_question": (21, 109),
        "leval_multidoc_qa": (23, 158),
        "leval_financial_qa": (8, 68),
        "leval_legal_contract_qa": (23, 154),
        "loogle_shortdep_qa": (5, 80),
        "loogle_longdep_qa": (5, 43),
        "loogle_shortdep_cloze": (5, 184),
    }


_PRINT_DIGEST = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_evaluate_tasks import digest_of, materials_of
print(digest_of(materials_of(Path(sys.argv[2]))))
"""


def digest_of(materials: Materials) -> str:
    tasks = make_tasks([*IN_NOVELS, "coreference", "long_answers"], materials)
    samples = [task.sample(number, 9000, SEED) for task in tasks for number in (0, 7)]
    return hashlib.sha256(repr(samples).encode()).hexdigest()


def test_samples_are_the_same_in_any_process(novels: Materials) -> None:
    assert novels.folder is not None
    arguments = [_PRINT_DIGEST, str(Path(__file__).parent), str(novels.folder)]
    other = subprocess.run(
        [sys.executable, "-c", *arguments],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == digest_of(novels)


NEED_NO_DATA = (
    *("coreference", "vt", "cwe", "fwe", "niah_single_1", "niah_multikey_2", "niah_multikey_3"),
)


@pytest.mark.parametrize("name", TASKS)
def test_missing_data_is_told_before_anything_is_read(name: str, tmp_path: Path) -> None:
    if name in NEED_NO_DATA:
        assert make_tasks([name], Materials(count_tokens))[0].name == name
        return
    with pytest.raises(UsageError, match="this task needs .*--data"):
        make_tasks([name], Materials(count_tokens))
    with pytest.raises(UsageError, match="has no such file"):
        make_tasks([name], materials_of(tmp_path))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    (
        ("books/qa/us_constitution.json", "{", "does not hold the questions of books"),
        ("books/qa/us_constitution.json", '{"questions": [7]}', "does not hold the questions"),
        ("books/qa/us_constitution.json", '{"questions": [{"question": "Q"}]}', "does not hold"),
        (
            "books/qa/us_constitution.json",
            '{"questions": [{"question": "Q", "answerable": 1, "evidence": "One.", "answers": 7}]}',
            "does not hold the questions of books",
        ),
        ("books/qa/us_constitution.json", "", "is empty"),
        ("books/txt/us_constitution.txt", "We the People.", "lacks what answers 'How old"),
        ("books/txt/us_constitution.txt", None, "cannot be read as text"),
    ),
)
def test_damaged_books_are_named(
    file: str, damage: str | None, message: str, tmp_path: Path
) -> None:
    asked = {
        "question": "How old must a Senator be?",
        "answers": ["thirty"],
        "evidence": "A Senator must be thirty.",
        "answerable": True,
    }
    for folder in ("qa", "txt"):
        (tmp_path / "books" / folder).mkdir(parents=True)
    for name in BOOKS:
        (tmp_path / f"books/qa/{name}.json").write_text(json.dumps({"questions": [asked]}))
        (tmp_path / f"books/txt/{name}.txt").write_text("One.\nA Senator must be thirty. Two.")
    assert BooksQA(materials_of(tmp_path)).sample(0, 500, SEED).questions[0].score("thirty") == 1
    (tmp_path / file).write_bytes(b"\xff\xfe\xff" if damage is None else damage.encode())
    with pytest.raises(UsageError, match=f"{file}.* {message}"):
        BooksQA(materials_of(tmp_path)).sample(0, 500, SEED)


@pytest.mark.parametrize("content", (b"\xff\xfe", b" \n"))
def test_damaged_texts_are_named(content: bytes, tmp_path: Path) -> None:
    for name in (*NOVELS, *PROSE, "longqa/leval/coursera.jsonl", "ruler/squad.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for task in ("needles", "niah_single_2", "leval_coursera", "qa_1"):
        with pytest.raises(UsageError, match=r"(txt|json|jsonl) (cannot be read as|is empty)"):
            make_tasks([task], materials_of(tmp_path))[0].sample(0, 500, SEED)


def test_table_of_names(novels: Materials) -> None:
    assert novels.folder is not None
    for name in ("shortdep_qa", "longdep_qa", "shortdep_cloze"):
        path = novels.folder / f"longqa/loogle/{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    materials = novels
    chosen = make_tasks(["needles", "loogle", "coreference", "needles"], materials)
    assert [task.name for task in chosen] == [
        "needles",
        "loogle_shortdep_qa",
        "loogle_longdep_qa",
        "loogle_shortdep_cloze",
        "coreference",
    ]
    for wrong, hint in (("needle", "did you mean needles"), ("@", "there are all, ruler, leval")):
        with pytest.raises(UsageError, match=hint):
            make_tasks([wrong], materials)


def test_every_task_bears_its_name(evaldata: Path) -> None:
    tasks = make_tasks(["all"], materials_of(evaldata))
    names = [task.name for task in tasks]
    assert names == [name for name in TASKS if not name.startswith("longbench_")]
    assert len(set(names)) == len(names) > 25
