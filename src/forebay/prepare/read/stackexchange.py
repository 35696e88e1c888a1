"""StackExchange dumps: `Posts.xml`, plain, packed or within a `.7z`, a document a post.

Hides: XML attributes, bodies in HTML, and 7z archives, which are unpacked as they are read: a thread unpacks, a bounded
queue holds it back, and neither disk nor memory sees the whole. Answers follow their questions by years, so joining
them would need the whole site in memory: posts stay apart, and an answer's id and address say where it belongs.

Options: `min_score`; `post_types` (default `[1, 2]`: questions and answers); `site` (`coffee.stackexchange.com`; by
default the name of the file or folder, if it is such a name), which makes addresses.
"""

from __future__ import annotations

import html
import io
import queue
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from forebay.errors import PrepareError, UsageError
from forebay.extras import install_command
from forebay.formats.detect import detect
from forebay.prepare.documents import Record, without_turns
from forebay.prepare.extract import all_text
from forebay.prepare.read.base import Format, Piece, ReadOptions, Source
from forebay.prepare.read.opening import Damaged, open_source

_ATTRIBUTE = re.compile(r'([A-Za-z]{1,40})="([^"]*)"')
_SITE = re.compile(
    r"(?:[a-z0-9-]{1,40}\.){0,3}(?:stackexchange|stackoverflow|serverfault|superuser|askubuntu|mathoverflow|stackapps)(?:\.com|\.net)"
)
_STEP = 1 << 20
_QUEUE_PARTS = 16
_BOMB_FLOOR = 1 << 30


def _read_posts(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    place = 0
    for source in piece.sources:
        with open_source(source, options.max_unpacked_ratio) as stream:
            for record in _posts(stream, _site_of(source.path, options), options):
                if record is not None:
                    yield replace(record, place=place)
                place += 1


def _posts(stream: BinaryIO, site: str, options: ReadOptions) -> Iterator[Record | None]:
    """A record for each post that is a document, or damage; None for what is no document."""
    types, min_score = _post_types(options), _min_score(options)
    for position, row, problem in _rows(stream, options.max_document_bytes):
        where = f"byte {position}"
        if problem:
            yield Record(0, text=row[:512].decode("utf-8", "replace"), problem=problem, where=where)
            continue
        try:
            post = dict(_ATTRIBUTE.findall(row.decode("utf-8")))
        except UnicodeDecodeError as error:
            shown = row[:512].decode("utf-8", "replace")
            yield Record(0, text=shown, problem=f"not UTF-8: {error.reason} at byte {error.start}", where=where)
            continue
        if "Id" not in post or "Body" not in post:
            yield Record(0, text=row[:512].decode(), problem="a row without Id or Body", where=where)
        else:
            wanted = not types or post.get("PostTypeId", "") in types
            liked = min_score is None or _number(post.get("Score", "0")) >= min_score
            yield _document(post, site, where) if wanted and liked else None


def _document(post: dict[str, str], site: str, where: str) -> Record | None:
    text = all_text(html.unescape(post["Body"]))
    if title := without_turns(html.unescape(post.get("Title", ""))).strip():
        text = f"{title}\n\n{text}"
    if not text:
        return None
    kind = "a" if post.get("PostTypeId") == "2" else "q"
    return Record(0, post["Id"], text, f"https://{site}/{kind}/{post['Id']}" if site else "", where=where)


def _rows(stream: BinaryIO, cap: int) -> Iterator[tuple[int, bytes, str]]:
    """Where each `<row … />` begins, its bytes, and what is wrong with it. Dumps have one a line."""
    position, held, start = 0, bytearray(), 0
    while True:
        try:
            line = stream.readline(cap + 1)
        except Damaged as error:
            yield position, bytes(held), str(error)
            return
        if not line:
            if held:
                yield start, bytes(held), "a row that does not end"
            return
        if line.lstrip(b" \t").startswith(b"<row"):
            if held:
                yield start, bytes(held), "a row that does not end"
            held, start = bytearray(), position
        elif not held:
            position += len(line)
            continue
        position += len(line)
        held += line
        if line.rstrip().endswith((b"/>", b"</row>")):
            yield start, bytes(held), ""
            held = bytearray()
        elif len(held) > cap:
            position += _rest_of_line(stream, line)
            yield start, bytes(held[:512]), f"a post of more than max_document_bytes = {cap}"
            held = bytearray()


def _rest_of_line(stream: BinaryIO, line: bytes) -> int:
    passed = 0
    while not line.endswith(b"\n"):
        try:
            line = stream.readline(_STEP)
        except Damaged:
            break  # the next read says so
        if not line:
            break
        passed += len(line)
    return passed


def _post_types(options: ReadOptions) -> frozenset[str]:
    given = options.options.get("post_types", [1, 2])
    if not isinstance(given, (list, tuple)) or not all(isinstance(number, int) for number in given):
        raise UsageError(f"post_types: expected a list of numbers, got {given!r}. 1 are questions, 2 answers.")
    return frozenset(str(number) for number in given)


def _min_score(options: ReadOptions) -> int | None:
    given = options.options.get("min_score")
    if given is not None and not isinstance(given, int):
        raise UsageError(f"min_score: expected a number, got {given!r}. Write min_score = 3.")
    return given


def _number(text: str) -> int:
    return int(text) if text.lstrip("-").isdecimal() and len(text) < 12 else 0


def _site_of(path: str, options: ReadOptions) -> str:
    """The site by option, else by a name in the path that is one of StackExchange's; "" if none is."""
    given = options.options.get("site", "")
    if isinstance(given, str) and given:
        return given
    found = [_SITE.match(part.lower()) for part in re.split(r"[/\\]", path)]
    return next((match[0] for match in reversed(found) if match), "")


class _Stopped(Exception):  # noqa: N818 - ends the thread that unpacks
    """Nobody reads any more, or it grew too much."""


class _Pipe(io.RawIOBase):
    """What a thread writes, read as a stream; the queue between them is short."""

    def __init__(self, limit: int) -> None:
        self._parts: queue.Queue[bytes | BaseException | None] = queue.Queue(_QUEUE_PARTS)
        self._held = memoryview(b"")
        self._end: BaseException | None = None
        self._ended = False
        self._limit = limit
        self._written = 0
        self._gone = threading.Event()

    def put(self, part: bytes | BaseException | None) -> None:
        """Gives a part to the reader; None is the end, an exception the end by damage."""
        if isinstance(part, bytes):
            self._written += len(part)
            if self._written > self._limit:
                raise _Stopped(
                    f"it grows to more than {self._limit} bytes: a bomb. Raise max_unpacked_ratio to read it"
                )
        while not self._gone.is_set():
            try:
                self._parts.put(part, timeout=0.2)
                return
            except queue.Full:
                continue
        raise _Stopped("nobody reads")

    def leave(self) -> None:
        """The reader reads no more."""
        self._gone.set()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._held and not self._ended:
            part = self._parts.get()
            if isinstance(part, bytes):
                self._held = memoryview(part)
            else:
                self._ended, self._end = True, part
        if not self._held:
            if self._end is not None:
                raise Damaged(f"damaged 7z: {self._end}")
            return 0
        size = min(len(self._held), len(buffer))
        buffer[:size] = self._held[:size]
        self._held = self._held[size:]
        return size


def _py7zr() -> Any:
    try:
        import py7zr
    except ImportError as error:
        raise PrepareError(
            f"7z archives need py7zr, which is not installed. Run: {install_command('prepare')}."
        ) from error
    return py7zr


@contextmanager
def _member_stream(path: BinaryIO, name: str, limit: int) -> Iterator[BinaryIO]:
    """One member of an archive as a stream of unpacked bytes."""
    import py7zr.io

    pipe = _Pipe(limit)

    class Sink(py7zr.io.Py7zIO):
        def write(self, data: bytes | bytearray) -> int:
            for start in range(0, len(data), _STEP):
                pipe.put(bytes(data[start : start + _STEP]))
            return len(data)

        def read(self, size: int | None = None) -> bytes:
            return b""

        def seek(self, offset: int, whence: int = 0) -> int:
            return 0

        def flush(self) -> None:
            pass

        def size(self) -> int:
            return 0

    class Factory(py7zr.io.WriterFactory):
        def create(self, filename: str) -> Any:
            return Sink()

    def unpack() -> None:
        try:
            path.seek(0)
            with py7zr.SevenZipFile(path) as archive:
                archive.extract(targets=[name], factory=Factory())
            pipe.put(None)
        except _Stopped as stopped:
            _end(pipe, stopped)
        except Exception as error:  # noqa: BLE001 - py7zr raises what its decoders raise
            _end(pipe, error)

    thread = threading.Thread(target=unpack, name=f"unpack {name}", daemon=True)
    thread.start()
    try:
        yield io.BufferedReader(pipe, _STEP)
    finally:
        pipe.leave()
        thread.join()


def _end(pipe: _Pipe, error: Exception) -> None:
    try:
        pipe.put(error)
    except _Stopped:
        return


def _read_7z(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    """The posts of each `Posts.xml`; of an archive without one, the documents of what else is in it and known."""
    places = 0
    for source in piece.sources:
        for record in _read_archive(source, options):
            if record is not None:
                yield replace(record, place=places)
            places += 1


def _read_archive(source: Source, options: ReadOptions) -> Iterator[Record | None]:
    py7zr = _py7zr()
    with open_source(replace(source, compression=""), options.max_unpacked_ratio) as file:
        try:
            with py7zr.SevenZipFile(file) as archive:
                names = [entry.filename for entry in archive.list() if not entry.is_directory]
                locked = archive.needs_password()
        except Exception as error:  # noqa: BLE001 - py7zr raises what its decoders raise
            yield Record(0, problem=f"damaged 7z: {error}", where=source.name)
            return
        if locked:
            yield Record(0, problem="a 7z with a password", where=source.name)
            return
        limit = max(_BOMB_FLOOR, options.max_unpacked_ratio * source.bytes)
        posts = [name for name in names if PurePosixPath(name).name.lower() == "posts.xml"]
        for name in posts or names:
            with _member_stream(file, name, limit) as stream:
                if posts:
                    site = _site_of(f"{source.path}/{name}", options)
                    for record in _posts(stream, site, options):
                        yield None if record is None else replace(record, where=f"{name}, {record.where}")
                else:
                    yield from _other(stream, name, options)


def _other(stream: BinaryIO, name: str, options: ReadOptions) -> Iterator[Record | None]:
    """The documents of a member of any known format, by way of a temporary file that is gone afterwards."""
    from forebay.prepare.read.formats import FORMATS

    with tempfile.TemporaryDirectory(prefix="forebay-") as folder:
        path = Path(folder) / "member"
        try:
            _spill(stream, path)
        except Damaged as error:
            yield Record(0, problem=str(error), where=name)
            return
        size = path.stat().st_size
        found = detect(path, name)
        chosen = FORMATS.get(found.format)
        if chosen is None or chosen.name == "7z":
            problem = found.problem or f"a member of no format that holds text: {found.format or found.why}"
            yield Record(0, text=name, problem=problem, where=name)
            return
        plain = Source(str(path), name, chosen.name, found.compression, size, "")
        for record in chosen.read(Piece((plain,)), options):
            yield replace(record, where=f"{name}, {record.where}" if record.where else name)


def _spill(stream: BinaryIO, path: Path) -> None:
    """Writes a stream to a file. The stream's own limit ends a bomb."""
    with path.open("wb") as file:
        while data := stream.read(_STEP):
            file.write(data)


STACKEXCHANGE = Format("stackexchange", _read_posts)
SEVENZIP = Format("7z", _read_7z)
