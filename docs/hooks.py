"""Equations as MathML, at build time: pages need no script and no network to show them."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
_CITATION = re.compile(r"(docs/theory\.md, eqs?\. \(?(\d+)\)?)")
_NUMBER = re.compile(r"\\tag\{(\d+)\}")
_LINES = re.compile(r"\s*\\begin\{aligned\}(.*)\\end\{aligned\}\s*", re.DOTALL)


def _mathml(match: re.Match[str]) -> str:
    latex = html.unescape(match["latex"]).strip()
    if match["tag"] == "span":
        return convert(latex)
    number = _NUMBER.search(latex)
    formula = _lines(_NUMBER.sub("", latex))
    if number is None:
        return f'<div class="equation">{formula}</div>'
    n = number[1]
    return f'<div class="equation" id="eq-{n}">{formula}<span class="number">({n})</span></div>'


def _lines(latex: str) -> str:
    """A displayed formula. The converter cannot align lines; each becomes a formula of its own."""
    aligned = _LINES.fullmatch(latex)
    lines = aligned[1].replace("&", "").split(r"\\") if aligned else [latex]
    return f"<div>{''.join(convert(line.strip(), display='block') for line in lines)}</div>"


def on_page_content(page_html: str, **_: Any) -> str:
    """Replace every formula of a page, and make citations of equations links."""
    page_html = _CITATION.sub(r'<a href="../theory/#eq-\2">\1</a>', page_html)
    return _FORMULA.sub(_mathml, page_html)
