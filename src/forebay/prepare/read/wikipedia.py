"""Wikipedia and other MediaWiki dumps (`pages-articles.xml`, also `.bz2` in many streams) as documents.

Hides: XML, revisions, namespaces and redirects. One revision of one page is in memory at a time, at most twice
`max_document_bytes` and 1 MiB. Each page is parsed alone, so that damage costs a page. Entities are not expanded:
dumps have none.

Options: `namespaces` (default `[0]`; `[]` is all), `redirects` (default false: they are no documents).
A page of several revisions is its last one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import unescape
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
_MARK = re.compile(rb"<(page|revision|/page)[\s>]")
_BASE = re.compile(rb"<base>([^<]{0,4000})</base>")
_NAMESPACE = re.compile(rb'<namespace key="(?:6|14|-2)"[^<>]{0,200}>([^<]{1,200})</namespace>')
_REDIRECT = re.compile(r"\s{0,100}#[^\s\[\]{}]{4,20}\s{0,10}:?\s{0,10}\[\[")
_HEAD_BYTES = 1 << 20
_FIELDS = ("title", "ns", "id", "revision/model", "revision/text")


@dataclass
class _Site:
    """What `<siteinfo>` says: where pages are on the web, and how files and categories are called here."""

    base: str = ""
    dropped: frozenset[str] = FILES_AND_CATEGORIES

    def learn(self, head: bytes) -> None:
        """Take what the head of the file says."""
        if found := _BASE.search(head):
            self.base = unescape(found[1].decode("utf-8", "replace")).strip()
        names = (unescape(name.decode("utf-8", "replace")).strip().lower() for name in _NAMESPACE.findall(head))
        self.dropped = self.dropped.union(names)

    def url(self, title: str) -> str:
        """The page's address; "" if the dump does not say."""
        stem = self.base.rpartition("/")[0]
        return f"{stem}/{quote(title.replace(' ', '_'), safe='/:(),')}" if stem else ""


@dataclass(frozen=True)
class _Page:
    """A page's XML with its last revision alone, and where it begins; or what is wrong there."""

    start: int
    xml: bytes = b""
    too_large: bool = False
    problem: str = ""


def read(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    """The articles of dumps, as `Format.read` says; their text begins with the title."""
    numbers = integers_of(options, "namespaces", [0], "Write namespaces = [0] for articles.")
    namespaces = frozenset(map(str, numbers))
    pages = (page for source in piece.sources for page in _read_source(source, piece, options, namespaces))
    yield from (replace(page, place=place) for place, page in enumerate(pages) if page is not None)


def _read_source(
    source: Source, piece: Piece, options: ReadOptions, namespaces: frozenset[str]
) -> Iterator[Record | None]:
    """A record for each document or damage, None for a page that is no document."""
    site = _Site()
    with open_source(source, options) as stream:
        if piece.start:
            site.learn(stream.read(_HEAD_BYTES).partition(b"<page")[0])
            stream.seek(piece.start)
        for page in _pages(stream, piece.start, site, 2 * options.max_document_bytes + _HEAD_BYTES):
            if piece.stop and page.start >= piece.stop:
                return
            yield _document(page, site, options, namespaces)


def _pages(stream: BinaryIO, offset: int, site: _Site, limit: int) -> Iterator[_Page]:
    """The pages from an offset on, whatever damage stands between them; of each at most `limit` bytes.

    Text holds no `<`: each mark is where an element begins or ends.
    """
    held, start, end = bytearray(), -1 if offset else -2, offset  # start -2: the head, -1: between pages
    revision, too_large = -1, False
    for part in _parts(stream, offset):
        if part.problem:
            yield part
            return
        mark, data, end = _MARK.match(part.xml), part.xml, part.start + len(part.xml)
        kind = mark[1] if mark else b""
        if kind == b"page":
            if start >= 0:
                yield _Page(start, problem="damaged XML: a page begins within another")
            elif start == -2:
                site.learn(bytes(held))
                if b"<!ENTITY" in held:
                    yield _Page(0, problem="an entity declaration, which no dump has")
            held, start, revision, too_large = bytearray(), part.start, -1, False
        elif kind == b"/page" and start >= 0:
            yield _Page(start, bytes(held) + b"</page>", too_large)
            held, start = bytearray(), -1
        elif kind == b"revision" and start >= 0:
            del held[revision if revision >= 0 else len(held) :]  # another one comes after it
            revision, too_large = len(held), False
        if start < 0:
            del held[: -_HEAD_BYTES if start == -2 else -16]
        elif too_large or len(held) + len(data) > limit:
            too_large, data = True, b""
            del held[max(revision, 0) :]
        held += data
    if start >= 0:
        yield _Page(start, problem="damaged XML: a page that does not end")
    elif b"</mediawiki" not in held:
        yield _Page(end, problem="damaged XML: it ends early")


def _parts(stream: BinaryIO, offset: int) -> Iterator[_Page]:
    """The stream in parts that end before each mark; the damage that ends it."""
    held, ended = b"", False
    while not ended:
        failure = ""
        try:
            data = stream.read(_CHUNK)
        except Damaged as error:
            data, failure = b"", str(error)
        ended = not data
        held += data
        start = 0
        for found in _MARK.finditer(held):
            if found.start() > start:
                yield _Page(offset + start, held[start : found.start()])
            start = found.start()
        open_mark = held.rfind(b"<", max(start + 1, len(held) - 10))
        stop = len(held) if ended or open_mark < 0 else open_mark
        if stop > start:
            yield _Page(offset + start, held[start:stop])
        offset, held = offset + stop, held[stop:]
        if failure:
            yield _Page(offset, problem=failure)


def _document(page: _Page, site: _Site, options: ReadOptions, namespaces: frozenset[str]) -> Record | None:
    if page.problem:
        return Record(0, problem=page.problem, where=f"byte {page.start}")
    try:
        fields = _fields(page.xml)
    except expat.ExpatError as error:
        problem = f"damaged XML: {expat.ErrorString(error.code)}"
        return Record(0, problem=problem, where=f"byte {page.start}")
    title, namespace, name, model, source = map(fields.get, _FIELDS, ("", "0", "", "", ""))
    if "deleted" in fields or model.strip() not in ("", "wikitext"):
        return None
    if namespaces and (namespace.strip() or "0") not in namespaces:
        return None
    where = f'page "{title}"'
    if page.too_large or len(source) > options.max_document_bytes:
        problem = f"a page of more than max_document_bytes = {options.max_document_bytes}"
        return Record(0, name.strip(), source[:512], site.url(title), problem=problem, where=where)
    redirect = "redirect" in fields or _REDIRECT.match(source)
    if redirect and not options.options.get("redirects", False):
        return None
    plain = to_text(source, site.dropped)
    return Record(0, name.strip(), f"{title}\n\n{plain}", site.url(title), where=where) if plain else None


def _fields(xml: bytes) -> dict[str, str]:
    """The text of each element of a page that is wanted, and `redirect`, `deleted` where it has them."""
    parser, path, found = expat.ParserCreate(), list[str](), dict[str, list[str]]()
    parser.buffer_text, parser.buffer_size = True, 64 << 10

    def start(name: str, attributes: dict[str, str]) -> None:
        path.append(name)
        if len(path) in (2, 3):
            found.setdefault("/".join(path[1:]), [])
            if name == "text" and "deleted" in attributes:
                found["deleted"] = []

    def characters(data: str) -> None:
        if len(path) in (2, 3):
            found["/".join(path[1:])].append(data)

    parser.StartElementHandler, parser.CharacterDataHandler = start, characters
    parser.EndElementHandler = lambda name: path.pop()
    parser.Parse(xml, True)
    return {name: "".join(parts) for name, parts in found.items()}


WIKIPEDIA = Format("wikipedia", read, LINES.cut)
"""A page is of the piece in which it begins."""
