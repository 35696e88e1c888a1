"""Compression: which one a file has, the first bytes of what it holds, and blocks unpacked within bounds.

Hides the decoders of the standard library, zstandard and pyarrow behind one name for each compression. Streams of any
size are unpacked by `prepare.read.opening`; what must be in memory whole (a shard, a chunk, an array) by
`bounded_unpack`, which believes no claimed size beyond 128 MiB or 200 times the packed bytes.
"""

import bz2
import gzip
import io
import lzma
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow as pa
import zstandard

from forebay.errors import DatasetError

COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".bz2": "bz2", ".xz": "xz", ".lz4": "lz4"}
"""The compression that a suffix stands for."""
_MAGICS = {
    b"\x1f\x8b\x08": "gz",
    b"\x28\xb5\x2f\xfd": "zst",
    b"BZh": "bz2",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}
_STEP = 256  # Packed bytes that a decoder gets at once: zstd makes at most 8 MiB of them.
_XZ_MEMORY = 512 << 20
_UNPACKED_FLOOR = 128 << 20
_UNPACKED_RATIO = 200
_LARGE_BYTES = 16 << 20
_large = threading.Lock()


def sniff_compression(head: bytes) -> str:
    """The compression that the first bytes of a file show, "" if none."""
    for magic, name in _MAGICS.items():
        if head.startswith(magic):
            return name
    if len(head) >= 8 and head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F:
        return "zst"  # A skippable frame; those of lz4 begin alike, and are not seen in the wild.
    return ""


def unpacked_head(packed: BinaryIO, compression: str, size: int) -> bytes:
    """Up to `size` first bytes of what a compressed stream holds; fewer where it ends early or is damaged."""
    out = b""
    try:
        if compression == "lz4":
            with pa.CompressedInputStream(pa.PythonFile(packed, "r"), "lz4") as stream:
                return bytes(stream.read(size))
        decoder = _decoder(compression)
        while len(out) < size and (data := packed.read(_STEP)):
            while data and len(out) < size:
                if decoder.eof:
                    decoder = _decoder(compression)
                out += decoder.decompress(data)
                data = decoder.unused_data if decoder.eof else b""
    except (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, EOFError, ValueError):
        pass
    return out[:size]


def _decoder(compression: str) -> Any:
    match compression:
        case "gz":
            return zlib.decompressobj(31)
        case "bz2":
            return bz2.BZ2Decompressor()
        case "xz":
            return lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


def max_unpacked(packed_bytes: int) -> int:
    """Bytes that so many packed ones may become: more is a decompression bomb, or data that says nothing."""
    return max(_UNPACKED_FLOOR, _UNPACKED_RATIO * packed_bytes)


def check_unpacked(where: object, packed_bytes: int, claimed_bytes: int) -> None:
    """Raise DatasetError if packed bytes claim to be more than `max_unpacked`."""
    if claimed_bytes > (most := max_unpacked(packed_bytes)):
        raise DatasetError(
            f"{where}: expected at most {most} bytes once decompressed, got {claimed_bytes} out of {packed_bytes}: a "
            "decompression bomb, or data that says nothing. If you trust it, write it again uncompressed."
        )


def bounded_unpack(data: bytes | memoryview, compression: str, size: int, where: object) -> bytes:
    """The first `size` bytes of a block of `zstd`, `gz`, `bz2`, `br` or `snappy`, fewer if it holds fewer."""
    check_unpacked(where, len(data), size)
    try:
        match compression:
            case "zstd":
                unpacker = zstandard.ZstdDecompressor(max_window_size=_UNPACKED_FLOOR)
                raw: bytes = unpacker.stream_reader(data, read_across_frames=True).read(size)
                return raw
            case "gz":
                return gzip.GzipFile(fileobj=io.BytesIO(data)).read(size)
            case "bz2":
                return bz2.BZ2File(io.BytesIO(data)).read(size)
            case "br":
                with pa.CompressedInputStream(pa.BufferReader(data), "brotli") as stream:
                    return bytes(stream.read(size))
            case "snappy":
                whole = _snappy_size(data)
                check_unpacked(where, len(data), whole)
                return bytes(pa.decompress(data, whole, "snappy", asbytes=True))[:size]
    except (OSError, EOFError, zlib.error, ValueError, MemoryError, zstandard.ZstdError, pa.ArrowException) as error:
        raise DatasetError(f"{where}: expected {compression}, got: {error}. Fetch it again.") from error
    raise DatasetError(f"{where}: expected compression zstd, gz, bz2, br or snappy, got {compression!r}.")


def _snappy_size(data: bytes | memoryview) -> int:
    """The unpacked size that a block says first, as a variable-length integer."""
    size = 0
    for index, byte in enumerate(bytes(data[:5])):
        size |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return size
    raise ValueError("no size at its start")


@contextmanager
def one_large(num_bytes: int) -> Iterator[None]:
    """Let one thread at a time hold a block of more than 16 MiB, where several look at many blocks."""
    if num_bytes <= _LARGE_BYTES:
        yield
        return
    with _large:
        yield
