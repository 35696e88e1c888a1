"""HTML to the text that a reader came for.

Hides: the HTML parser (resiliparse), and what tells an article from the menus and footers around it: elements that say
what they are, by their HTML5 tag, their ARIA role or the words in their class and id. On the few pages read by hand
that keeps up with trafilatura at about ten times its speed (figures, and how little they prove:
docs/decisions/0004-html-extraction.md). resiliparse's own search for main text is not used: its time grows with the
square of how deep elements are nested; this is linear. What it cannot see is boilerplate that says nothing of itself:
lists of links in plain tables, as pages before 2010 have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from forebay.prepare.documents import Verdict, keep_all, replace_column, without_turns

_TAGS = (
    "nav",
    "footer",
    "aside",
    "form",
    "noscript",
    "button",
    "select",
    "dialog",
    "template",
    "iframe",
    "body > header",
)
_ROLES = ("navigation", "banner", "contentinfo", "search", "complementary", "dialog", "menu", "menubar")
_NAMES = (
    "nav navbar navigation menu header footer sidebar breadcrumb breadcrumbs cookie social share sharing pagination "
    "pager comments related login search toolbar banner newsletter popup modal skip-link copyright"
)
_WITHIN = ("sidebar", "breadcrumb", "cookie", "footer", "navbar", "-nav", "nav-", "menu")
# A page whose whole body is `class="has-sidebar"` is no sidebar.
_NOT_ALL = ":not(html):not(body):not(main):not(article)"
_PLAIN_SKIPPED = [*_TAGS, *(f'[role="{role}"]' for role in _ROLES), '[aria-hidden="true"]', "[hidden]"]
_SKIPPED = [
    *_PLAIN_SKIPPED,
    *(f"{mark}{name}{_NOT_ALL}" for name in _NAMES.split() for mark in ".#"),
    *(f'[{attribute}*="{word}"]{_NOT_ALL}' for attribute in ("class", "id") for word in _WITHIN),
]
_FEW_CHARACTERS = 400
"""A page with less main text than this may have lost it to a name that misleads: then tags and roles alone decide."""
_BLANK_LINES = re.compile(r"\n{3,}")


@dataclass(frozen=True)
class Extract:
    """The stage: rows with `html` get their main text; rows without stay as they are.

    Args:
        min_characters: A page whose main text is shorter is dropped.
        main_content: Whether menus, headers and footers are left out.
    """

    name: ClassVar[str] = "extract"
    version: ClassVar[int] = 1
    min_characters: int = 1
    main_content: bool = True

    @property
    def reasons(self) -> tuple[str, ...]:
        """Of a page without text."""
        return ("no_text",)

    def files(self) -> tuple[str, ...]:
        """None."""
        return ()

    def apply(self, batch: pa.RecordBatch) -> Verdict:
        """The batch with text in place of HTML; counts `extracted`."""
        drop = keep_all(batch.num_rows)
        html = batch.column("html").to_pylist()
        if not any(html):
            return Verdict(batch, drop)
        texts = batch.column("text").to_pylist()
        for row, is_html in enumerate(html):
            if is_html:
                texts[row] = extract_html(texts[row]) if self.main_content else all_text(texts[row])
                if len(texts[row]) < self.min_characters:
                    drop[row] = 0
        batch = replace_column(batch, "text", pa.array(texts, pa.large_string()))
        batch = replace_column(batch, "html", pa.array([False] * batch.num_rows, pa.bool_()))
        return Verdict(batch, drop, {"extracted": sum(html) - int((drop == 0).sum())})


def extract_html(html: str) -> str:
    """The main text of a page: paragraphs, headings and list items, a line each; "" if there is none.

    Cost: about 20 MB of HTML a CPU second, linear in its length.
    """
    text = _plain(html, _SKIPPED)
    if len(text) >= _FEW_CHARACTERS:
        return text
    cautious = _plain(html, _PLAIN_SKIPPED)
    return cautious if len(cautious) > 4 * len(text) else text


def all_text(html: str) -> str:
    """The text of a fragment or page with all that a browser shows of it."""
    return _plain(html, None)


def _plain(html: str, skipped: list[str] | None) -> str:
    from resiliparse.extract.html2text import extract_plain_text

    text: str = extract_plain_text(
        html.replace("\0", ""), alt_texts=False, preserve_formatting=True, skip_elements=skipped
    )
    return _BLANK_LINES.sub("\n\n", without_turns(text)).strip()


def extract_file(path: str | Path) -> Iterator[tuple[str, str]]:
    """Address and main text of each page in an HTML file, or in a WARC, WET or ARC file, packed or not.

    The address of an HTML file is its path.

    Raises:
        PrepareError: If the file cannot be read; of a damaged archive, what can be read comes first.
    """
    from forebay.errors import PrepareError
    from forebay.formats.detect import detect
    from forebay.prepare.read import warc
    from forebay.prepare.read.base import Piece, ReadOptions, Source
    from forebay.prepare.read.http_message import body_text
    from forebay.prepare.read.opening import Damaged, open_local, open_source

    with open_local(path) as stream:
        found = detect(stream, Path(path).name)
    options = ReadOptions()
    size = Path(path).stat().st_size if "://" not in str(path) else 0
    source = Source(str(path), Path(path).name, "warc", found.compression, size, "")
    try:
        if found.format != "warc":
            with open_source(source, options.max_unpacked_ratio, options.max_window_bytes) as stream:
                body = stream.read(options.max_document_bytes)
                yield str(path), extract_html(body_text(body, "", True))
                return
    except Damaged as error:
        raise PrepareError(f"{path}: {error}") from error
    damages = []
    for record in warc.read(Piece((source,)), options):
        if record.problem:
            damages.append(f"{record.where}: {record.problem}")
        else:
            yield record.url or record.id, extract_html(record.text) if record.html else record.text
    if damages:
        raise PrepareError(f"{path}: {len(damages)} damaged records were left out; the first at {damages[0]}.")
