"""The main text of HTML pages, with resiliparse.

Elements that say what they are, by their HTML5 tag, ARIA role or the words in their class and id, are removed; figures
in docs/decisions/0004-html-extraction.md. resiliparse's own search for main text is not used, as its time grows with
the square of the nesting; pages for which the parser is not linear are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from forebay.errors import PrepareError
from forebay.prepare.documents import Stage, StageResult, keep_all, replace_column, strip_turn_marks

_TAGS = ("nav", "footer", "aside", "noscript", "button", "select", "dialog", "template", "iframe")
# The form right below the body may be the page, as ASP.NET has it; so may a header be a post.
_NOT_THE_PAGE = ("body > * form", "body > header")
_ROLES = ("navigation", "banner", "contentinfo", "search", "complementary", "dialog", "menu", "menubar")
_NAMES = (
    "nav navbar navigation menu header footer sidebar breadcrumb breadcrumbs cookie social share sharing pagination "
    "pager comments related login search toolbar banner newsletter popup modal skip-link copyright"
)
_WITHIN = ("sidebar", "breadcrumb", "cookie", "footer", "navbar", "-nav", "nav-", "menu")
# A page whose whole body is `class="has-sidebar"` is no sidebar.
_NOT_ALL = ":not(html):not(body):not(main):not(article)"
_LEAST_SKIPPED = [*_TAGS, *(f'[role="{role}"]' for role in _ROLES), '[aria-hidden="true"]', "[hidden]"]
_PLAIN_SKIPPED = [*_LEAST_SKIPPED, *_NOT_THE_PAGE]
_SKIPPED = [
    *_PLAIN_SKIPPED,
    *(f"{mark}{name}{_NOT_ALL}" for name in _NAMES.split() for mark in ".#"),
    *(f'[{attribute}*="{word}"]{_NOT_ALL}' for attribute in ("class", "id") for word in _WITHIN),
]
_FEW_CHARACTERS = 1500
"""A page with less main text than this may have lost it to a name, form or header that misleads: without these, has it
more than four times as much?"""
_BLANK_LINES = re.compile(r"\n{3,}")

_MAX_ATTRIBUTES = 1000
_MAX_AGAIN = 1000
_MAX_INDENTED = 16
"""Blanks that may indent nested lists, for each byte of HTML."""
_MAX_GROWTH = 8
_SLASH = ord("/")
_SCAN = re.compile(
    rb"""<(?:[a-zA-Z](?:[^\s>"']*+(?:"[^"]*+"|'[^']*+')?+[\s/]++){%d}"""
    rb"""|/?([uUoO][lL]|[bB][oO][dD][yY]|[hH][tT][mM][lL])\b)""" % _MAX_ATTRIBUTES
)
"""Tags with too many attributes, and those of lists and bodies, in one pass."""


class HtmlError(PrepareError):
    """A page whose parsing or text would take far more time or memory than its size allows."""


@dataclass(frozen=True)
class Extract(Stage):
    """The stage: rows with `html` get their main text; rows without stay as they are.

    Args:
        min_characters: A page whose main text is shorter is dropped.
        main_content: Whether menus, headers and footers are left out.
    """

    name: ClassVar[str] = "extract"
    version: ClassVar[int] = 2
    reasons: ClassVar[tuple[str, ...]] = ("no_text", "malformed")
    min_characters: int = 1
    main_content: bool = True

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        """The batch with text in place of HTML; counts `extracted`."""
        drop = keep_all(batch.num_rows)
        html = batch.column("html").to_pylist()
        if not any(html):
            return StageResult(batch, drop)
        texts = batch.column("text").to_pylist()
        problems = {}
        for row, is_html in enumerate(html):
            if is_html:
                try:
                    texts[row] = extract_html(texts[row]) if self.main_content else all_text(texts[row])
                except HtmlError as error:
                    drop[row], texts[row], problems[row] = 1, "", str(error)
                    continue
                if len(texts[row]) < self.min_characters:
                    drop[row] = 0
        batch = replace_column(batch, "text", pa.array(texts, pa.large_string()))
        batch = replace_column(batch, "html", pa.array([False] * batch.num_rows, pa.bool_()))
        return StageResult(batch, drop, {"extracted": sum(html) - int((drop >= 0).sum())}, problems)


def extract_html(html: str) -> str:
    """The main text of a page: paragraphs, headings and list items, a line each; "" if there is none.

    Raises HtmlError for a page that would cost too much. Cost: about 20 MB of HTML a CPU second, linear in its length.
    """
    page = _parsed(html)
    text = _plain(html, page, _SKIPPED)
    for skipped in (_PLAIN_SKIPPED, _LEAST_SKIPPED):
        if len(text) >= _FEW_CHARACTERS:
            break
        cautious = _plain(html, page, skipped)
        text = cautious if len(cautious) > 4 * len(text) else text
    return text


def all_text(html: str) -> str:
    """The text of a fragment or page with all that a browser shows of it."""
    return _plain(html, _parsed(html), None)


def _parsed(html: str) -> Any:
    from resiliparse.parse.html import HTMLTree

    data = html.encode("utf-8", "replace")
    depth = deepest = again = 0
    for match in _SCAN.finditer(data):
        tag, end = match[1], data[match.start() + 1] == _SLASH
        if tag is None:
            raise HtmlError(f"malformed HTML: a tag with more than {_MAX_ATTRIBUTES} attributes.")
        if len(tag) == 2:
            depth = max(0, depth - 1) if end else depth + 1
            deepest = max(deepest, depth)
        else:
            again += not end
    if again > _MAX_AGAIN:
        raise HtmlError(f"malformed HTML: <body> or <html> {again} times.")
    # The library puts two blanks for each level of nested lists before each line.
    if deepest > _MAX_INDENTED // 2 and 2 * deepest * data.count(b"<") > _MAX_INDENTED * len(data):
        raise HtmlError(f"malformed HTML: lists nested {deepest} deep.")
    return HTMLTree.parse(html.replace("\0", "") if "\0" in html else html)


def _plain(html: str, page: Any, skipped: list[str] | None) -> str:
    from resiliparse.extract.html2text import extract_plain_text

    text: str = extract_plain_text(page, alt_texts=False, preserve_formatting=True, skip_elements=skipped)
    if len(text) > _MAX_GROWTH * len(html) + 1000:
        raise HtmlError(f"malformed HTML: {len(html)} characters become {len(text)} of text.")
    return _BLANK_LINES.sub("\n\n", strip_turn_marks(text)).strip()
