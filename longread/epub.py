"""EPUB to sections: the chapters in the order of the spine, with the titles of its contents.

Owns the package around the chapters, read with zipfile and lxml: the known EPUB library is under
the AGPL. A chapter's HTML is html_text.py's.
"""

from __future__ import annotations

import posixpath
import zipfile
from typing import Any
from urllib.parse import unquote

from longread.errors import DocumentError
from longread.html_text import html_sections
from longread.sections import Section

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_HTML_TYPES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")


def epub_sections(archive: zipfile.ZipFile, source: str) -> tuple[list[Section], list[str]]:
    """Sections of all chapters, and warnings for what is missing. Raises DocumentError for DRM."""
    names = set(archive.namelist())
    container = _parse(archive.read(_CONTAINER))
    package = container.xpath("string(//*[local-name()='rootfile']/@full-path)")
    root = _parse(archive.read(package))
    folder = posixpath.dirname(package)
    items: dict[str, tuple[str, str]] = {}
    for item in root.xpath("//*[local-name()='manifest']/*[local-name()='item']"):
        path = _resolve(folder, item.get("href", ""))
        items[item.get("id", "")] = (path, item.get("media-type", ""))
    spine = [
        items[ref.get("idref")]
        for ref in root.xpath("//*[local-name()='spine']/*[local-name()='itemref']")
        if ref.get("idref") in items and ref.get("linear") != "no"
    ]
    chapters = [path for path, media_type in spine if media_type in _HTML_TYPES]
    locked = _locked(archive) if _ENCRYPTION in names else set()
    if locked & set(chapters):
        raise DocumentError(f"{source} is protected against copying (DRM), so it cannot be read")
    titles = _titles(archive, items, names)
    sections: list[Section] = []
    missing = 0
    for path in chapters:
        if path not in names:
            missing += 1
            continue
        title = titles.get(path)
        for section in html_sections(archive.read(path), keep_title=False):
            heading = section.heading or title
            if heading is None and sections:
                heading = sections[-1].heading  # a chapter in several files
            sections.append(Section(heading, section.text))
    return sections, [f"{missing} of {len(chapters)} chapters are missing"] if missing else []


def _parse(data: bytes) -> Any:
    from lxml import etree

    parser = etree.XMLParser(resolve_entities=False, no_network=True, recover=True)
    return etree.fromstring(data, parser)


def _resolve(folder: str, href: str) -> str:
    return posixpath.normpath(posixpath.join(folder, unquote(href.split("#")[0])))


def _locked(archive: zipfile.ZipFile) -> set[str]:
    root = _parse(archive.read(_ENCRYPTION))
    return {unquote(str(uri)) for uri in root.xpath("//*[local-name()='CipherReference']/@URI")}


def _titles(
    archive: zipfile.ZipFile, items: dict[str, tuple[str, str]], names: set[str]
) -> dict[str, str]:
    """Path of a chapter -> its title in the table of contents, NCX or HTML."""
    found: dict[str, str] = {}
    for path, media_type in items.values():
        if path not in names:
            continue
        folder = posixpath.dirname(path)
        if media_type == "application/x-dtbncx+xml":
            for point in _parse(archive.read(path)).xpath("//*[local-name()='navPoint']"):
                title = point.xpath("string(*[local-name()='navLabel'])")
                href = point.xpath("string(*[local-name()='content']/@src)")
                found.setdefault(_resolve(folder, href), " ".join(title.split()))
        elif media_type in _HTML_TYPES and b"epub:type" in (data := archive.read(path)):
            links = _parse(data).xpath("//*[local-name()='nav']//*[local-name()='a'][@href]")
            for link in links:
                title = " ".join(link.xpath("string()").split())
                found.setdefault(_resolve(folder, link.get("href")), title)
    return {path: title for path, title in found.items() if title}
