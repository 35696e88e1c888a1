"""StackExchange dumps: `Posts.xml`, plain, packed or within a `.7z`, a document a post.

Hides: XML attributes, bodies in HTML, and 7z archives, which are unpacked as they are read: a thread unpacks, a bounded
queue holds it back, and neither disk nor memory sees the whole. Answers follow their questions by years, so joining
them would need the whole site in memory: posts stay apart, and an answer's id and address say where it belongs.

Options: `min_score`; `post_types` (default `[1, 2]`: questions and answers); `site` (`coffee.stackexchange.com`; by
default the name of the file or folder, if it is such a name), which makes addresses.
"""

import html
import queue
import re
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from forebay.errors import PrepareError
from forebay.extras import install_command
from forebay.formats.detect import detect
from forebay.prepare.documents import Record, without_turns
from forebay.prepare.extract import HtmlError, all_text
from forebay.prepare.read.base import Format, Piece, ReadOptions, Source
from forebay.prepare.read.fields import integers_of, min_score_of
from forebay.prepare.read.opening import MIN_UNPACKED_BYTES, ChunkStream, Damaged, open_source

_ATTRIBUTE = re.compile(r'([A-Za-z]{1,40})="([^"]*)"')
_SITE = re.compile(
    r"(?:[a-z0-9-]{1,40}\.){0,3}(?:stackexchange|stackoverflow|serverfault|superuser|askubuntu|mathoverflow|stackapps)(?:\.com|\.net)"
)
_STEP = 1 << 20
_QUEUE_PARTS = 16
_Part = str | bytes | Exception | None
"""What a thread that unpacks gives: a member's name, bytes of it, the damage that ends all, or the end."""


def _read_posts(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    place = 0
    for source in piece.sources:
        with open_source(source, options) as stream:
            for record in _posts(stream, _site_of(source.path, options), options):
                if record is not None:
                    yield replace(record, place=place)
                place += 1


def _posts(stream: BinaryIO, site: str, options: ReadOptions) -> Iterator[Record | None]:
    """A record for each post that is a document, or damage; None for what is no document."""
    numbers = integers_of(options, "post_types", [1, 2], "1 are questions, 2 answers.")
    types, min_score = frozenset(map(str, numbers)), min_score_of(options)
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
            try:
                yield _document(post, site, where) if wanted and liked else None
            except HtmlError as error:
                yield Record(0, post["Id"], row[:512].decode(), problem=str(error), where=where)


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


def _number(text: str) -> int:
    return int(text) if text.lstrip("-").isdecimal() and len(text) < 12 else 0


def _site_of(path: str, options: ReadOptions) -> str:
    """The site by option, else by a name in the path that is one of StackExchange's; "" if none is."""
    given = options.options.get("site", "")
    if isinstance(given, str) and given:
        return given
    found = [_SITE.match(part.lower()) for part in re.split(r"[/\\]", path)]
    return next((match[0] for match in reversed(found) if match), "")


class _UnpackAborted(Exception):  # noqa: N818 - ends the thread that unpacks
    """The reader was closed, or the archive unpacks to too much."""


def _py7zr() -> Any:
    try:
        import py7zr
    except ImportError as error:
        raise PrepareError(
            f"7z archives need py7zr, which is not installed. Run: {install_command('prepare')}."
        ) from error
    return py7zr


@contextmanager
def _members(file: BinaryIO, names: list[str], limit: int) -> Iterator[Iterator[tuple[str, BinaryIO]]]:
    """Members of an archive as streams of unpacked bytes, in their order; all together have at most `limit` bytes."""
    import py7zr.io

    parts: queue.Queue[_Part] = queue.Queue(_QUEUE_PARTS)
    left, gone = limit, threading.Event()

    def put(part: _Part) -> None:
        while not gone.is_set():
            try:
                parts.put(part, timeout=0.2)
                return
            except queue.Full:
                continue
        raise _UnpackAborted("the reader was closed")

    class Sink(py7zr.io.NullIO):
        def write(self, data: bytes | bytearray) -> int:
            nonlocal left
            for start in range(0, len(data), _STEP):
                part = bytes(data[start : start + _STEP])
                left -= len(part)
                if left < 0:
                    raise _UnpackAborted("it unpacks to too much. Raise max_unpacked_ratio to read it")
                put(part)
            return len(data)

    class Factory(py7zr.io.WriterFactory):
        def create(self, filename: str) -> Any:
            put(filename)
            return Sink()  # type: ignore[no-untyped-call]

    def unpack() -> None:
        end: Exception | None = None
        try:
            file.seek(0)
            with py7zr.SevenZipFile(file) as archive:
                archive.extract(targets=names, factory=Factory())
        except Exception as error:  # noqa: BLE001 - py7zr raises what its decoders raise
            end = error
        with suppress(_UnpackAborted):
            put(end)

    thread = threading.Thread(target=unpack, name="unpack 7z", daemon=True)
    thread.start()
    try:
        yield _streams(parts)
    finally:
        gone.set()
        thread.join()


def _streams(parts: queue.Queue[_Part]) -> Iterator[tuple[str, BinaryIO]]:
    """Each member as a stream, to be read before the next; what is left of it is passed over.

    Raises:
        Damaged: After the last, if damage ended them; reading a member raises it too.
    """
    part = parts.get()

    def rest() -> Iterator[bytes]:
        nonlocal part
        while isinstance(part := parts.get(), bytes):
            yield part
        if isinstance(part, Exception):
            raise Damaged(f"damaged 7z: {part}")

    while isinstance(part, str):
        data = rest()
        yield part, ChunkStream(data)
        deque(data, 0)
    if isinstance(part, Exception):
        raise Damaged(f"damaged 7z: {part}")


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
        names = [entry.filename for entry in entries]
        posts = [name for name in names if PurePosixPath(name).name.lower() == "posts.xml"]
        with _members(file, posts or names, limit) as members:
            try:
                for name, stream in members:
                    yield from _member_records(source, name, stream, bool(posts), options)
            except Damaged as error:
                yield Record(0, problem=str(error), where=source.name)


def _member_records(
    source: Source, name: str, stream: BinaryIO, posts: bool, options: ReadOptions
) -> Iterator[Record | None]:
    if not posts:
        yield from _other(stream, name, options)
        return
    for record in _posts(stream, _site_of(f"{source.path}/{name}", options), options):
        yield None if record is None else replace(record, where=f"{name}, {record.where}")


def _other(stream: BinaryIO, name: str, options: ReadOptions) -> Iterator[Record | None]:
    """The documents of a member of any known format, by way of a temporary file that is gone afterwards."""
    from forebay.prepare.read.sources import FORMATS

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
