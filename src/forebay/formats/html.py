"""HTML pages: one document a file, whose text is extracted later; and the text of a fragment, as a browser shows it.

Hides: character sets, and the parser (resiliparse), with the pages refused on which its time or memory explodes.
"""

import re
from collections.abc import Iterator
from typing import Any

from forebay.errors import PrepareError
from forebay.formats.base import Format
from forebay.formats.detect import HTML
from forebay.formats.http_message import body_text
from forebay.formats.inputs import InputSplit, ReadOptions
from forebay.formats.records import Record, strip_turn_marks
from forebay.formats.text import BOM, read_document

BLANK_LINES = re.compile(r"\n{3,}")
_MAX_ATTRIBUTES = 1000
_MAX_REPEATED = 1000
_MAX_INDENTED = 16  # Blanks that may indent nested lists, for each byte of HTML.
_MAX_GROWTH = 8
_SLASH = ord("/")
_LOOK_CHARS = 65_536
_SCAN = re.compile(
    rb"""<(?:[a-zA-Z](?:[^\s>"']*+(?:"[^"]*+"|'[^']*+')?+[\s/]++){%d}"""
    rb"""|/?([uUoO][lL]|[bB][oO][dD][yY]|[hH][tT][mM][lL])\b)""" % _MAX_ATTRIBUTES
)
"""Tags with too many attributes, and those of lists and bodies, in one pass."""


class HtmlError(PrepareError):
    """A page whose parsing or text would take far more time or memory than its size allows."""


class Html(Format):
    """Files of HTML, each a document."""

    name = "html"
    suffixes = (".html", ".htm", ".xhtml")
    is_grouped = True

    def sniff(self, head: bytes) -> bool:
        return HTML.match(head.removeprefix(BOM)) is not None

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        for index, file in enumerate(split.files):
            data, record = read_document(index, file, options, html=True)
            if record.problem and data and options.encoding == "auto":
                text = body_text(data, "", True)
                damaged = sum(text.count(char, 0, _LOOK_CHARS) for char in "\0\ufffd")
                if 10 * damaged > min(len(text), _LOOK_CHARS):
                    record = Record(index, problem="expected HTML, got bytes that are text in no encoding")
                else:
                    record = Record(index, text=strip_turn_marks(text), html=True)
            yield record


def parse_html(html: str) -> Any:
    """Parse a page with resiliparse. Raises HtmlError for one that would cost too much."""
    from resiliparse.parse.html import HTMLTree

    data = html.encode("utf-8", "replace")
    depth = max_depth = repeated = 0
    for match in _SCAN.finditer(data):
        tag, is_end = match[1], data[match.start() + 1] == _SLASH
        if tag is None:
            raise HtmlError(f"malformed HTML: a tag with more than {_MAX_ATTRIBUTES} attributes.")
        if len(tag) == 2:
            depth = max(0, depth - 1) if is_end else depth + 1
            max_depth = max(max_depth, depth)
        else:
            repeated += not is_end
    if repeated > _MAX_REPEATED:
        raise HtmlError(f"malformed HTML: <body> or <html> {repeated} times.")
    # The library puts two blanks for each level of nested lists before each line.
    if max_depth > _MAX_INDENTED // 2 and 2 * max_depth * data.count(b"<") > _MAX_INDENTED * len(data):
        raise HtmlError(f"malformed HTML: lists nested {max_depth} deep.")
    return HTMLTree.parse(html.replace("\0", "") if "\0" in html else html)


def html_to_text(html: str) -> str:
    """Return the text of a fragment or page with all that a browser shows of it. Raises HtmlError."""
    from resiliparse.extract.html2text import extract_plain_text

    text = extract_plain_text(parse_html(html), alt_texts=False, preserve_formatting=True)
    if len(text) > _MAX_GROWTH * len(html) + 1000:
        raise HtmlError(f"malformed HTML: {len(html)} characters become {len(text)} of text.")
    return BLANK_LINES.sub("\n\n", strip_turn_marks(text)).strip()
