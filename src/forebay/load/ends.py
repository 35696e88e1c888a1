"""The document ends of a slice, wherever it is; a slice that lies elsewhere is not fetched for them.

Hides two ranged reads: the file's head, which says where the ends are (and in our own slices mostly holds them), and
what is left of them. These bytes are not verified, as a hash is that of a whole slice: they decide how many samples are
planned, and a slice that then has fewer is refused when it is opened. Memory: one slice's ends a thread.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.manifest import SliceInfo
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import locate_tensors
from forebay.errors import DatasetError, NetworkError
from forebay.store.origins import Origin, PassingError, read_small
from forebay.store.remote import RemoteDataset

ReadEnds = Callable[[int], NDArray[np.uint64]]

_HEAD_BYTES = 64 << 10


def ends_reader(dataset: Dataset) -> ReadEnds:
    """What reads the ends of slice i, U64 [D]; threads may share it. It raises DatasetError or NetworkError."""
    if not isinstance(dataset, RemoteDataset):
        return lambda index: dataset.open_slice(index).document_ends
    origin = dataset.origin
    return lambda index: _remote_ends(origin, dataset.table.row(index))


def _remote_ends(origin: Origin, row: SliceInfo) -> NDArray[np.uint64]:
    head = _read(origin, row.name, 0, min(_HEAD_BYTES, row.bytes))
    at = 0

    def next_bytes(count: int) -> bytes:
        nonlocal head, at
        if at + count > len(head):
            head += _read(origin, row.name, len(head), min(at + count, row.bytes))
        at += count
        return head[at - count : at]

    places = locate_tensors(next_bytes, row.bytes)
    kind, shape, start, stop = places.get("document_ends", ("", (), 0, 0))
    if (kind, shape) != ("U64", (row.documents,)):
        raise DatasetError(
            f"{row.name} of {origin.url}: expected document_ends U64 [{row.documents}], got {kind} {list(shape)}. "
            "Publish the dataset again."
        )
    data = head[start:stop]
    if len(data) < stop - start:
        data += _read(origin, row.name, start + len(data), stop)
    return np.frombuffer(data, "<u8")


def _read(origin: Origin, name: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of an object, from the first of the origin's sources that gives them."""
    if start >= stop:
        return b""
    failed: DatasetError | NetworkError | None = None
    for source in origin.sources():
        try:
            return read_small(_Range(source, start, stop), name, stop - start)
        except (DatasetError, NetworkError) as error:
            failed = error
    raise failed or NetworkError(f"{name} of {origin.url}: nobody has it now. Start a node that serves it.")


@dataclass(frozen=True)
class _Range:
    """An origin whose objects are a range of another's."""

    origin: Origin
    start: int
    stop: int

    @property
    def url(self) -> str:
        return self.origin.url

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        return self.origin.read(name, self.start + start, min(self.start + stop, self.stop))

    def get(self, name: str, max_bytes: int) -> bytes:
        data = b"".join(bytes(piece) for piece in self.read(name, 0, max_bytes))
        if len(data) < max_bytes:
            raise PassingError(f"{name} broke off after {len(data)} of {max_bytes} bytes")
        return data

    def sources(self) -> Sequence[Origin]:
        return [self]
