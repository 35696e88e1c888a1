"""Compressed data: which compression it is, streams of any size, and blocks that must be in memory at once.

Hides the decoders of the standard library, zstandard and pyarrow behind one name for each compression (`gz`, `zst`,
`bz2`, `xz` (also LZMA), `lz4`, `br`, `sz` (framed Snappy), `zlib`, `deflate`), members and frames that follow each
other, the dictionary at the start of a `.warc.zst`, streams that are cut off, and decompression bombs. All
that can be unpacked before damage is returned; then a read raises `CorruptInputError`. Memory: at most 64 MiB, and for
zstd the window that its writer chose. Blocks (`bounded_unpack`) claim at most 128 MiB or 200 times their packed size.

Source: google/snappy framing_format.txt; IIPC, "WARC File Compression with Zstandard".
"""

import bz2
import gzip
import io
import lzma
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa
import zstandard

from forebay.errors import CorruptInputError, DatasetError, package_for

COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".bz2": "bz2", ".xz": "xz", ".lz4": "lz4"}
COMPRESSIONS |= {".lzma": "xz", ".br": "br", ".sz": "sz"}
"""The compression that a suffix stands for."""
MIN_UNPACKED_BYTES = 256 << 20
"""This much may be unpacked from any file, however small it is."""
MAX_WINDOW_BYTES = 128 << 20

_MAGICS = {
    b"\x1f\x8b\x08": "gz",
    b"\x28\xb5\x2f\xfd": "zst",
    b"BZh": "bz2",
    b"\xfd7zXZ\x00": "xz",
    b"]\0\0": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xff\x06\0\0sNaPpY": "sz",
}
_BUFFER_BYTES = 256 << 10
_STEP_BYTES = 2 << 10  # Packed bytes that a decoder gets at once: bz2 and zstd make at most 64 MiB of them.
_GZIP_STEP_BYTES = 16 << 10  # 16 MiB at most.
_ARROW_STEP_BYTES = 64 << 10
_BY_ARROW = {"lz4": "lz4", "br": "brotli"}
_DICTIONARY = b"\x5d\x2a\x4d\x18"
_MAX_DICTIONARY_BYTES = 16 << 20
_XZ_MEMORY = 512 << 20  # xz -9 needs 65 MiB.
_ZSTD_HEAD_BYTES = 18
_BLOCK_FLOOR = 128 << 20
_BLOCK_RATIO = 200
_LARGE_BYTES = 16 << 20
_SNAPPY, _PLAIN, _SKIPPABLE = 0, 1, 0x80  # Types of chunks.
_large = threading.Lock()
_T = TypeVar("_T")
_ERRORS = (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, EOFError, ValueError)


def sniff_compression(head: bytes) -> str:
    """Return the compression that the first bytes of a file show, "" if none."""
    for magic, name in _MAGICS.items():
        if head.startswith(magic):
            return name
    if len(head) >= 8 and head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F:
        return sniff_compression(head[8 + int.from_bytes(head[4:8], "little") :]) or "zst"  # A skippable frame.
    return ""


def unpacked_head(packed: BinaryIO, compression: str, size: int) -> bytes:
    """Return up to `size` first bytes of what a compressed stream holds; fewer where it ends early or is damaged."""
    head = bytearray()
    with suppress(*_ERRORS):
        for data in unpack_members(CountedReader(packed), compression, 1 << 31, step=256):
            head += data[:size]
            if len(head) >= size:
                break
    return bytes(head[:size])


class ChunkStream(io.BufferedReader):
    """A buffered stream of the chunks of an iterator; all bytes before its `CorruptInputError` are returned first."""

    def __init__(self, chunks: Iterator[bytes | memoryview], close: Callable[[], object] = lambda: None) -> None:
        self._chunks = _Chunks(chunks, close)
        super().__init__(self._chunks, _BUFFER_BYTES)

    @property
    def error(self) -> CorruptInputError | None:
        """The damage that ended the stream."""
        return self._chunks.error

    def _checked(self, data: _T, size: int | None) -> _T:
        if not data and size != 0 and (error := self._chunks.error) is not None:
            # A copy each time: the traceback would keep pyarrow's readers alive.
            raise type(error)(*error.args)
        return data

    def read(self, size: int | None = -1, /) -> bytes:
        return self._checked(super().read(size), size)

    def read1(self, size: int = -1, /) -> bytes:
        return self._checked(super().read1(size), size)

    def readline(self, size: int | None = -1, /) -> bytes:
        """As of any stream; a line that the damage cuts comes without its newline."""
        return self._checked(super().readline(size), size)

    def readinto(self, buffer: Any, /) -> int:
        return self._checked(super().readinto(buffer), len(buffer))


class _Chunks(io.RawIOBase):
    """Bytes as an iterator yields them; ends where it raises `CorruptInputError`, and keeps the error."""

    def __init__(self, chunks: Iterator[bytes | memoryview], close: Callable[[], object]) -> None:
        self._chunks = chunks
        self._close = close
        self._pending = memoryview(b"")
        self.error: CorruptInputError | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            while not self._pending:
                self._pending = memoryview(next(self._chunks))
        except StopIteration:
            return 0
        except CorruptInputError as error:
            self.error = error.with_traceback(None)
            return 0
        size = min(len(self._pending), len(buffer))
        buffer[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        return size

    def close(self) -> None:
        self._close()
        super().close()


class CountedReader(io.RawIOBase):
    """A stream of packed bytes that counts what was read; `member` is the offset of the member being unpacked."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.count = self.member = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        self.count += len(data)
        return data


def unpack_stream(
    packed: BinaryIO, compression: str, *, max_ratio: int, max_window_bytes: int = MAX_WINDOW_BYTES
) -> BinaryIO:
    """Return the unpacked bytes of a stream, which closing closes.

    A read raises CorruptInputError where the stream is damaged or ends early, or once more than 256 MiB and
    `max_ratio` times its packed bytes were unpacked.
    """

    def unpacked() -> Iterator[bytes]:
        size, counted = 0, CountedReader(packed)
        try:
            for data in unpack_members(counted, compression, max_window_bytes):
                yield data
                size += len(data)
                if size > max(MIN_UNPACKED_BYTES, max_ratio * counted.count):
                    raise ValueError(
                        f"{counted.count} bytes grew to more than {max_ratio} times as many: a bomb, or text without "
                        "content. If you trust it, unpack it first, or raise read.max_unpacked_ratio to prepare it"
                    )
        except _ERRORS as error:
            reason = str(error).rstrip(".")
            raise CorruptInputError(f"damaged {compression} after {size} unpacked bytes: {reason}.") from error

    return ChunkStream(unpacked(), packed.close)


def unpack_members(packed: CountedReader, compression: str, max_window_bytes: int, step: int = 0) -> Iterator[bytes]:
    """Yield the bytes of members or frames one after the other, perhaps with zeros between them or at the end.

    Raises the decoder's error, or EOFError where they end early, after all before it.
    """
    if compression in _BY_ARROW:
        with pa.CompressedInputStream(pa.PythonFile(packed, "r"), _BY_ARROW[compression]) as stream:
            while data := stream.read(_ARROW_STEP_BYTES):
                yield data
        return
    if compression == "sz":
        yield from _snappy_chunks(packed)
        return
    step = step or (_GZIP_STEP_BYTES if compression == "gz" else _STEP_BYTES)
    rest, dictionary = packed.read(step), None
    if compression == "zst" and rest.startswith(_DICTIONARY):
        size = min(8 + int.from_bytes(rest[4:8], "little"), _MAX_DICTIONARY_BYTES)
        rest += packed.read(max(0, size - len(rest)))
        dictionary, rest = _dictionary(rest[8:size]), rest[size:] or packed.read(step)
    while rest:
        packed.member = packed.count - len(rest)
        decoder, head = _decoder(compression, max_window_bytes, dictionary), b""
        while not decoder.eof:
            if not rest and not (rest := packed.read(step)):
                raise EOFError("it ends early")
            head += rest[: max(0, _ZSTD_HEAD_BYTES - len(head))]
            try:
                data = decoder.decompress(rest)
            except zstandard.ZstdError:
                with suppress(zstandard.ZstdError):  # A damaged head.
                    frame = zstandard.get_frame_parameters(head)
                    if frame.dict_id and dictionary is None:
                        raise ValueError(
                            f"it needs the dictionary {frame.dict_id}, which is not in it. Unpack it first"
                        ) from None
                    if (window := frame.window_size) > max_window_bytes:
                        raise ValueError(
                            f"its window is {window} bytes, more than max_window_bytes = {max_window_bytes}. To read "
                            f"it, set read.max_window_bytes to {window}"
                        ) from None
                raise
            rest = b""
            if data:
                yield data
        rest = decoder.unused_data.lstrip(b"\0")
        while not rest and (more := packed.read(step)):
            rest = more.lstrip(b"\0")


def _dictionary(data: bytes) -> zstandard.ZstdCompressionDict:
    if sniff_compression(data) == "zst":
        data = zstandard.ZstdDecompressor().stream_reader(data).read(_MAX_DICTIONARY_BYTES)
    return zstandard.ZstdCompressionDict(data)


def _snappy_chunks(packed: CountedReader) -> Iterator[bytes]:
    with package_for("Snappy"):
        import google_crc32c
    while head := packed.read(4):
        kind, size = head[0], int.from_bytes(head[1:], "little")
        body = packed.read(size)
        if len(head) + len(body) < 4 + size:
            raise EOFError("it ends early")
        if kind in (_SNAPPY, _PLAIN):
            checksum, data = int.from_bytes(body[:4], "little"), body[4:]
            if kind == _SNAPPY:
                check_unpacked("a chunk", size, total := _snappy_size(data))
                data = pa.decompress(data, total, "snappy", asbytes=True)
            crc = google_crc32c.value(data)
            if ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF != checksum:
                raise ValueError("incorrect data check")
            yield data
        elif kind < _SKIPPABLE:
            raise ValueError(f"a chunk of the unknown type {kind}")


def _decoder(compression: str, max_window_bytes: int, dictionary: zstandard.ZstdCompressionDict | None) -> Any:
    match compression:
        case "gz" | "zlib" | "deflate":
            return zlib.decompressobj({"gz": 31, "zlib": 15}.get(compression, -15))
        case "bz2":
            return bz2.BZ2Decompressor()
        case "xz":
            return lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
    return zstandard.ZstdDecompressor(dict_data=dictionary, max_window_size=max_window_bytes).decompressobj()


def check_unpacked(location: object, packed_bytes: int, claimed_bytes: int) -> None:
    """Raise DatasetError if packed bytes claim to be more than 128 MiB and 200 times as many."""
    if claimed_bytes > (limit := max(_BLOCK_FLOOR, _BLOCK_RATIO * packed_bytes)):
        raise DatasetError(
            f"{location}: expected at most {limit} bytes once decompressed, got {claimed_bytes} out of {packed_bytes}: "
            "a decompression bomb, or data without content. If you trust it, write it again uncompressed."
        )


def bounded_unpack(data: bytes | memoryview, compression: str, size: int, location: object) -> bytes:
    """Return the first `size` bytes of a block of `zstd`, `gz`, `bz2`, `br` or `snappy`, fewer if it holds fewer.

    Raises DatasetError if the block is damaged or `size` is more than `check_unpacked` allows.
    """
    check_unpacked(location, len(data), size)
    try:
        match compression:
            case "zstd":
                unpacker = zstandard.ZstdDecompressor(max_window_size=_BLOCK_FLOOR)
                return unpacker.stream_reader(data, read_across_frames=True).read(size)
            case "gz":
                return gzip.GzipFile(fileobj=io.BytesIO(data)).read(size)
            case "bz2":
                return bz2.BZ2File(io.BytesIO(data)).read(size)
            case "br":
                with pa.CompressedInputStream(pa.BufferReader(data), "brotli") as stream:
                    return bytes(stream.read(size))
            case "snappy":
                total = _snappy_size(data)
                check_unpacked(location, len(data), total)
                return bytes(pa.decompress(data, total, "snappy", asbytes=True))[:size]
    except (*_ERRORS, MemoryError, pa.ArrowException) as error:
        raise DatasetError(f"{location}: expected {compression}, got: {error}. Fetch it again.") from error
    raise DatasetError(f"{location}: expected compression zstd, gz, bz2, br or snappy, got {compression!r}.")


def _snappy_size(data: bytes | memoryview) -> int:
    size = 0
    for index, byte in enumerate(bytes(data[:5])):
        size |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return size
    raise ValueError("no size at its start")


@contextmanager
def limit_large_blocks(num_bytes: int) -> Iterator[None]:
    """Let one thread at a time hold a block of more than 16 MiB, where several process many blocks."""
    if num_bytes <= _LARGE_BYTES:
        yield
        return
    with _large:
        yield
