"""StackExchange dumps: `Posts.xml`, plain, packed or within a `.7z`, a document a post.

Hides: XML attributes, bodies in HTML, and 7z archives, which are unpacked as they are read: a thread unpacks into a
pipe that holds it back, and neither disk nor memory sees the whole. Answers follow their questions by years, so joining
them would need the whole site in memory: posts stay apart, and an answer's id and address say where it belongs.

Options: `min_score`; `post_types` (default `[1, 2]`: questions and answers); `site` (`coffee.stackexchange.com`; by
default the name of the file or folder, if it is such a name), which makes addresses.
"""

import html
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from forebay.errors import PrepareError, install_command
from forebay.prepare.clean.extract import HtmlError, all_text
from forebay.prepare.documents import Record, strip_turn_marks
from forebay.prepare.read.base import Format, Piece, ReadOptions, Source
from forebay.prepare.read.fields import integers_of, min_score_of
from forebay.prepare.read.lines import lines_of
from forebay.prepare.read.opening import MIN_UNPACKED_BYTES, ChunkStream, Damaged, open_source

_ATTRIBUTE = re.compile(r'([A-Za-z]{1,40})="([^"]*)"')
_SITE = re.compile(
    r"(?:[a-z0-9-]{1,40}\.){0,3}(?:stackexchange|stackoverflow|serverfault|superuser|askubuntu|mathoverflow|stackapps)(?:\.com|\.net)"
)
_STEP = 1 << 20
_ReadSource = Callable[[Source, ReadOptions], Iterator[Record | None]]


def _read(read_source: _ReadSource, piece: Piece, options: ReadOptions) -> Iterator[Record]:
    posts = (post for source in piece.sources for post in read_source(source, options))
    yield from (replace(post, place=place) for place, post in enumerate(posts) if post is not None)


def _read_xml(source: Source, options: ReadOptions) -> Iterator[Record | None]:
    with open_source(source, options) as stream:
        yield from _posts(stream, _site_of(source.path, options), options)


def _posts(stream: BinaryIO, site: str, options: ReadOptions) -> Iterator[Record | None]:
    """A record for each post that is a document, or damage; None for what is no document."""
    numbers = integers_of(options, "post_types", [1, 2], "1 are questions, 2 answers.")
    types, min_score = frozenset(map(str, numbers)), min_score_of(options)
    for position, row, problem in _rows(stream, options):
        where, shown, post = f"byte {position}", row[:512].decode("utf-8", "replace"), dict[str, str]()
        try:
            post = dict(_ATTRIBUTE.findall(row.decode("utf-8")))
        except UnicodeDecodeError as error:
            problem = problem or f"not UTF-8: {error.reason} at byte {error.start}"
        if problem or "Id" not in post or "Body" not in post:
            yield Record(0, text=shown, problem=problem or "a row without Id or Body", where=where)
        else:
            wanted = not types or post.get("PostTypeId", "") in types
            liked = min_score is None or _number(post.get("Score", "0")) >= min_score
            try:
                yield _document(post, site, where) if wanted and liked else None
            except HtmlError as error:
                yield Record(0, post["Id"], shown, problem=str(error), where=where)


def _document(post: dict[str, str], site: str, where: str) -> Record | None:
    text = all_text(html.unescape(post["Body"]))
    if title := strip_turn_marks(html.unescape(post.get("Title", ""))).strip():
        text = f"{title}\n\n{text}"
    if not text:
        return None
    kind = "a" if post.get("PostTypeId") == "2" else "q"
    return Record(0, post["Id"], text, f"https://{site}/{kind}/{post['Id']}" if site else "", where=where)


def _rows(stream: BinaryIO, options: ReadOptions) -> Iterator[tuple[int, bytes, str]]:
    """Where each `<row … />` begins, its bytes, and what is wrong with it. Dumps have one a line."""
    for position, line, problem in lines_of(stream, options):
        row = line.strip()
        if problem or row.startswith(b"<row"):
            yield position, row, problem or ("" if row.endswith((b"/>", b"</row>")) else "a row that does not end")


def _number(text: str) -> int:
    return int(text) if text.lstrip("-").isdecimal() and len(text) < 12 else 0


def _site_of(path: str, options: ReadOptions) -> str:
    """The site by option, else by a name in the path that is one of StackExchange's; "" if none is."""
    given = options.options.get("site", "")
    if isinstance(given, str) and given:
        return given
    found = [_SITE.match(part.lower()) for part in re.split(r"[/\\]", path)]
    return next((match[0] for match in reversed(found) if match), "")


def _members(file: BinaryIO, entries: Sequence[Any]) -> Generator[tuple[str, BinaryIO], None, None]:
    """Each member as a stream, to be read before the next: a thread unpacks them into a pipe, which holds it back."""
    import py7zr.io

    read_end, write_end = os.pipe()
    failures: list[Exception] = []

    def unpack() -> None:
        try:
            with os.fdopen(write_end, "wb") as sink, py7zr.SevenZipFile(file) as archive:

                class Sink(py7zr.io.NullIO):
                    def write(self, data: bytes | bytearray) -> int:
                        return sink.write(data)

                class Factory(py7zr.io.WriterFactory):
                    def create(self, filename: str) -> Any:
                        return Sink()  # type: ignore[no-untyped-call]

                archive.extract(targets=[entry.filename for entry in entries], factory=Factory())
        except Exception as error:  # noqa: BLE001 - py7zr raises what its decoders raise
            failures.append(error)

    def bytes_of(size: int) -> Iterator[bytes]:
        while size:
            data = pipe.read(min(size, _STEP))
            if not data:
                thread.join()
                raise Damaged(f"damaged 7z: {failures[0] if failures else 'it ends early'}")
            size -= len(data)
            yield data

    pipe = os.fdopen(read_end, "rb")  # closed before the thread is waited for
    file.seek(0)
    thread = threading.Thread(target=unpack, name="unpack 7z", daemon=True)
    thread.start()
    try:
        for entry in entries:
            data = bytes_of(entry.uncompressed)
            yield entry.filename, ChunkStream(data)
            deque(data, 0)
            if failures:
                break
    finally:
        pipe.close()
        thread.join()
    if failures:
        raise Damaged(f"damaged 7z: {failures[0]}")


def _read_7z(source: Source, options: ReadOptions) -> Iterator[Record | None]:
    """The posts of each `Posts.xml` of an archive."""
    try:
        import py7zr
    except ImportError as error:
        raise PrepareError(
            f"7z archives need py7zr, which is not installed. Run: {install_command('prepare')}."
        ) from error
    with open_source(replace(source, compression=""), options) as file:
        try:
            with py7zr.SevenZipFile(file) as archive:
                entries = [entry for entry in archive.list() if not entry.is_directory]
                locked = archive.needs_password()
        except Exception as error:  # noqa: BLE001 - py7zr raises what its decoders raise
            yield Record(0, problem=f"damaged 7z: {error}", where=source.name)
            return
        if locked:
            yield Record(0, problem="a 7z with a password", where=source.name)
            return
        limit = max(MIN_UNPACKED_BYTES, options.max_unpacked_ratio * source.bytes)
        size = sum(entry.uncompressed for entry in entries)  # all are unpacked on the way to those that are wanted
        if size > limit:
            problem = f"a 7z that unpacks to {size} bytes: a bomb. Raise max_unpacked_ratio to read it"
            yield Record(0, problem=problem, where=source.name)
            return
        posts = [entry for entry in entries if PurePosixPath(entry.filename).name.lower() == "posts.xml"]
        if not posts:
            got = ", ".join(entry.filename for entry in entries[:5])[:200]
            problem = f"expected a Posts.xml in a 7z, got {got}. Unpack what is to be read"
            yield Record(0, problem=problem, where=source.name, failed=True)
            return
        try:
            with closing(_members(file, posts)) as members:
                for name, stream in members:
                    for record in _posts(stream, _site_of(f"{source.path}/{name}", options), options):
                        yield None if record is None else replace(record, where=f"{name}, {record.where}")
        except Damaged as error:
            yield Record(0, problem=str(error), where=source.name)


STACKEXCHANGE = Format("stackexchange", partial(_read, _read_xml))
SEVENZIP = Format("7z", partial(_read, _read_7z))
