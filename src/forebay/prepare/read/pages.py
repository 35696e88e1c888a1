"""The pages of a Parquet column chunk, from their headers: how large each is before it is read.

Hides: Thrift's compact protocol, as far as these headers need it. A page is unpacked whole by every reader, and only
its header says how large it will be: the footer has sums. Costs a read of a few bytes a page.

Source: parquet.thrift (PageHeader), and the specification of Thrift's compact protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from forebay.prepare.read.opening import Damaged

_DICTIONARY = 2
_BINARY, _LIST, _SET, _STRUCT = 8, 9, 10, 12
_FIXED = {1: 0, 2: 0, 3: 1, 7: 8}
_MAX_DEPTH, _MAX_LIST = 8, 1024


@dataclass(frozen=True)
class Page:
    """What a header says: how many values, and bytes packed and unpacked."""

    is_dictionary: bool
    values: int
    packed_bytes: int
    bytes: int


def pages(file: BinaryIO, start: int, size: int) -> Iterator[Page]:
    """The pages of the column chunk at `[start, start + size)`.

    Raises:
        Damaged: If there is something else.
    """
    at = start
    while at < start + size:
        file.seek(at)
        fields = _Thrift(file).struct()
        numbers = [fields.get(key) for key in (1, 2, 3)]
        kind, unpacked, packed = (n if isinstance(n, int) and n >= 0 else -1 for n in numbers)
        if min(kind, unpacked, packed) < 0:
            raise Damaged(f"expected the header of a page, got something else at byte {at}.")
        inner = next((fields[key] for key in (5, 7, 8) if isinstance(fields.get(key), dict)), {})
        values = inner.get(1, 0) if isinstance(inner, dict) else 0
        yield Page(kind == _DICTIONARY, values if isinstance(values, int) else 0, packed, unpacked)
        at = file.tell() + packed


def most_rows(found: Sequence[Page], budget_bytes: int, most: int) -> int:
    """How many rows, a power of two up to `most`, may be read at once so that no run has more bytes; at least 1.

    All values of a page but one may be small: a run is given all bytes of each page that it touches.
    """
    data = [page for page in found if not page.is_dictionary]
    rows = most
    while rows > 1 and _largest_run(data, rows) > budget_bytes:
        rows //= 2
    return rows


def _largest_run(data: Sequence[Page], rows: int) -> int:
    """Bytes of the pages that `rows` values after one another may touch, at most."""
    largest = held = first = between = 0
    for last, page in enumerate(data):
        held += page.bytes
        while first < last and between > rows - 2:  # one value of the first and one of the last, and all between
            held -= data[first].bytes
            first += 1
            between -= data[first].values if first < last else 0
        largest = max(largest, held)
        between += page.values if last > first else 0
    return largest


class _Thrift:
    """Values of the compact protocol, read from where a stream stands."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def struct(self, depth: int = 0) -> dict[int, object]:
        """The fields that are whole numbers or structs, by id; others are passed over."""
        if depth > _MAX_DEPTH:
            raise Damaged("a header that is nested too deeply.")
        found: dict[int, object] = {}
        key = 0
        while head := self._byte():
            delta, kind = head >> 4, head & 15
            key = key + delta if delta else self._number()
            found[key] = self._value(kind, depth)
        return found

    def _value(self, kind: int, depth: int) -> object:
        if kind in (4, 5, 6):
            return self._number()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in _FIXED:
            self._file.seek(_FIXED[kind], 1)
        elif kind == _BINARY:
            self._file.seek(self._varint(), 1)
        elif kind in (_LIST, _SET):
            head = self._byte()
            count = self._varint() if head >> 4 == 15 else head >> 4
            if count > _MAX_LIST:
                raise Damaged("a header with a list that is too long.")
            for _ in range(count):
                self._value(head & 15, depth + 1)
        else:
            raise Damaged(f"a header with a field of unknown type {kind}.")
        return None

    def _byte(self) -> int:
        data = self._file.read(1)
        if not data:
            raise Damaged("a header that ends early.")
        return data[0]

    def _varint(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise Damaged("a header with a number that does not end.")

    def _number(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
