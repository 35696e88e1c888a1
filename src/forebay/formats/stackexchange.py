"""StackExchange dumps: `Posts.xml`, plain, packed or within a `.7z`, a document a post.

Hides: XML attributes, bodies in HTML, and 7z archives, which are unpacked as they are read: a thread unpacks into a
pipe that holds it back, and neither disk nor memory sees the whole. Answers follow their questions by years, so joining
them would need the whole site in memory: posts stay apart, and an answer's id and address say where it belongs.

Questions and answers are documents. Their addresses come from the name of the file or folder, if it is that of a site.
"""

import html
import os
import re
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from forebay.errors import CorruptInputError, PrepareError, install_command
from forebay.formats.base import Format
from forebay.formats.html import HtmlError, html_to_text
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions, open_input
from forebay.formats.records import Record, strip_turn_marks
from forebay.formats.text import lines_of
from forebay.storage.compression import MIN_UNPACKED_BYTES, ChunkStream

_ATTRIBUTE = re.compile(r'([A-Za-z]{1,40})="([^"]*)"')
_SITE = re.compile(
    r"(?:[a-z0-9-]{1,40}\.){0,3}(?:stackexchange|stackoverflow|serverfault|superuser|askubuntu|mathoverflow|stackapps)(?:\.com|\.net)"
)
_STEP = 1 << 20


class StackExchange(Format):
    """`Posts.xml`, plain or compressed."""

    name = "stackexchange"
    suffixes = ("posts.xml",)

    def sniff(self, head: bytes) -> bool:
        start = head[:1024]
        return b"<posts" in start or re.search(rb'<row Id="\d+" PostTypeId="', start) is not None

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        posts = (post for file in split.files for post in self._read_file(file, options))
        yield from (replace(post, index=index) for index, post in enumerate(posts) if post is not None)

    def _read_file(self, file: InputFile, options: ReadOptions) -> Iterator[Record | None]:
        with open_input(file, options) as stream:
            yield from _posts(stream, _site_of(file.path), options)


class SevenZip(StackExchange):
    """`Posts.xml` within a `.7z`."""

    name = "7z"
    suffixes = (".7z",)

    def sniff(self, head: bytes) -> bool:
        return head.startswith(b"7z\xbc\xaf\x27\x1c")

    def _read_file(self, file: InputFile, options: ReadOptions) -> Iterator[Record | None]:
        return _read_archive(file, options)


def _posts(stream: BinaryIO, site: str, options: ReadOptions) -> Iterator[Record | None]:
    """A record for each post that is a document, or damage; None for what is no document."""
    for offset, row, problem in _rows(stream, options):
        location, start, post = f"byte {offset}", row[:512].decode("utf-8", "replace"), dict[str, str]()
        try:
            post = dict(_ATTRIBUTE.findall(row.decode("utf-8")))
        except UnicodeDecodeError as error:
            problem = problem or f"not UTF-8: {error.reason} at byte {error.start}"
        if problem or "Id" not in post or "Body" not in post:
            yield Record(0, text=start, problem=problem or "a row without Id or Body", location=location)
        else:
            is_post = post.get("PostTypeId", "") in ("1", "2")  # Questions and answers.
            try:
                yield _document(post, site, location) if is_post else None
            except HtmlError as error:
                yield Record(0, post["Id"], start, problem=str(error), location=location)


def _document(post: dict[str, str], site: str, location: str) -> Record | None:
    text = html_to_text(html.unescape(post["Body"]))
    if title := strip_turn_marks(html.unescape(post.get("Title", ""))).strip():
        text = f"{title}\n\n{text}"
    if not text:
        return None
    kind = "a" if post.get("PostTypeId") == "2" else "q"
    return Record(0, post["Id"], text, f"https://{site}/{kind}/{post['Id']}" if site else "", location=location)


def _rows(stream: BinaryIO, options: ReadOptions) -> Iterator[tuple[int, bytes, str]]:
    """The offset of each `<row … />`, its bytes, and what is wrong with it. Dumps have one a line."""
    for offset, line, problem in lines_of(stream, options):
        row = line.strip()
        if problem or row.startswith(b"<row"):
            yield offset, row, problem or ("" if row.endswith((b"/>", b"</row>")) else "a row that does not end")


def _site_of(path: str) -> str:
    matches = [_SITE.match(part.lower()) for part in re.split(r"[/\\]", path)]
    return next((match[0] for match in reversed(matches) if match), "")


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
                raise CorruptInputError(f"damaged 7z: {failures[0] if failures else 'it ends early'}")
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
        raise CorruptInputError(f"damaged 7z: {failures[0]}")


def _read_archive(file: InputFile, options: ReadOptions) -> Iterator[Record | None]:
    try:
        import py7zr
    except ImportError as error:
        raise PrepareError(
            f"7z archives need py7zr, which is not installed. Run: {install_command('prepare')}."
        ) from error
    with open_input(replace(file, compression=""), options) as stream:
        try:
            with py7zr.SevenZipFile(stream) as archive:
                entries = [entry for entry in archive.list() if not entry.is_directory]
                locked = archive.needs_password()
        except Exception as error:  # noqa: BLE001 - py7zr raises what its decoders raise
            yield Record(0, problem=f"damaged 7z: {error}", location=file.name)
            return
        if locked:
            yield Record(0, problem="a 7z with a password", location=file.name)
            return
        limit = max(MIN_UNPACKED_BYTES, options.max_unpacked_ratio * file.bytes)
        size = sum(entry.uncompressed for entry in entries)  # all are unpacked on the way to the posts
        if size > limit:
            problem = f"a 7z that unpacks to {size} bytes: a bomb. Raise max_unpacked_ratio to read it"
            yield Record(0, problem=problem, location=file.name)
            return
        posts = [entry for entry in entries if PurePosixPath(entry.filename).name.lower() == "posts.xml"]
        if not posts:
            got = ", ".join(entry.filename for entry in entries[:5])[:200]
            problem = f"expected a Posts.xml in a 7z, got {got}. Unpack it and name the files to read"
            yield Record(0, problem=problem, location=file.name, failed=True)
            return
        try:
            with closing(_members(stream, posts)) as members:
                for name, member in members:
                    for record in _posts(member, _site_of(f"{file.path}/{name}"), options):
                        yield None if record is None else replace(record, location=f"{name}, {record.location}")
        except CorruptInputError as error:
            yield Record(0, problem=str(error), location=file.name)
