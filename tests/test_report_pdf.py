"""The PDF report: sources highlighted where they stand, or an error that says what to do."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pypdfium2
import pytest
from fake_session import FakeServices, make_answer
from pypdf import PdfReader, PdfWriter
from pypdf.annotations import FreeText
from pypdf.generic import RectangleObject
from small_pdf import make_writer, show, to_bytes

from longread import pdf_highlights, report_pdf
from longread.cli import main
from longread.errors import DocumentError, UsageError
from longread.events import Citation
from longread.pdf_highlights import Quote, find_rects, highlighted
from longread.pdf_layout import Char
from longread.pdf_pdfium import LockedError

CONSTITUTION = Path(__file__).parent.parent / "sample_docs/us_constitution.pdf"
QUOTE = (
    "Ratified May 7, 1992 No law varying the compensation for the services of the Senators and "
    "Representatives shall take effect, until an election of Representatives shall have intervened."
)


def highlights(data: bytes, page_idx: int) -> list[dict]:
    annotations = PdfReader(io.BytesIO(data)).pages[page_idx].get("/Annots", [])
    found = [annotation.get_object() for annotation in annotations]
    return [annotation for annotation in found if annotation["/Subtype"] == "/Highlight"]


def text_under(data: bytes, page_idx: int, annotation: dict) -> str:
    """What PDFium reads in the annotation's boxes."""
    corners = [float(corner) for corner in annotation["/QuadPoints"]]
    page = pypdfium2.PdfDocument(data)[page_idx].get_textpage()
    boxes = [corners[i : i + 8] for i in range(0, len(corners), 8)]
    return " ".join(page.get_text_bounded(box[0], box[5], box[2], box[1]) for box in boxes)


def line_of(text: str, top: float = 700.0) -> list[Char]:
    """Characters of six points' width on one line."""
    return [Char(char, 6.0 * i, top - 10, 6.0 * i + 6, top) for i, char in enumerate(text)]


def test_highlights_lie_over_the_quotes() -> None:
    data = CONSTITUTION.read_bytes()
    copy, found = highlighted(
        data, [Quote(11, QUOTE, "Source 1"), Quote(0, "not a word of it at all", "Source 2")]
    )
    assert found == [True, False]
    (annotation,) = highlights(copy, 11)
    assert "".join(text_under(copy, 11, annotation).split()) == "".join(QUOTE.split())
    assert annotation["/Contents"] == "Source 1"
    assert len(annotation["/QuadPoints"]) == 3 * 8
    assert not highlights(copy, 0)
    old, new = PdfReader(io.BytesIO(data)), PdfReader(io.BytesIO(copy))
    assert [page.extract_text() for page in old.pages] == [p.extract_text() for p in new.pages]
    assert report_pdf.MARK in copy and report_pdf.MARK not in data


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
@pytest.mark.parametrize("origin", [(0, 0), (-50, 100)])
def test_turned_and_shifted_pages(rotation: int, origin: tuple[int, int]) -> None:
    writer = make_writer([show("The captain of the ship is called Voss.")])
    writer.pages[0].rotate(rotation)
    box = RectangleObject((origin[0], origin[1], origin[0] + 612, origin[1] + 792))
    writer.pages[0].mediabox = writer.pages[0].cropbox = box
    copy, found = highlighted(to_bytes(writer), [Quote(0, "the ship is called", "x")])
    assert found == [True]
    (annotation,) = highlights(copy, 0)
    left, bottom, right, top = (float(side) for side in annotation["/Rect"])
    assert 72 < left < right < 400
    assert 690 < bottom < 700 < top < 715
    assert text_under(copy, 0, annotation).strip() == "the ship is called"


def test_annotations_that_were_there_stay() -> None:
    writer = make_writer([show("The captain is Voss.")])
    writer.add_annotation(0, FreeText(text="mine", rect=(50, 550, 200, 650)))
    copy, _ = highlighted(to_bytes(writer), [Quote(0, "captain is", "x")])
    annotations = PdfReader(io.BytesIO(copy)).pages[0]["/Annots"]
    assert [a.get_object()["/Subtype"] for a in annotations] == ["/FreeText", "/Highlight"]


def test_spaces_hyphens_case_and_ligatures_do_not_matter() -> None:
    chars = line_of("An of\ufb01cial docu-") + line_of("ment is here", 680.0)
    rects = find_rects(chars, "OFFICIAL  document")
    assert [round(rect[0]) for rect in rects] == [18, 0]
    assert [rect[3] for rect in rects] == [700.0, 680.0]


def test_a_quote_with_something_taken_out_is_found_in_runs() -> None:
    page = "The captain of the ship17 was called Voss, and the ship was lost"
    (rect,) = find_rects(line_of(page), "captain of the ship was called Voss, and the ship")
    assert rect[0] == 24.0
    assert find_rects(line_of(page), "captain of a fleet, whose name nobody could tell") == []
    assert find_rects(line_of(page), " ") == []
    assert find_rects([], "captain") == []


def locked(user: str, owner: str) -> bytes:
    writer = PdfWriter(clone_from=PdfReader(CONSTITUTION))
    writer.encrypt(user, owner, algorithm="AES-256")
    return to_bytes(writer)


@pytest.mark.parametrize(("user", "owner"), [("secret", "secret"), ("", "owner")])
def test_encrypted_files_are_refused(user: str, owner: str) -> None:
    data = locked(user, owner)
    with pytest.raises(LockedError):
        pdf_highlights.check_can_be_copied(data)
    with pytest.raises(UsageError, match="a.pdf is encrypted, and a copy .* ends in .html"):
        report_pdf.check_document(data, "a.pdf")


def test_damaged_files_are_an_error() -> None:
    with pytest.raises(DocumentError, match=r"a.pdf cannot be copied with highlights: .* \.html"):
        report_pdf.check_document(b"%PDF-1.7 and nothing more", "a.pdf")


def test_the_copy_is_made_in_a_child() -> None:
    answer = make_answer("May 7, 1992.")
    sources = (Citation("a", 12, None, QUOTE, 0.25), Citation("a", 1, None, "nowhere to see", 0.1))
    data = CONSTITUTION.read_bytes()
    report_pdf.check_document(data, "a.pdf")
    copy, missing = report_pdf.report_pdf(data, "a.pdf", replace(answer, citations=sources))
    assert missing == [2]
    (annotation,) = highlights(copy, 11)
    assert annotation["/Contents"] == "Source 1: 25.0% of the attention"


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [show("Nothing here.")] * 11 + [show("Here is a quote [p. 3] with brackets in it.")]
    (tmp_path / "book.pdf").write_bytes(to_bytes(make_writer(lines)))
    (tmp_path / "book.txt").write_text("The captain is Voss.")
    (tmp_path / "mine.pdf").write_bytes(to_bytes(make_writer(lines)))

    def ask(*words: str) -> tuple[int, str]:
        code = main(["ask", *words], FakeServices().services())
        return code, capsys.readouterr().err.splitlines()[-1]

    assert ask("book.pdf", "When?", "--report", "r.pdf") == (
        0,
        "longread: report written to r.pdf",
    )
    (annotation,) = highlights((tmp_path / "r.pdf").read_bytes(), 11)
    assert annotation["/Contents"] == "Source 1: 50.0% of the attention"
    assert ask("book.pdf", "When?", "--report", "r.pdf")[0] == 0
    for words, part in (
        (["book.txt", "When?", "--report", "r.pdf"], "book.txt is no PDF; name a report that ends"),
        (["book.pdf", "book.txt", "When?", "--report", "r.pdf"], "is a copy of one document"),
        (["book.pdf", "When?", "--report", "mine.pdf"], "not as longread writes it"),
        (["book.pdf", "When?", "--report", "book.pdf"], "is a document of the conversation"),
    ):
        code, line = ask(*words)
        assert code == 2
        assert part in line
