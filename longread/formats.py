"""Files without pages: HTML, EPUB, DOCX and source code as sections that carry their headings.

Owns which kinds there are, the optional libraries they need.
html_text.py, epub.py and docx_text.py read the formats; nothing here normalises.
"""

from __future__ import annotations

import re
import zipfile
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO

from longread import textfile
from longread.errors import DocumentError
from longread.normalize import clean_line
from longread.reader_pool import Workers
from longread.sections import Section, code_sections

KINDS = ("html", "epub", "docx", "code")
_FORMAT = "formats 1"  # raise it whenever the text of one of these kinds could come out differently
_LIBRARIES = {
    "html": ("beautifulsoup4", "lxml"),
    "epub": ("beautifulsoup4", "lxml"),
    "docx": ("python-docx", "lxml"),
    "code": (),
}
_NAMES = {"html": "an HTML page", "epub": "an EPUB book", "docx": "a Word document (DOCX)"}
_HTML_SUFFIXES = (".html", ".htm", ".xhtml")
_CODE_SUFFIXES = frozenset(
    ".py .pyi .js .mjs .ts .tsx .jsx .c .h .cc .cpp .cxx .hpp .cu .rs .go .java .kt .scala .swift "
    ".rb .php .pl .lua .r .jl .sh .bash .zsh .ps1 .sql .cs .fs .hs .ml .ex .exs .erl .clj .lisp "
    ".el .vim .zig .nim .dart .m .mm .asm .s .proto .cmake .mk .toml .yaml .yml .ini .cfg .json "
    ".css .scss .tf".split()
)
_HTML_START = re.compile(
    rb"\s*(?:<\?xml[^>]{0,200}\?>\s*)?(?:<!--.{0,500}?-->\s*)?<(?:!doctype\s+html|html)\b",
    re.IGNORECASE | re.DOTALL,
)
_OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_END_LEN = 1 << 18  # bytes at the end of an archive that list its files
_REASON_LEN = 160
MAX_UNPACKED = 512 << 20  # bytes of all parts of an EPUB or DOCX


def kind_of(suffix: str, data: bytes) -> str | None:
    """The kind of a file by its first bytes, else by its suffix; None where it is none of these."""
    if data.startswith(b"PK\x03\x04"):
        if suffix == ".epub" or b"META-INF/container.xml" in data[-_END_LEN:] + data[:4096]:
            return "epub"
        if suffix == ".docx" or b"word/document.xml" in data[-_END_LEN:] + data[:4096]:
            return "docx"
        return None
    if suffix in (".epub", ".docx"):
        return suffix[1:]
    if suffix in _HTML_SUFFIXES or (not suffix and _HTML_START.match(data[:2048])):
        return "html"
    return "code" if suffix in _CODE_SUFFIXES else None


def engine_name(kind: str, source: str) -> str:
    """Name and versions of what reads a kind. Raises DocumentError where an extra is missing."""
    try:
        parts = [f"{name} {version(name)}" for name in _LIBRARIES[kind]]
    except PackageNotFoundError:
        raise DocumentError(
            f"{source} is {_NAMES[kind]}, which needs more libraries: "
            "pip install 'longread[formats]'"
        ) from None
    return " + ".join([*parts, _FORMAT])


def read(kind: str, data: bytes, source: str) -> tuple[list[Section], list[str]]:
    """Sections in the document's order, and warnings. Raises DocumentError.

    All but source code is parsed in a child process, for it may be hostile.
    """
    engine_name(kind, source)
    if kind == "code":
        text, warnings = textfile.decode(data, source)
        return list(code_sections(text)), warnings
    job = {"do": "sections", "kind": kind, "source": source, "max_unpacked": MAX_UNPACKED}
    with Workers(data) as workers:
        reply = workers.run(job)
    if reply["state"] == "read":
        return [Section(*section) for section in reply["sections"]], reply["warnings"]
    if reply["state"] == "refused":
        raise DocumentError(clean_line(reply["reason"]))
    why = clean_line(reply["reason"])[:_REASON_LEN]
    raise DocumentError(f"{source} cannot be read as {_NAMES[kind]}: {why}; try another copy")


def parse(
    kind: str, data: bytes, source: str, max_unpacked: int
) -> tuple[list[Section], list[str]]:
    """What `read` gives, in this process. Raises DocumentError, and what libraries raise."""
    if kind == "html":
        from longread.html_text import html_sections

        return html_sections(data), []
    if data.startswith(_OLD_OFFICE):
        raise DocumentError(
            f"{source} is encrypted or in the old Word format; save it as DOCX without password"
        )
    with zipfile.ZipFile(BytesIO(data)) as archive:
        if sum(info.file_size for info in archive.infolist()) > max_unpacked:
            raise DocumentError(
                f"{source} unpacks to more than {max_unpacked >> 20} MB; "
                "save it without its pictures"
            )
        if kind == "epub":
            from longread.epub import epub_sections

            return epub_sections(archive, source)
    from longread.docx_text import docx_sections

    return docx_sections(data), []
