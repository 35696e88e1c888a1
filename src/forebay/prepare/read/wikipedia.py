"""Wikipedia and other MediaWiki dumps (`pages-articles.xml`, also `.bz2` in many streams) as documents.

Hides: XML, revisions, namespaces and redirects. One page is in memory at a time, and never more of its text than
`max_document_bytes`. After damage reading goes on at the next `<page>`. Entities are not expanded: dumps have none.

Options: `namespaces` (default `[0]`; `[]` is all), `redirects` (default false: they are no documents).
A page of several revisions is its last one.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO
from urllib.parse import quote
from xml.parsers import expat

from forebay.prepare.documents import Record
from forebay.prepare.read.base import Format, Piece, ReadOptions, Source
from forebay.prepare.read.fields import integers_of
from forebay.prepare.read.lines import LINES
from forebay.prepare.read.opening import Damaged, open_source
from forebay.prepare.read.wikitext import FILES_AND_CATEGORIES, to_text

_CHUNK = 256 << 10
_PAGE = re.compile(rb"<page[\s>]")
_REDIRECT = re.compile(r"\s{0,100}#[^\s\[\]{}]{4,20}\s{0,10}:?\s{0,10}\[\[")
_HEAD_BYTES = 1 << 20
_FIELD_CHARACTERS = 64 << 10


@dataclass
class _Page:
    """What a `<page>` says, as far as it was read."""

    start: int
    title: str = ""
    namespace: str = "0"
    id: str = ""
    model: str = ""
    parts: list[str] = field(default_factory=list)
    size: int = 0
    redirect: bool = False
    deleted: bool = False


@dataclass
class _Site:
    """What `<siteinfo>` says: where pages are on the web, and how files and categories are called here."""

    base: str = ""
    dropped: set[str] = field(default_factory=set)

    def url(self, title: str) -> str:
        """The page's address; "" if the dump does not say."""
        stem = self.base.rpartition("/")[0]
        return f"{stem}/{quote(title.replace(' ', '_'), safe='/:(),')}" if stem else ""


class _Failure(Exception):  # noqa: N818 - becomes a record's problem
    """What is wrong with the XML, and where in the file."""

    def __init__(self, offset: int, reason: str) -> None:
        self.offset = offset
        self.reason = reason


class _Parser:
    """Expat's events as pages."""

    def __init__(self, offset: int, head: bytes, site: _Site, cap: int) -> None:
        self._expat = expat.ParserCreate()
        self._expat.buffer_text = True
        self._expat.buffer_size = 64 << 10
        self._expat.StartElementHandler = self._start
        self._expat.EndElementHandler = self._end
        self._expat.CharacterDataHandler = self._characters
        self._expat.EntityDeclHandler = self._refuse
        self._base = offset - len(head)
        self._site = site
        self._cap = cap
        self._field = ""
        self._text: list[str] = []
        self._key = ""
        self._in_revision = False
        self.awaited = False  # whether bytes were fed that begin a page
        self.page: _Page | None = None
        self.done: list[_Page] = []
        if head:
            self._expat.Parse(head, False)

    def feed(self, data: bytes, last: bool) -> list[_Page]:
        """The pages that end in these bytes.

        Raises:
            _Failure: If it is no XML from some byte on; `done` has the pages before.
        """
        self.done = []
        try:
            self._expat.Parse(data, last)
        except expat.ExpatError as error:
            reason = expat.ErrorString(error.code)
            raise _Failure(self._base + self._expat.ErrorByteIndex, f"damaged XML: {reason}") from error
        return self.done

    @property
    def stuck(self) -> bool:
        """Whether another page cannot begin here: one is open, or something that swallows markup."""
        return self.page is not None or self.awaited

    def _refuse(self, *_: object) -> None:
        raise _Failure(self._base + self._expat.CurrentByteIndex, "an entity declaration, which no dump has")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "page":
            self.page = _Page(self._base + self._expat.CurrentByteIndex)
            self.awaited = False
            self._in_revision = False
        elif name == "namespace":
            self._key = attributes.get("key", "")
            self._begin(name)
        elif self.page is None:
            if name == "base":
                self._begin(name)
        elif name == "redirect":
            self.page.redirect = True
        elif name == "revision":
            self._in_revision = True
            self.page.parts, self.page.size, self.page.model = [], 0, ""
        elif name == "text":
            self.page.deleted = "deleted" in attributes
            self._begin(name)
        elif name == "model" or (not self._in_revision and name in ("title", "ns", "id")):
            self._begin(name)

    def _begin(self, name: str) -> None:
        self._field, self._text = name, []

    def _characters(self, data: str) -> None:
        if self._field == "text" and self.page is not None:
            self.page.size += len(data)
            if self.page.size <= self._cap:
                self.page.parts.append(data)
            else:
                self.page.parts = self.page.parts[:1]
        elif self._field and len(self._text) < 64:
            self._text.append(data[:_FIELD_CHARACTERS])

    def _end(self, name: str) -> None:
        if name == "page" and self.page is not None:
            self.done.append(self.page)
            self.page = None
        if name != self._field:
            return
        self._field = ""
        value = "".join(self._text)
        if name == "base":
            self._site.base = value.strip()
        elif name == "namespace" and self._key in ("6", "14", "-2"):
            self._site.dropped.add(value.strip().lower())
        elif self.page is not None and name == "title":
            self.page.title = value
        elif self.page is not None and name == "ns":
            self.page.namespace = value.strip()
        elif self.page is not None and name == "id":
            self.page.id = self.page.id or value.strip()
        elif self.page is not None and name == "model":
            self.page.model = value.strip()


def read(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    """The articles of dumps, as `Format.read` says; their text begins with the title."""
    numbers = integers_of(options, "namespaces", [0], "Write namespaces = [0] for articles.")
    namespaces = frozenset(map(str, numbers))
    place = 0
    for source in piece.sources:
        for record in _read_source(source, piece, options, namespaces):
            if record is not None:
                yield Record(place, record.id, record.text, record.url, False, record.problem, record.where)
            place += 1


def _read_source(
    source: Source, piece: Piece, options: ReadOptions, namespaces: frozenset[str]
) -> Iterator[Record | None]:
    """A record for each document or damage, None for a page that is no document."""
    site = _Site(dropped=set(FILES_AND_CATEGORIES))
    start, stop = (piece.start, piece.stop) if piece.stop else (0, 0)
    with open_source(source, options) as stream:
        if start:
            _learn_site(stream, site, options.max_document_bytes)
            stream.seek(start)
        for page in _pages(stream, start, site, options.max_document_bytes):
            if isinstance(page, _Failure):
                if stop and page.offset >= stop:
                    return
                yield Record(0, problem=page.reason, where=f"byte {page.offset}")
            elif stop and page.start >= stop:
                return
            else:
                yield _document(page, site, options, namespaces)


def _learn_site(stream: BinaryIO, site: _Site, cap: int) -> None:
    """Takes what the head of the file says of the site."""
    with suppress(_Failure):
        _Parser(0, b"", site, cap).feed(stream.read(_HEAD_BYTES), False)


def _pages(stream: BinaryIO, offset: int, site: _Site, cap: int) -> Iterator[_Page | _Failure]:
    """The pages from an offset on; after each damage, those from the next `<page>` on."""
    parser = None if offset else _Parser(0, b"", site, cap)
    position = offset
    for part in _parts(stream, offset):
        if isinstance(part, _Failure):
            yield part
            return
        position, data, begins = part
        if begins and parser is not None and parser.stuck:
            yield _Failure(position, "damaged XML: a page begins within another")
            parser = None
        if begins and parser is None:
            parser = _Parser(position, b"<mediawiki>", site, cap)
        if parser is None:
            continue
        parser.awaited = parser.awaited or begins
        try:
            yield from parser.feed(data, False)
        except _Failure as failure:
            yield from parser.done
            yield failure
            parser = None
    if parser is not None:
        try:
            parser.feed(b"", True)
        except _Failure as failure:
            yield failure


def _parts(stream: BinaryIO, offset: int) -> Iterator[tuple[int, bytes, bool] | _Failure]:
    """The stream in parts that end before each `<page>`: offset, bytes, and whether they begin with one.

    Text holds no `<`, so that each is the beginning of a page, whatever damage stands before it.
    """
    held, begins, ended = b"", False, False
    while not ended:
        failure = None
        try:
            data = stream.read(_CHUNK)
        except Damaged as error:
            data, failure = b"", str(error)
        ended = not data
        held += data
        start = 0
        for found in _PAGE.finditer(held):
            if found.start() > start:
                yield offset + start, held[start : found.start()], begins
            start, begins = found.start(), True
        open_mark = held.rfind(b"<", max(start + 1, len(held) - 6))
        stop = len(held) if ended or open_mark < 0 else open_mark
        if stop > start:
            yield offset + start, held[start:stop], begins
            begins = False
        offset, held = offset + stop, held[stop:]
        if failure is not None:
            yield _Failure(offset, failure)


def _document(page: _Page, site: _Site, options: ReadOptions, namespaces: frozenset[str]) -> Record | None:
    if (namespaces and page.namespace not in namespaces) or page.deleted or page.model not in ("", "wikitext"):
        return None
    source = "".join(page.parts)
    where = f'page "{page.title}"'
    if page.size > options.max_document_bytes:
        problem = f"a page of more than max_document_bytes = {options.max_document_bytes}"
        return Record(0, page.id, source[:512], site.url(page.title), problem=problem, where=where)
    if not options.options.get("redirects", False) and (page.redirect or _REDIRECT.match(source)):
        return None
    text = to_text(source, frozenset(site.dropped))
    if not text:
        return None
    return Record(0, page.id, f"{page.title}\n\n{text}", site.url(page.title), where=where)


WIKIPEDIA = Format("wikipedia", read, LINES.cut)
"""A page is of the piece in which it begins."""
