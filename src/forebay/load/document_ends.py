"""Document ends of a dataset's slices, read without fetching the slices of a remote dataset.

The header of a slice says where its ends are, and the first 64 KiB of our own slices usually hold them. These bytes
are not verified, as only a whole slice has a hash. They decide how many samples are planned; a slice that turns out to
have fewer is refused when it is opened.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.manifest import SliceInfo
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import locate_tensors
from forebay.errors import DatasetError, NetworkError
from forebay.storage.base import Origin, read_small
from forebay.storage.remote_dataset import RemoteDataset

ReadEnds = Callable[[int], NDArray[np.uint64]]
_HEAD_BYTES = 64 << 10


def ends_reader(dataset: Dataset) -> ReadEnds:
    """A thread-safe function that returns the ends of slice i, U64 [D], or raises DatasetError or NetworkError."""
    if not isinstance(dataset, RemoteDataset):
        return lambda index: dataset.open_slice(index).document_ends
    origin = dataset.origin
    return lambda index: _read_remote(origin, dataset.table.row(index))


def _read_remote(origin: Origin, row: SliceInfo) -> NDArray[np.uint64]:
    head = _read(origin, row.name, 0, min(_HEAD_BYTES, row.bytes))
    offset = 0

    def next_bytes(count: int) -> bytes:
        nonlocal head, offset
        if offset + count > len(head):
            head += _read(origin, row.name, len(head), min(offset + count, row.bytes))
        offset += count
        return head[offset - count : offset]

    tensors = locate_tensors(next_bytes, row.bytes)
    dtype, shape, start, stop = tensors.get("document_ends", ("", (), 0, 0))
    if (dtype, shape) != ("U64", (row.documents,)):
        raise DatasetError(
            f"{row.name} of {origin.url}: expected document_ends U64 [{row.documents}], got {dtype} {list(shape)}. "
            "Publish the dataset again."
        )
    data = head[start:stop]
    if len(data) < stop - start:
        data += _read(origin, row.name, start + len(data), stop)
    return np.frombuffer(data, "<u8")


def _read(origin: Origin, name: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of an object, from the first source of the origin that has them."""
    if start >= stop:
        return b""
    last_error: DatasetError | NetworkError | None = None
    for source in origin.sources():
        try:
            return read_small(source, name, stop - start, start=start)
        except (DatasetError, NetworkError) as error:
            last_error = error
    raise last_error or NetworkError(
        f"{name} of {origin.url}: expected a source that has it, got none. Start a node that serves it."
    )
