"""The main text of HTML pages, with resiliparse.

Elements that say what they are, by their HTML5 tag, ARIA role or the words in their class and id, are removed; figures
in docs/explanation/decisions/0004-html-extraction.md. resiliparse's own search for main text is not used, as its time
grows with the square of the nesting; pages for which the parser is not linear are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from forebay.formats.html import HtmlError, parse_html, plain_text
from forebay.prepare.documents import Stage, StageResult, keep_all, replace_column

_TAGS = ["nav", "footer", "aside", "noscript", "button", "select", "dialog", "template", "iframe"]
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


@dataclass(frozen=True)
class Extract(Stage):
    """Rows with `html` get their main text, and are dropped if they have none; other rows stay as they are."""

    name: ClassVar[str] = "extract"
    version: ClassVar[int] = 2
    reasons: ClassVar[tuple[str, ...]] = ("no_text", "malformed")

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
                    texts[row] = extract_html(texts[row])
                except HtmlError as error:
                    drop[row], texts[row], problems[row] = 1, "", str(error)
                    continue
                if not texts[row]:
                    drop[row] = 0
        batch = replace_column(batch, "text", pa.array(texts, pa.large_string()))
        batch = replace_column(batch, "html", pa.array([False] * batch.num_rows, pa.bool_()))
        return StageResult(batch, drop, {"extracted": sum(html) - int((drop >= 0).sum())}, problems)


def extract_html(html: str) -> str:
    """The main text of a page: paragraphs, headings and list items, a line each; "" if there is none.

    Raises HtmlError for a page that would cost too much. Cost: about 20 MB of HTML a CPU second, linear in its length.
    """
    page = parse_html(html)
    text = plain_text(html, page, _SKIPPED)
    for skipped in (_PLAIN_SKIPPED, _LEAST_SKIPPED):
        if len(text) >= _FEW_CHARACTERS:
            break
        cautious = plain_text(html, page, skipped)
        text = cautious if len(cautious) > 4 * len(text) else text
    return text
