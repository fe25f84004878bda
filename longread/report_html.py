"""One self-contained HTML page: a question, its answer, its sources, and the text with its heat.

Owns the page and the packing of the heat. The page fetches nothing: a policy in its head forbids
it, and allows no script but report.js. Text of documents and models is escaped, without control
characters.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from importlib import resources

import numpy as np

from longread import __version__
from longread.events import Answer
from longread.plain_text import NO_SUPPORT, clean, count_text, place_text
from longread.reading import Heat, ReadDocument, ReadPage, find_quote

MARK = b'<meta name="generator" content="longread'  # tells our files from others
_LINE_CHARS = 78  # about what fits on a line of the page
_LINE_PX = 28


def report_html(
    question: str, answer: Answer, documents: Sequence[ReadDocument], heat: Heat
) -> bytes:
    """Return the page in UTF-8. The passages of `documents` are those of `heat`, in their order."""
    script, style = _asset("report.js"), _asset("report.css")
    packed = _pack(heat)
    levels = (
        np.frombuffer(base64.b64decode(packed["attention"]["heads"]["bytes"][0]), np.uint8) >> 4
    )
    title = _text(" ".join(question.split()))
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        f"form-action 'none'; script-src 'sha256-{_sha256(script)}'"
    )
    parts = [
        "<!doctype html>\n",
        '<html lang=""><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f'{MARK.decode()} {__version__} report">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{style}</style>',
        "</head><body>\n",
        f'<aside><h1 dir="auto">{title}</h1>\n{_answer(answer, heat.tokens)}\n',
        f"<h2>Sources</h2>\n{_sources(answer, documents)}\n",
        f"<h2>Heat</h2>\n{_controls(heat)}\n{_settings(answer)}</aside>\n",
        f"<main>\n{''.join(_documents(answer, documents, levels))}</main>\n",
        '<canvas id="map" aria-hidden="true"></canvas>\n',
        f'<script type="application/json" id="heat">{json.dumps(packed)}</script>\n',
        f"<script>{script}</script>\n</body></html>\n",
    ]
    return "".join(parts).encode("utf-8", "replace")


def _pack(heat: Heat) -> dict[str, dict[str, dict[str, list]]]:
    """Return the slices of the heat: all, each KV head, each layer, each pair; then each token.

    A slice is a byte a passage, in base64. Attention is scaled by the slice's peak, and by a square
    root: a passage with a hundredth of the peak's attention is still seen.
    """
    shares = _with_sums(heat.attention, np.sum)
    choices = _with_sums(heat.chosen, np.mean)
    return {
        "attention": {"heads": _slices(shares), "tokens": _slices(heat.token_attention)},
        "choice": {
            "heads": _slices(choices, scaled=False),
            "tokens": _slices(heat.token_chosen, scaled=False),
        },
    }


def _with_sums(values: np.ndarray, reduce: np.ufunc | object) -> np.ndarray:
    """[L, H, P] with a first layer and a first head that stand for all: [(L + 1) * (H + 1), P]."""
    values = np.concatenate((reduce(values, axis=0, keepdims=True), values), axis=0)  # type: ignore[operator]
    values = np.concatenate((reduce(values, axis=1, keepdims=True), values), axis=1)  # type: ignore[operator]
    return values.reshape(-1, values.shape[-1])


def _slices(values: np.ndarray, *, scaled: bool = True) -> dict[str, list]:
    """values: [slices, P]. Peaks are shares: of the slice's own sum where it is scaled."""
    packed, peaks = [], []
    for row in values.astype(np.float64):
        peak, total = float(row.max(initial=0.0)), float(row.sum())
        if scaled:
            row = np.sqrt(row / peak) if peak > 0.0 else row
            peak = peak / total if total > 0.0 else 0.0
        packed.append(base64.b64encode(np.rint(255 * row.clip(0, 1)).astype(np.uint8)).decode())
        peaks.append(round(peak, 4))
    return {"bytes": packed, "peaks": peaks}


def _answer(answer: Answer, tokens: Sequence[str]) -> str:
    """The answer with a mark around each token, where the tokens make up its text."""
    pieces = [f'<b data-t="{n}">{_text(piece)}</b>' for n, piece in enumerate(tokens, 1) if piece]
    if "".join(tokens).strip() != answer.text.strip():
        pieces = [_text(answer.text)]
    cut = '<p class="hint">The answer is not complete.</p>'
    said = "".join(pieces) if answer.text.strip() else "(no answer)"
    ending = "" if answer.finish_reason == "stop" else cut
    return f'<p class="answer" dir="auto">{said}</p>{ending}'


def _sources(answer: Answer, documents: Sequence[ReadDocument]) -> str:
    rows = []
    for number, citation in enumerate(answer.citations, 1):
        where = place_text(citation.page, citation.page_label)
        if len(documents) > 1:
            where = f"{citation.document}, {where}"
        rows.append(
            f'<li><a href="#s{number}">[{number}] {_text(where)}</a> '
            f"<small>{citation.score:.1%} of the attention</small>"
            f'<q dir="auto">{_text(citation.quote)}</q></li>'
        )
    if not rows:
        return '<p class="hint">None: the answer rests on no passage of the text.</p>'
    doubt = "" if answer.supported else f'<p class="hint">Mind: {NO_SUPPORT}.</p>'
    return f'{doubt}<ol class="sources">{"".join(rows)}</ol>'


def _controls(heat: Heat) -> str:
    num_layers, num_kv_heads = heat.attention.shape[:2]
    layers = "".join(f'<option value="{n + 1}">{n}</option>' for n in range(num_layers))
    heads = "".join(f'<option value="{n + 1}">{n}</option>' for n in range(num_kv_heads))
    return (
        '<div class="controls" id="controls" hidden>'
        '<span>Show</span><span><label><input type="radio" name="view" value="attention" checked>'
        'attention</label><label><input type="radio" name="view" value="choice">selection</label>'
        '</span><label for="layer">Layer</label>'
        f'<select id="layer" data-name="layer"><option value="0">all</option>{layers}</select>'
        '<label for="head">KV head</label>'
        f'<select id="head" data-name="KV head"><option value="0">all</option>{heads}</select>'
        '<label for="token">Token</label>'
        f'<input type="range" id="token" min="0" max="{len(heat.tokens)}" value="0" '
        'aria-describedby="said">'
        '<span>Scale</span><span class="scale"><span>less</span><span>more</span></span></div>'
        '<p class="hint" id="said" aria-live="polite">Whole answer, all layers and KV heads.</p>'
        '<p class="hint">Pick a word of the answer to see where the model looked as it said it.</p>'
    )


def _settings(answer: Answer) -> str:
    selection, usage, timings = answer.selection, answer.usage, answer.timings
    rows = [("Model", answer.model), ("Policy", selection.policy)]
    if selection.vote:
        rows.append(("Vote", selection.vote))
    if selection.index:
        rows.append(("Index", selection.index))
    if selection.budget is not None:
        rows.append(("Budget", f"{count_text(selection.budget, 'token')} per KV head"))
    rows += [
        ("Rows read", f"{selection.fraction_kept:.1%} of the cache"),
        ("Text", count_text(usage.document_tokens, "token")),
        ("Answer", f"{count_text(usage.answer_tokens, 'token')}, {timings.total_s:.1f} s"),
        ("Cut to fit", "yes" if answer.truncated else "no"),
        ("Made by", f"longread {__version__}"),
    ]
    listed = "".join(f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in rows)
    return f"<details><summary>Settings</summary><dl>{listed}</dl></details>"


def _documents(answer: Answer, documents: Sequence[ReadDocument], levels: np.ndarray) -> list[str]:
    parts, first = [], 0
    for document in documents:
        kind = "code" if document.kind == "code" else "prose"
        parts.append(f'<h2 dir="auto">{_text(document.name)}</h2>\n')
        for page in document.pages:
            marks = _marks(answer, document, page)
            parts.append(
                f'<section class="page {kind}" '
                f'style="contain-intrinsic-size:auto {_height(page)}px">'
                f"<h3>{_text(page.place)}</h3>{_page(page, marks, first, levels)}</section>\n"
            )
            first += len(page.passages)
    return parts


def _marks(answer: Answer, document: ReadDocument, page: ReadPage) -> dict[int, list[int]]:
    """The numbers of the sources that begin in each passage of the page; -1 is the page's head."""
    marks: dict[int, list[int]] = {}
    for number, citation in enumerate(answer.citations, 1):
        if (citation.document, citation.page) == (document.name, page.number):
            found = find_quote(page.text, citation.quote)
            place = -1
            for passage_idx, (_, end) in enumerate(page.passages):
                if found is not None and found[0] < end:
                    place = passage_idx
                    break
            marks.setdefault(place, []).append(number)
    return marks


def _page(page: ReadPage, marks: dict[int, list[int]], first: int, levels: np.ndarray) -> str:
    parts = [_sup(marks.get(-1, ()), first), '<div class="text" dir="auto">']
    at = 0
    for passage_idx, (start, end) in enumerate(page.passages):
        parts.append(_text(page.text[at:start]))
        parts.append(_sup(marks.get(passage_idx, ()), first + passage_idx))
        level = levels[first + passage_idx]
        parts.append(f'<span class="h{level}">{_text(page.text[start:end])}</span>')
        at = end
    parts.append(f"{_text(page.text[at:])}</div>")
    return "".join(parts)


def _sup(numbers: Sequence[int], passage_idx: int) -> str:
    return "".join(f'<sup id="s{n}" data-p="{passage_idx}">{n}</sup>' for n in numbers)


def _height(page: ReadPage) -> int:
    """About how high the page will be, so that the scroll bar is right before it is laid out."""
    lines = sum(max(1, math.ceil(len(line) / _LINE_CHARS)) for line in page.text.split("\n"))
    return 40 + _LINE_PX * lines


def _text(text: str) -> str:
    return html.escape(clean(text))


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    return resources.files("longread").joinpath(name).read_text(encoding="utf-8")
