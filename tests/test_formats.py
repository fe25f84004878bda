"""HTML, EPUB, DOCX and source code: text in order, headings for pages, errors."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from inline_reader import inline_reader  # noqa: F401
from small_pdf import raw_document

from longread import formats
from longread.document import Document, RawDocument, extract, options_key, read_source
from longread.errors import DocumentError, NoTextError
from longread.events import Citation
from longread.plain_text import place_text
from longread.render import source_lines

pytest.importorskip("bs4")
docx = pytest.importorskip("docx")

HTML = """<!DOCTYPE html><html><head><title>The  Book</title><style>p {color: red}</style></head>
<body><nav>Menu</nav><p>Before <b>any</b> heading.<script>alert(1)</script></p>
<h1>First &amp; only</h1><p>One<br>two</p><ul><li>a</li><li>b <i>c</i></li></ul>
<div hidden>secret</div>
<h2>Second</h2><table><tr><th>Name</th><th>Age</th></tr><tr><td>Ann</td><td>7</td></tr></table>
<pre>def f():
    return 1</pre><p>caf\u00e9 \x1b[2J \u202eend</p></body></html>"""


def places(document: Document) -> list[tuple[str | None, str]]:
    return [(page.label, page.text) for page in document.pages]


def test_html_is_cut_at_headings_and_shows_what_a_reader_sees() -> None:
    document = extract(raw_document(HTML.encode(), "book.html"))
    assert document.kind == "html" and document.engine.startswith("beautifulsoup4 ")
    assert places(document) == [
        ("§ The Book", "Before any heading."),
        ("§ First & only", "First & only\n\nOne\ntwo\n- a\n- b c"),
        (
            "§ Second",
            "Second\nName | Age\nAnn | 7\n\ndef f():\n    return 1\n\ncafé [2J end",
        ),
    ]


def test_html_in_another_encoding_and_broken_html_are_read() -> None:
    page = '<meta charset="windows-1252"><p>na\u00efve \u201cquotes\u201d</p>'.encode("cp1252")
    assert extract(raw_document(page, "a.htm")).pages[0].text == "naïve “quotes”"
    assert (
        "x"
        in extract(raw_document(b"<p>x<b><i></p></div>" + b"<div>" * 3000, "a.html")).pages[0].text
    )
    with pytest.raises(NoTextError):
        extract(raw_document(b"<html><script>x</script></html>", "a.html"))


def packed(files: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


EPUB = {
    "mimetype": "application/epub+zip",
    "META-INF/container.xml": '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container">'
    '<rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles></container>',
    "OPS/book.opf": '<package xmlns="http://www.idpf.org/2007/opf"><manifest>'
    '<item id="b" href="two.xhtml" media-type="application/xhtml+xml"/>'
    '<item id="a" href="one%20a.xhtml" media-type="application/xhtml+xml"/>'
    '<item id="x" href="gone.xhtml" media-type="application/xhtml+xml"/>'
    '<item id="n" href="toc.ncx" media-type="application/x-dtbncx+xml"/></manifest>'
    '<spine><itemref idref="a"/><itemref idref="b"/><itemref idref="x"/></spine></package>',
    "OPS/toc.ncx": '<ncx xmlns="http://www.daisy.org/z3986/2005/ncx/"><navMap><navPoint>'
    "<navLabel><text>Chapter One</text></navLabel>"
    '<content src="one%20a.xhtml#s"/></navPoint></navMap></ncx>',
    "OPS/one a.xhtml": "<html><body><p>It was a dark night.</p></body></html>",
    "OPS/two.xhtml": "<html><body><h1>Chapter Two</h1><p>The storm.</p></body></html>",
}


def test_epub_chapters_come_in_the_spine_s_order_with_their_titles() -> None:
    document = extract(raw_document(packed(EPUB), "book.epub"))
    assert document.kind == "epub"
    assert places(document) == [
        ("§ Chapter One", "It was a dark night."),
        ("§ Chapter Two", "Chapter Two\n\nThe storm."),
    ]
    assert document.warnings == ("1 of 3 chapters are missing",)


def test_a_protected_epub_and_a_damaged_one_are_errors_of_one_line() -> None:
    locked = EPUB | {
        "META-INF/encryption.xml": '<encryption><CipherReference URI="OPS/two.xhtml"/></encryption>'
    }
    bomb = EPUB | {"OPS/two.xhtml": "x"}
    for data, wording in [
        (packed(locked), "DRM"),
        (packed(EPUB)[:400], "cannot be read as an EPUB book"),
        (packed({"mimetype": "application/epub+zip"}), "cannot be read as an EPUB book"),
    ]:
        with pytest.raises(DocumentError, match=wording) as caught:
            extract(raw_document(data, "book.epub"))
        assert caught.value.exit_code == 3 and "\n" not in str(caught.value)
    assert bomb


def test_what_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_UNPACKED", 1 << 20)
    with pytest.raises(DocumentError, match="unpacks to more than 1 MB"):
        extract(raw_document(packed(EPUB | {"big": "x" * (2 << 20)}), "book.epub"))


def test_entities_of_a_hostile_package_are_not_expanded(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    package = EPUB["META-INF/container.xml"]
    hostile = f'<!DOCTYPE x [<!ENTITY e SYSTEM "file://{secret}">]>{package}'
    chapter = EPUB["OPS/two.xhtml"].replace("storm", "&e; storm")
    chapter = f'<!DOCTYPE html [<!ENTITY e SYSTEM "file://{secret}">]>{chapter}'
    files = EPUB | {"META-INF/container.xml": hostile, "OPS/two.xhtml": chapter}
    document = extract(raw_document(packed(files), "book.epub"))
    assert not any("secret" in page.text for page in document.pages)


def docx_bytes() -> bytes:
    document = docx.Document()
    document.add_paragraph("Before.")
    document.add_heading("Part A", level=1)
    document.add_paragraph("Text of A.")
    table = document.add_table(rows=2, cols=2)
    for row, values in zip(table.rows, (("Name", "Age"), ("Ann", "7")), strict=True):
        for cell, value in zip(row.cells, values, strict=True):
            cell.text = value
    document.add_heading("Part B", level=2)
    document.add_paragraph("Text of B.")
    buffer = io.BytesIO()
    document.save(buffer)
    return buffer.getvalue()


def test_docx_is_read_in_order_with_tables_and_headings() -> None:
    document = extract(raw_document(docx_bytes(), "a.docx"))
    assert places(document) == [
        (None, "Before."),
        ("§ Part A", "Part A\n\nText of A.\n\nName | Age\nAnn | 7"),
        ("§ Part B", "Part B\n\nText of B."),
    ]
    assert "python-docx" in document.engine
    for data in (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"x" * 100, b"no zip", docx_bytes()[:3000]):
        with pytest.raises(DocumentError) as caught:
            extract(raw_document(data, "a.docx"))
        assert "\n" not in str(caught.value)


def test_source_code_keeps_every_line_and_is_cut_before_definitions() -> None:
    functions = [f"def function_{i}(x):\n" + "    x += 1\n" * 30 for i in range(8)]
    source = "\n\n".join(functions)
    document = extract(raw_document(source.encode(), "a.py"))
    assert document.kind == "code"
    assert "\n".join(page.text for page in document.pages).split() == source.split()
    assert document.pages[0].label == "§ lines 1-66, function_0"
    assert all(page.text.startswith("def function_") for page in document.pages)
    assert "    x += 1" in document.pages[0].text


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.html", b"<p>x", "html"),
        ("stdin", b"\n<!DOCTYPE HTML><p>x", "html"),
        ("stdin", packed(EPUB), "epub"),
        ("a.epub", b"x", "epub"),
        ("stdin", docx_bytes(), "docx"),
        ("a.rs", b"fn main() {}", "code"),
        ("a.txt", b"<html>in a text file</html>", "text"),
        ("a.zip", packed({"a": "b"}), "text"),
    ],
)
def test_kinds(tmp_path: Path, name: str, data: bytes, kind: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)

    source = "-" if name == "stdin" else str(path)
    assert read_source(source, stdin=io.BytesIO(data)).kind == kind


def test_a_missing_library_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(formats, "version", missing)
    for name in ("a.html", "a.epub", "a.docx"):
        raw = RawDocument(name, name, name[2:], "0" * 64, b"x")
        for call in (lambda raw=raw: extract(raw), lambda raw=raw: options_key(raw, None)):
            with pytest.raises(DocumentError, match=r"pip install 'longread\[formats\]'"):
                call()
    assert extract(raw_document(b"x = 1\n", "a.py")).pages


def test_citations_show_the_heading_in_place_of_the_page() -> None:
    assert place_text(3, "§ Chapter Two") == "§ Chapter Two"
    assert place_text(3, "xii") == "p. 3 (label xii)" and place_text(3, None) == "p. 3"
    (line,) = source_lines([Citation("book.epub", 2, "§ Chapter Two", "The storm.", 0.5)])
    assert line == "Sources:  [1] book.epub, § Chapter Two: “The storm.”"


def test_versions_are_part_of_the_key_and_long_sections_are_cut() -> None:
    page = f"<h1>Long</h1><p>{'word ' * 3000}</p>".encode()
    raw = raw_document(page, "a.html")
    document = extract(raw)
    assert len(document.pages) > 4 and {page.label for page in document.pages} == {"§ Long"}
    assert document.engine in options_key(raw, None) and "lxml" in document.engine
    assert len(extract(raw, pages="2-3").pages) == 2
