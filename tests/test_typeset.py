"""What is not read of typeset pages: leaders and page numbers, repeated heads, remarks."""

from __future__ import annotations

from longread import contents, continued, typeset
from longread.running import drop_running_lines

TITLES = [f"{i}.1 On matter number {i}" for i in range(1, 9)]


def book() -> list[str]:
    """A page of contents, an empty one, then eight pages, numbered from 1."""
    lines = [f"{title} . . . . . . . . . . . {i}" for i, title in enumerate(TITLES, start=1)]
    lines.insert(4, "5 Animals 5")
    pages = [f"{title}\nWhat there is to say.\nAnd more." for title in TITLES]
    return ["\n".join(["Contents", *lines, "9 Index 8"]), "", *pages]


def test_a_list_of_contents_loses_leaders_and_page_numbers() -> None:
    pages = book()
    kept = contents.drop_page_numbers(pages, range(len(pages)))
    wanted = [*TITLES]
    wanted.insert(4, "5 Animals")
    assert kept[0].split("\n") == ["Contents", *wanted, "9 Index"]
    assert kept[1:] == pages[1:]


def test_without_the_pages_it_names_a_list_keeps_its_numbers() -> None:
    pages = book()
    (kept,) = contents.drop_page_numbers(pages[:1], range(1))
    assert kept.split("\n")[1] == f"{TITLES[0]} ... 1"
    wrong = [pages[0], *pages[:1:-1]]
    kept, *_ = contents.drop_page_numbers(wrong, range(len(wrong)))
    assert kept.split("\n")[1] == f"{TITLES[0]} ... 1"


def test_amounts_after_leaders_stay() -> None:
    table = "Total\n" + "\n".join(f"Tax of {i} .......... {100 + i} {90 + i}" for i in range(6))
    rising = "\n".join(f"Item {i} .......... {100 + i}" for i in range(6))
    kept = contents.drop_page_numbers([table, rising], range(2))
    assert "Tax of 3 ... 103 93" in kept[0] and "Item 3 ... 103" in kept[1]
    ellipsis = "found no ground..... The suddenness. . . . of it"
    assert contents.drop_page_numbers([ellipsis], [0]) == [ellipsis]


def test_a_chapter_that_is_named_by_its_number_keeps_it() -> None:
    pages = book()
    pages[0] = pages[0].replace("5 Animals 5", "Chapter 5")
    kept, *_ = contents.drop_page_numbers(pages, range(len(pages)))
    assert "\nChapter 5\n" in kept


def test_a_page_of_dots_takes_no_time() -> None:
    contents.drop_page_numbers(
        [". " * 200_000, "." * 200_000 + "x", "a " + ". " * 100_000 + "b"], range(3)
    )


def test_the_head_of_a_table_stands_once() -> None:
    rows = [f"Row {i} of it 1 2" for i in range(12)]

    def page(i: int, head: str) -> str:
        return "\n".join([head, *rows[3 * i : 3 * i + 3], *(f"{i} and {j}" for j in range(6))])

    pages = [page(i, "Feature MUST\nNOT MAY") for i in range(4)]
    pages[2] = page(2, "Feature MUST MAY\nNOT")  # the same cells, read in another order
    kept = continued.drop_repeats(pages)
    assert kept[0] == pages[0]
    assert all(text.startswith(rows[3 * i]) for i, text in enumerate(kept) if i)
    # Two pages may begin alike by chance.
    assert continued.drop_repeats(pages[:2]) == pages[:2]


def test_remarks_that_something_goes_on_are_dropped_and_code_beside_them_stays() -> None:
    pages = [
        "def f():\n    return 1\n(continues on next page)",
        "(continued from previous page)\n    return 1\nA sentence continued on the next page.",
    ]
    assert continued.drop_repeats(pages) == [
        "def f():\n    return 1",
        "    return 1\nA sentence continued on the next page.",
    ]


def test_a_page_with_nothing_but_running_lines_is_empty() -> None:
    def page(i: int, body: str) -> str:
        return f"The Manual, Release 4\n{body}{i + 1}"

    pages = [page(i, f"Words of page {i},\nand more of {i},\nto its end {i}.\n") for i in range(12)]
    pages[5] = page(5, "")
    kept = drop_running_lines(pages, range(12))
    assert kept[5] == "" and kept[4] == "Words of page 4,\nand more of 4,\nto its end 4."
    assert kept[0].startswith("The Manual")
    # Where many pages would be empty, such lines are what they say.
    bare = [page(i, "") for i in range(12)]
    assert drop_running_lines(bare, range(12))[1:] == bare[1:]


def test_a_head_that_is_the_books_title_does_not_stand_a_second_time() -> None:
    body = "\nLine one of {0},\nand two of {0},\nand three {0}."
    pages = ["The Manual\nRelease 4", *(f"The Manual, Release 4{body.format(i)}" for i in range(9))]
    kept = drop_running_lines(pages, range(10))
    assert kept[0] == pages[0]
    assert not any("Release" in page for page in kept[1:])


def test_notes_are_placed_before_a_sentence_that_goes_on() -> None:
    bodies = ["One.[1]\nTwo goes", "on here.", "Done.", "No end", ""]
    notes = ["[1] Note.", "", "[2] Other.", "[3] Last.", ""]
    assert typeset.place_notes(bodies, notes) == [
        "One.[1]\n\n[1] Note.\n\nTwo goes",
        "on here.",
        "Done.\n\n[2] Other.",
        "No end\n\n[3] Last.",
        "",
    ]
