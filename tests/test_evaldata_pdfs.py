"""The 70 evaluation PDFs: each ends as expected.json says. Skipped without LONGREAD_EVALDATA."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from longread.document import Document, document_text, extract, read_source
from longread.errors import DocumentError, NoTextError, PasswordError

FOLDER = Path(os.environ.get("LONGREAD_EVALDATA", "")) / "pdfs"
EXPECTED: dict[str, Any] = {}
if os.environ.get("LONGREAD_EVALDATA"):
    EXPECTED = json.loads((FOLDER / "expected.json").read_text("utf-8"))

# What the kinds and notes of expected.json ask beyond its strings.
ENGINES = {
    "real/TAMReview.pdf": "pypdfium2",
    "real/XiaoBiaoSong-garbled.pdf": "pypdfium2",
    "real/debian-policy.pdf": "pypdfium2",
    "real/noembed-eucjp.pdf": "pypdfium2",
    "real/rfc9293.pdf": "pypdfium2",
    "generated/gen_hebrew_rtl.pdf": "pypdfium2",
    "generated/gen_base.pdf": "pypdf",
    "generated/gen_rotate180.pdf": "pypdf",
    "real/tracemonkey.pdf": "pypdf",
}
WARNINGS = {
    "generated/gen_mixed_text_and_scan.pdf": "no text on pages 4-5",
    "generated/gen_no_xref_no_trailer.pdf": "repaired",
    "generated/gen_truncated_half.pdf": "repaired",
    "real/Pages-tree-refs.pdf": "page 2 could not be read",
    "real/TAMReview.pdf": "ocrmypdf --force-ocr",
    "real/non-unicode-cmap-791.pdf": "ocrmypdf --force-ocr",
}
ALSO = {
    "generated/gen_arabic_rtl.pdf": ["كان عدد الكتب في المكتبة ٤١٢ كتابا في سنة 1931."],
    "generated/gen_hebrew_rtl.pdf": ["בשנת 1931 היו בספרייה 412 ספרים."],
    "real/ArabicCIDTrueType.pdf": ["انواع الخطوط العربية"],
    "real/libreoffice-form.pdf": ["First Name: Alice", "First Name_2: Bob"],
    "real/issue6010_2-nonascii-password.pdf": ["Issue 6010"],
}
# Long files of which the beginning is enough here; two of them whole: docs/campaigns.
BEGINNINGS = (
    "COSTCO",
    "ADOBE",
    "mmdetection",
    "R-intro",
    "debian-policy",
    "reportlab",
    "rfc9",
    "pdkids",
    "acl",
)
ERRORS = {"error": DocumentError, "no_text": NoTextError, "unsupported": DocumentError}


def flat(document: Document) -> str:
    return " ".join(document_text(document).split())


@pytest.mark.parametrize("name", EXPECTED or [pytest.param("", marks=pytest.mark.skip)])
def test_the_file_ends_as_expected(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    expected = EXPECTED[name]
    source = str(FOLDER / name)
    error = ERRORS.get(expected["kind"])
    if error is not None:
        with pytest.raises(error) as caught:
            extract(read_source(source))
        message = str(caught.value)
        assert "\n" not in message and len(message) < len(source) + 250
        assert caught.value.exit_code == (5 if isinstance(caught.value, NoTextError) else 3)
        if expected["kind"] == "no_text":
            assert "ocrmypdf" in message
        return
    password = expected.get("password")
    if expected["kind"] == "encrypted":
        for wrong in (None, "wrong"):
            with pytest.raises(PasswordError) as locked:
                extract(read_source(source), password=wrong)
            assert locked.value.exit_code == 4
    pages = "1-12" if Path(name).name.startswith(BEGINNINGS) else None
    if name.endswith("gen_1500_pages.pdf"):  # the whole is test_reader_pool.py's
        pages = "990-1010,1490-"
    document = extract(read_source(source), password=password, pages=pages)
    text = flat(document)
    wordings = [*expected.get("must", []), *expected.get("ideal", []), *ALSO.get(name, [])]
    order = [unicodedata.normalize("NFKC", wording) for wording in expected.get("order", [])]
    missing = [w for w in wordings if unicodedata.normalize("NFKC", w) not in text]
    assert not missing
    assert not [wording for wording in expected.get("must_not", []) if wording in text]
    places = [text.index(wording) for wording in order]
    assert places == sorted(places)
    if "labels" in expected:
        labels = [page.label or str(page.page_idx + 1) for page in document.pages]
        assert labels[: len(expected["labels"])] == expected["labels"]
    if name in WARNINGS:
        assert any(WARNINGS[name] in warning for warning in document.warnings)
    if name in ENGINES:
        assert ENGINES[name] in {page.engine for page in document.pages}
    assert all(page.engine or not page.text for page in document.pages)
    assert not any(char in text for char in "\x00\x1b\x9b\u202e")
    assert capfd.readouterr() == ("", "")


def test_scanned_words_stay_and_values_stand_on_their_page(evaldata: Path) -> None:
    document = extract(read_source(str(evaldata / "pdfs/generated/gen_header_footer_12p.pdf")))
    for page in document.pages:
        number = page.page_idx + 1
        assert f"parameter number {number} is {37 * number * number + 5}" in page.text
        assert "of 12" not in page.text
