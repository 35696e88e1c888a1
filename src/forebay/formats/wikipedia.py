"""Wikipedia and other MediaWiki dumps (`pages-articles.xml`, also `.bz2` in many streams) as documents.

One revision of one page is in memory at a time, at most twice `max_document_bytes` and 1 MiB. Each page is parsed
alone, so that damage costs a page. Entities are not expanded: dumps have none. A page of several revisions is its last
one; redirects are no documents. Option: `namespaces` (default `[0]`; `[]` is all).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import unescape
from typing import BinaryIO
from urllib.parse import quote
from xml.parsers import expat

from forebay.errors import CorruptInputError, UsageError
from forebay.formats.base import Format
from forebay.formats.inputs import Extents, InputFile, InputSplit, ReadOptions, open_input
from forebay.formats.records import Record, values_of
from forebay.formats.text import split_bytes
from forebay.formats.wikitext import FILES_AND_CATEGORIES, to_text

_CHUNK = 256 << 10
_MARK = re.compile(rb"<(page|revision|/page)[\s>]")
_BASE = re.compile(rb"<base>([^<]{0,4000})</base>")
_NAMESPACE = re.compile(rb'<namespace key="(?:6|14|-2)"[^<>]{0,200}>([^<]{1,200})</namespace>')
_REDIRECT = re.compile(r"\s{0,100}#[^\s\[\]{}]{4,20}\s{0,10}:?\s{0,10}\[\[")
_HEAD_BYTES = 1 << 20
_FIELDS = ("title", "ns", "id", "revision/model", "revision/text")


@dataclass
class _Site:
    """What `<siteinfo>` tells: the address of pages, and the names of files and categories in its language."""

    base: str = ""
    dropped: frozenset[str] = FILES_AND_CATEGORIES

    def update(self, head: bytes) -> None:
        """Set the address and names from the head of the file."""
        if match := _BASE.search(head):
            self.base = unescape(match[1].decode("utf-8", "replace")).strip()
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


class Wikipedia(Format):
    """Dumps of MediaWiki; the text of an article begins with its title."""

    name = "wikipedia"
    suffixes = ("-articles.xml", ".mediawiki.xml")
    is_plain_text = True  # Pages are parsed one by one, without the XML declaration.

    def sniff(self, head: bytes) -> bool:
        return b"<mediawiki" in head[:1024]

    def split(self, file: InputFile, options: ReadOptions) -> Extents:
        """A page is of the split in which it begins."""
        return split_bytes(file)

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        numbers = options.options.get("namespaces", [0])
        if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
            raise UsageError(f"namespaces: expected a list of numbers, got {numbers!r}. Write [0] for articles.")
        namespaces = frozenset(map(str, numbers))
        pages = (page for file in split.files for page in _read_file(file, split, options, namespaces))
        yield from (replace(page, index=index) for index, page in enumerate(pages) if page is not None)


def _read_file(
    file: InputFile, split: InputSplit, options: ReadOptions, namespaces: frozenset[str]
) -> Iterator[Record | None]:
    site = _Site()
    with open_input(file, options) as stream:
        if split.start:
            site.update(stream.read(_HEAD_BYTES).partition(b"<page")[0])
            stream.seek(split.start)
        for page in _pages(stream, split.start, site, 2 * options.max_document_bytes + _HEAD_BYTES):
            if split.stop and page.start >= split.stop:
                return
            yield _document(page, site, options, namespaces)


def _pages(stream: BinaryIO, offset: int, site: _Site, limit: int) -> Iterator[_Page]:
    """The pages from an offset on, whatever damage stands between; of each at most `limit` bytes. Text holds no `<`."""
    pending, start, end = bytearray(), -1 if offset else -2, offset  # start -2: the head, -1: between pages
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
                site.update(bytes(pending))
                if b"<!ENTITY" in pending:
                    yield _Page(0, problem="an entity declaration, which no dump has")
            pending, start, revision, too_large = bytearray(), part.start, -1, False
        elif kind == b"/page" and start >= 0:
            yield _Page(start, bytes(pending) + b"</page>", too_large)
            pending, start = bytearray(), -1
        elif kind == b"revision" and start >= 0:
            del pending[revision if revision >= 0 else len(pending) :]  # another one comes after it
            revision, too_large = len(pending), False
        if start < 0:
            del pending[: -_HEAD_BYTES if start == -2 else -16]
        elif too_large or len(pending) + len(data) > limit:
            too_large, data = True, b""
            del pending[max(revision, 0) :]
        pending += data
    if start >= 0:
        yield _Page(start, problem="damaged XML: a page that does not end")
    elif end and b"</mediawiki" not in pending:
        yield _Page(end, problem="damaged XML: it ends early")


def _parts(stream: BinaryIO, offset: int) -> Iterator[_Page]:
    pending, ended = b"", False
    while not ended:
        failure = ""
        try:
            data = stream.read(_CHUNK)
        except CorruptInputError as error:
            data, failure = b"", str(error)
        ended = not data
        pending += data
        start = 0
        for match in _MARK.finditer(pending):
            if match.start() > start:
                yield _Page(offset + start, pending[start : match.start()])
            start = match.start()
        open_mark = pending.rfind(b"<", max(start + 1, len(pending) - 10))
        stop = len(pending) if ended or open_mark < 0 else open_mark
        if stop > start:
            yield _Page(offset + start, pending[start:stop])
        offset, pending = offset + stop, pending[stop:]
        if failure:
            yield _Page(offset, problem=failure)


def _document(page: _Page, site: _Site, options: ReadOptions, namespaces: frozenset[str]) -> Record | None:
    if page.problem:
        return Record(0, problem=page.problem, location=f"byte {page.start}")
    try:
        fields = _fields(page.xml)
    except expat.ExpatError as error:
        return Record(0, problem=f"damaged XML: {expat.ErrorString(error.code)}", location=f"byte {page.start}")
    title, namespace, name, model, source = map(fields.get, _FIELDS, ("", "0", "", "", ""))
    if "deleted" in fields:
        return None
    if namespaces and (namespace.strip() or "0") not in namespaces:
        return None
    location = f'page "{title}"'
    if page.too_large or len(source) > options.max_document_bytes:
        return Record(
            0,
            name.strip(),
            source[:512],
            site.url(title),
            problem=f"a page of more than max_document_bytes = {options.max_document_bytes}",
            location=location,
        )
    if "redirect" in fields or _REDIRECT.match(source):
        return None
    if (model := model.strip()) not in ("", "wikitext"):
        return Record(0, name.strip(), problem=f"expected wikitext, got a page of the model {model}", location=location)
    plain = to_text(source, site.dropped)
    if not plain:
        return Record(0, name.strip(), location=location)
    columns = {column: fields.get(column, fields.get(f"revision/{column}", "")) for column in options.columns}
    values = values_of(columns, options)
    return Record(0, name.strip(), f"{title}\n\n{plain}", site.url(title), location=location, values=values)


def _fields(xml: bytes) -> dict[str, str]:
    parser, path, texts = expat.ParserCreate(), list[str](), dict[str, list[str]]()
    parser.buffer_text, parser.buffer_size = True, 64 << 10

    def start(name: str, attributes: dict[str, str]) -> None:
        path.append(name)
        if len(path) in (2, 3):
            texts.setdefault("/".join(path[1:]), [])
            if name == "text" and "deleted" in attributes:
                texts["deleted"] = []

    def characters(data: str) -> None:
        if len(path) in (2, 3):
            texts["/".join(path[1:])].append(data)

    parser.StartElementHandler, parser.CharacterDataHandler = start, characters
    parser.EndElementHandler = lambda name: path.pop()
    parser.Parse(xml, True)
    return {name: "".join(parts) for name, parts in texts.items()}
