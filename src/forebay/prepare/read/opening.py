"""Opens any source as a stream of unpacked bytes: local or URL, packed in any of the usual ways.

Hides: compression formats, members and frames that follow each other, where a stream was cut off, and bombs. What can
be unpacked before a damage is always given; then, and only then, `Damaged` is raised. Memory is a few hundred KiB, but
for zstd, whose window is as long as its writer chose (at most `max_window_bytes`, touched as far as the text goes).

Costs a copy of the unpacked bytes: 1 to 2 % of the time that unpacking takes.
"""

from __future__ import annotations

import bz2
import codecs
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import zstandard

from forebay.errors import PrepareError
from forebay.formats.detect import detect
from forebay.prepare.read.base import Piece, ReadOptions, Source

_BUFFER = 256 << 10
_PACKED = 64 << 10
MIN_UNPACKED_BYTES = 256 << 20
"""So much may come out of any file, however small it is."""
_XZ_MEMORY = 512 << 20  # xz -9 needs 65 MiB
_ZSTD_PACKED = 2 << 10  # becomes 64 MiB at most: a block of 128 KiB takes 4 bytes
_ZSTD_HEAD = 18


class Damaged(PrepareError):  # noqa: N818 - says what the bytes are, and reads so
    """The bytes of a source are damaged or cut off here; all that stood before was given."""


class Unreadable(PrepareError):  # noqa: N818 - says what the file is
    """A source of which nothing can be read, whatever is done: the others are read without it."""


def changed(name: str) -> PrepareError:
    """What to raise where a source is not the one any more that was listed."""
    return PrepareError(f"{name}: the input changed while it was read. Start again.")


class Budget:
    """Counts the bytes that come out of a piece: at most its share of `max(256 MiB, max_unpacked_ratio * size)`.

    A source whose size is not known has no limit here; that of its compression (`unpack`) holds.
    """

    def __init__(self, piece: Piece, options: ReadOptions) -> None:
        size = sum(source.bytes for source in piece.sources)
        self._ratio = options.max_unpacked_ratio
        limit = max(MIN_UNPACKED_BYTES, self._ratio * size) if size else 1 << 62
        self._left = limit * piece.bytes // size if 0 < piece.bytes < size else limit

    def spend(self, size: int) -> None:
        """Count bytes; Damaged if they are more than are left."""
        self._left -= size
        if self._left < 0:
            raise Damaged(
                f"more text came out than 256 MiB and {self._ratio} times the size of the file: a bomb. Raise "
                "max_unpacked_ratio if it is wanted."
            )


class ChunkStream(io.BufferedReader):
    """A buffered stream of the chunks that an iterator gives; all bytes before its `Damaged` are given first."""

    def __init__(self, chunks: Iterator[bytes | memoryview], close: Callable[[], object] = lambda: None) -> None:
        self._chunks = _Chunks(chunks, close)
        super().__init__(self._chunks, _BUFFER)

    def _checked(self, data: Any, size: int | None) -> Any:
        if not data and size != 0 and (damage := self._chunks.damage) is not None:
            # Another each time: pyarrow's readers, in its traceback, would hold it for ever.
            raise type(damage)(*damage.args)
        return data

    def read(self, size: int | None = -1, /) -> bytes:
        data: bytes = self._checked(super().read(size), size)
        return data

    def read1(self, size: int = -1, /) -> bytes:
        data: bytes = self._checked(super().read1(size), size)
        return data

    def readline(self, size: int | None = -1, /) -> bytes:
        """As of any stream; a line that the damage cut comes without its newline."""
        data: bytes = self._checked(super().readline(size), size)
        return data

    def readinto(self, buffer: Any, /) -> int:
        read: int = self._checked(super().readinto(buffer), len(buffer))
        return read


class _Chunks(io.RawIOBase):
    """Bytes as an iterator yields them; ends where it raises `Damaged`, and remembers it."""

    def __init__(self, chunks: Iterator[bytes | memoryview], close: Callable[[], object]) -> None:
        self._chunks = chunks
        self._close = close
        self._held = memoryview(b"")
        self.damage: Damaged | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            while not self._held:
                self._held = memoryview(next(self._chunks))
        except StopIteration:
            return 0
        except Damaged as error:
            self.damage = error.with_traceback(None)
            return 0
        size = min(len(self._held), len(buffer))
        buffer[:size] = self._held[:size]
        self._held = self._held[size:]
        return size

    def close(self) -> None:
        self._close()
        super().close()


def open_source(source: Source, options: ReadOptions) -> BinaryIO:
    """The unpacked bytes of a source, as a buffered stream; seekable if it is not compressed.

    A read raises Damaged where bytes cannot be unpacked, end early or are a bomb; PrepareError if they cannot be had.
    """
    raw = open_packed(source)
    if source.compression:
        raw = unpack(raw, source.compression, options)
    if source.encoding:
        raw = ChunkStream(_transcoded(raw, source.encoding), raw.close)
    return raw


def skip_to(file: BinaryIO, position: int) -> None:
    """Pass over the first bytes of an opened source: at once if it is not compressed, else by unpacking them."""
    if file.seekable():
        file.seek(position)
        return
    left = position
    while left and (data := file.read(min(left, _BUFFER))):
        left -= len(data)


def open_packed(source: Source) -> BinaryIO:
    """The bytes of a source as they lie at its path or URL, at its version; buffered and seekable."""
    if "://" in source.path:
        from forebay.storage.remote_file import open_url

        stream: BinaryIO = open_url(source.path, source.bytes, source.version)
        return stream
    return open_local(source.path)


def open_local(path: str | Path) -> BinaryIO:
    """The bytes of a file, buffered and seekable; Unreadable if it cannot be opened."""
    try:
        return Path(path).open("rb", _BUFFER)
    except OSError as error:
        raise Unreadable(
            f"{path}: cannot read input: {error.strerror or error}. Check that it is there and may be read."
        ) from error


def open_plain(path: Path, max_unpacked_ratio: int) -> BinaryIO:
    """A local file's bytes, unpacked if it is compressed, as UTF-8 if it is text; for errors see `open_source`."""
    found = detect(path)
    source = Source(str(path), path.name, "", found.compression, path.stat().st_size, "", encoding=found.encoding)
    return open_source(source, ReadOptions(max_unpacked_ratio=max_unpacked_ratio))


def local_version(path: str | Path) -> str:
    """What tells a file from another one and from itself after a change: size, time of change and inode."""
    found = Path(path).stat()
    return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ino}"


def check_unchanged(source: Source) -> None:
    """Raise PrepareError if a local source is another file, or has other bytes, than when it was listed.

    What lies at a URL is compared where it is opened.
    """
    if source.version and "://" not in source.path:
        try:
            now = local_version(source.path)
        except FileNotFoundError:
            now = ""
        except OSError:
            return  # Opening it says what is wrong.
        if now != source.version:
            raise changed(source.path)


def unpack(packed: BinaryIO, compression: str, options: ReadOptions) -> BinaryIO:
    """The unpacked bytes of a stream, which it closes; for the rest see `open_source`."""
    return ChunkStream(_unpacked(Counted(packed), compression, options), packed.close)


def _transcoded(raw: BinaryIO, encoding: str) -> Iterator[bytes]:
    """Text of another encoding as UTF-8; what cannot be decoded becomes U+FFFD."""
    for text in codecs.iterdecode(iter(lambda: raw.read(_PACKED), b""), encoding, "replace"):
        yield text.encode("utf-8", "replace")


def _unpacked(packed: Counted, compression: str, options: ReadOptions) -> Iterator[bytes]:
    """What the decoder gives. Raises Damaged where it fails, or gives too much."""
    given = 0
    try:
        for data in _decoded(packed, compression, options):
            yield data
            given += len(data)
            if given > max(MIN_UNPACKED_BYTES, options.max_unpacked_ratio * packed.count):
                raise Broken(
                    f"{packed.count} bytes grew to more than {options.max_unpacked_ratio} times as many: a bomb, or "
                    "text that says nothing. Raise max_unpacked_ratio if it is wanted"
                )
    except (Broken, zlib.error, OSError, lzma.LZMAError, EOFError, ValueError, zstandard.ZstdError) as error:
        why = str(error).rstrip(".")
        raise Damaged(f"damaged {compression} after {given} unpacked bytes: {why}.") from error


class Broken(Exception):  # noqa: N818 - becomes Damaged
    """What a decoder found wrong."""


class Counted(io.RawIOBase):
    """A stream of packed bytes that counts what was taken; `member` is where the member began that is unpacked."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.count = self.member = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        self.count += len(data)
        return data


def _decoded(packed: Counted, compression: str, options: ReadOptions) -> Iterator[bytes]:
    match compression:
        case "gz":
            yield from unpack_gzip(packed)
        case "bz2":
            yield from _unpack_members(packed, bz2.BZ2Decompressor)
        case "xz":
            yield from _unpack_members(packed, lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY))
        case "zst":
            yield from _unpack_zstd(packed, options.max_window_bytes)
        case "lz4":
            with pa.CompressedInputStream(pa.PythonFile(packed, "r"), "lz4") as stream:
                while data := stream.read(_PACKED):
                    yield data


class _Gzip:
    """zlib's decoder with the manners of bz2's; gives what stands before a damaged byte, too."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(31)
        self._failed: Exception | None = None

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail and self._failed is None

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        if self._failed is not None:
            raise self._failed
        data = self._zlib.unconsumed_tail + data
        before = self._zlib.copy()  # 40 KB for each 64 KiB read: 1 %
        try:
            return self._zlib.decompress(data, max_length)
        except zlib.error as error:
            self._failed = error
        found = []
        with suppress(zlib.error):
            for index in range(len(data)):
                found.append(before.decompress(data[index : index + 1]))
        return b"".join(found)


def _unpack_zstd(packed: Counted, max_window_bytes: int) -> Iterator[bytes]:
    unpacker = zstandard.ZstdDecompressor(max_window_size=max_window_bytes)
    rest = packed.read(_ZSTD_PACKED)
    while rest:
        frame, head = unpacker.decompressobj(), b""
        while not frame.eof:
            if not rest and not (rest := packed.read(_ZSTD_PACKED)):
                raise Broken("it ends early")
            head += rest[: _ZSTD_HEAD - len(head)]
            try:
                yield frame.decompress(rest)
            except zstandard.ZstdError:
                with suppress(zstandard.ZstdError):  # a damaged head
                    if (window := zstandard.get_frame_parameters(head).window_size) > max_window_bytes:
                        raise Broken(
                            f"its window is {window} bytes, more than max_window_bytes = {max_window_bytes}. To read "
                            f"it, set read.max_window_bytes to {window}"
                        ) from None
                raise
            rest = b""
        rest = frame.unused_data or packed.read(_ZSTD_PACKED)


def unpack_gzip(packed: Counted) -> Iterator[bytes]:
    """The bytes of gzip members. Raises zlib.error, or Broken where they end early, after all that stands before."""
    return _unpack_members(packed, _Gzip)


def _unpack_members(
    packed: Counted, start: Callable[[], _Gzip | bz2.BZ2Decompressor | lzma.LZMADecompressor]
) -> Iterator[bytes]:
    """Members one after the other, perhaps with zeros between them or at the end."""
    rest = packed.read(_PACKED)
    while rest:
        packed.member = packed.count - len(rest)
        decoder, ended = start(), False
        while not decoder.eof:
            if decoder.needs_input and not rest and not ended:
                rest = packed.read(_PACKED)
                ended = not rest
            data = decoder.decompress(rest, _BUFFER)
            rest = b""
            if data:
                yield data
            elif ended and not decoder.eof:
                raise Broken("it ends early")
        rest = decoder.unused_data.lstrip(b"\0")
        while not rest and (more := packed.read(_PACKED)):
            rest = more.lstrip(b"\0")
