"""The lengths of the documents of all slices, in one file: what packings and filters by length need of every slice.

`lengths.zst` has a zstd frame for each slice with document ends, in the order of the slices. It holds the lengths,
within the slice, of the documents that end there, as integers of 4 bytes (8 where the slice has 2**32 tokens or more),
little-endian, split into planes: the first byte of all integers, then the second of all, and so on. How many there are
is in the table, so that the file is read as a stream, with the lengths of one slice in memory.
"""

from collections.abc import Iterator
from typing import BinaryIO, NoReturn

import numpy as np
import pyarrow as pa

from forebay.arrays import U64, Array
from forebay.dataset.manifest import MAX_EXPANSION, MAX_FREE_BYTES, Manifest, SliceTable
from forebay.dataset.slices import check_document_ends
from forebay.errors import DatasetError

_LEVEL = 1  # 3 saves a hundredth and takes twice as long.


def _dtype(num_tokens: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u4" if num_tokens < 1 << 32 else "<u8")


def encode_lengths(document_ends: Array, num_tokens: int) -> bytes:
    """Return the frame of a slice with these document ends, U64 [D]; nothing if there are none."""
    lengths = np.diff(document_ends, prepend=np.uint64(0)).astype(_dtype(num_tokens))
    planes = lengths.view(np.uint8).reshape(len(lengths), lengths.itemsize).T
    codec = pa.Codec("zstd", compression_level=_LEVEL)
    return bytes(codec.compress(planes.tobytes(), asbytes=True)) if len(lengths) else b""


def read_document_ends(file: BinaryIO, manifest: Manifest, table: SliceTable, location: str) -> Iterator[U64]:
    """Yield the document ends of each slice, U64 [D], from an open file; `location` names it in errors.

    Raises:
        DatasetError: If the file holds other numbers than the table says, or would expand in memory.
    """
    max_bytes, stream = MAX_FREE_BYTES + MAX_EXPANSION * manifest.lengths_bytes, pa.CompressedInputStream(file, "zstd")

    def refuse(expected: str, got: object) -> NoReturn:
        raise DatasetError(f"{location}: expected {expected}, got {got}. Prepare or convert the dataset again.")

    try:
        for name, count, documents in zip(table.names, table.count.tolist(), table.documents.tolist()):
            num_bytes = documents * (dtype := _dtype(count)).itemsize
            if num_bytes > max_bytes:
                refuse(f"at most {max_bytes} bytes of lengths of a slice", f"{num_bytes} of {name}")
            data = np.frombuffer(stream.read(num_bytes), np.uint8)
            if len(data) < num_bytes:
                refuse(f"{num_bytes} bytes of lengths of {name}", len(data))
            lengths = np.ascontiguousarray(data.reshape(dtype.itemsize, documents).T).view(dtype).ravel()
            document_ends = np.cumsum(lengths, dtype=np.uint64)
            if problem := check_document_ends(document_ends, count):
                refuse(f"lengths that fit the {count} tokens of {name}", f"others: {problem}")
            yield document_ends
        if stream.read(1):
            refuse(f"the lengths of {manifest.documents} documents", "more")
    except (OSError, pa.ArrowException) as error:
        refuse("frames of zstd", error)
