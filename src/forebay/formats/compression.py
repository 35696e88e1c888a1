"""Which compression a file has, and the first bytes of what it holds.

Hides the decoders of the standard library and zstandard behind one name for each compression. Whole files are unpacked
by `prepare.read.opening`.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from typing import Any, BinaryIO

import pyarrow as pa
import zstandard

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
