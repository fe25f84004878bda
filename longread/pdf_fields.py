"""What a PDF page says outside its text: the values of form fields, and notes put on it.

Owns the reading of a page's annotations through pypdf. A damaged one is left out.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from longread.normalize import clean_line

if TYPE_CHECKING:
    from pypdf import PageObject

_MAX_FIELDS = 2000  # of one page
_MAX_PARENTS = 16
_NOTES = ("/Text", "/FreeText", "/Highlight", "/Underline", "/StrikeOut", "/Squiggly", "/Caret")
_PASSWORD_FLAG = 1 << 13


def page_fields(page: PageObject) -> list[str]:
    """Lines `Name: value` for filled fields, then `Note: text` for annotations, as they stand."""
    fields: list[str] = []
    notes: list[str] = []
    annotations: Any = []
    with suppress(Exception):
        annotations = list(page.get("/Annots") or [])[:_MAX_FIELDS]
    for reference in annotations:
        with suppress(Exception):
            annotation = reference.get_object()
            kind = annotation.get("/Subtype")
            if kind == "/Widget":
                line = _field(annotation)
                if line is not None and line not in fields:
                    fields.append(line)
            elif kind in _NOTES and annotation.get("/Contents"):
                notes.append(f"Note: {clean_line(str(annotation['/Contents']))}")
    return fields + notes


def _field(widget: Any) -> str | None:
    name = str(_inherited(widget, "/TU") or _inherited(widget, "/T") or "Field")
    kind = _inherited(widget, "/FT")
    value = _inherited(widget, "/V")
    if kind == "/Btn":
        state = widget.get("/AS", value)
        if state is None or state == "/Off":
            return None
        shown = str(state).removeprefix("/")
        shown = "yes" if shown.lower() in ("yes", "on", "1", "true") else shown
    elif kind == "/Sig" or value is None or int(_inherited(widget, "/Ff") or 0) & _PASSWORD_FLAG:
        return None
    elif isinstance(value, list):
        shown = ", ".join(str(item) for item in value)
    elif hasattr(value, "get_data"):  # a long value may be a stream
        shown = value.get_data().decode("utf-8", "replace")
    else:
        shown = str(value)
    shown = clean_line(shown)
    return f"{clean_line(name)}: {shown}" if shown else None


def _inherited(widget: Any, key: str) -> Any:
    node = widget
    for _ in range(_MAX_PARENTS):
        if key in node:
            return node[key]
        parent = node.get("/Parent")
        if parent is None:
            return None
        node = parent.get_object()
    return None
