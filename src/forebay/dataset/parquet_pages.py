"""The footer and the pages of a Parquet file that a stranger may have written, looked at before a library reads it.

A reader allocates what a page's own header says, whatever the footer's totals are; and Arrow's C++ aborts the process
on some damaged footers as soon as it is asked for a column's facts. Both are Thrift's compact protocol; only what is
needed of it is here. Memory: some 40 bytes for each byte of the footer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_FOOTER_BYTES = 1 << 20
MAX_DEPTH = 8
MAX_HEADER_BYTES = 64 << 10  # with statistics of long values
_MAGIC = b"PAR1"
_BOOLS, _BYTE, _VARINTS, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12


@dataclass(frozen=True)
class Column:
    """A column of the schema: physical type and length (`parquet.thrift`), whether it is in a list or a struct."""

    name: str
    type: int
    length: int
    is_flat: bool


@dataclass(frozen=True)
class Chunk:
    """A column's values in one row group: where its pages lie in the file."""

    column: int
    start: int
    stop: int
    num_values: int


@dataclass(frozen=True)
class Footer:
    """What a file says of itself. `groups`: rows and chunks of each row group."""

    num_rows: int
    columns: list[Column]
    groups: list[tuple[int, list[Chunk]]]


@dataclass(frozen=True)
class Page:
    """One page: its bytes once unfolded, and how its values are encoded (`parquet.thrift`, Encoding)."""

    num_bytes: int
    encoding: int


def read_footer(data: bytes) -> Footer:
    """The footer of a file.

    Raises:
        ValueError: If it is malformed, too large, or encrypted.
    """
    length = int.from_bytes(data[-8:-4], "little")
    if len(data) < 12 or data[-4:] != _MAGIC or not 0 < length <= min(MAX_FOOTER_BYTES, len(data) - 12):
        raise ValueError(f"expected a footer of at most {MAX_FOOTER_BYTES} bytes, got {length}")
    facts = _Compact(memoryview(data)[len(data) - 8 - length : -8]).struct(0)
    root, *leaves = _structs(facts.get(2))
    columns = [
        Column(bytes(leaf.get(4) or b"").decode(), _int(leaf, 1, -1), _int(leaf, 2, 0),
               _int(leaf, 3, 0) in (0, 1) and not leaf.get(5))
        for leaf in leaves
    ]  # fmt: skip
    groups = []
    for group in _structs(facts.get(4)):
        chunks = _structs(group.get(1))
        if len(chunks) != len(columns) or root.get(5) != len(columns):
            raise ValueError(f"expected {len(columns)} flat columns in each row group, got {len(chunks)}")
        groups.append((_int(group, 3), [_chunk(i, chunk.get(3), len(data)) for i, chunk in enumerate(chunks)]))
    return Footer(_int(facts, 3), columns, groups)


def _chunk(column: int, facts: Any, num_bytes: int) -> Chunk:
    if not isinstance(facts, dict):
        raise ValueError("column chunk: expected its facts in the footer")
    start, dictionary = _int(facts, 9), _int(facts, 11, 0)
    start = dictionary if 0 < dictionary < start else start
    stop = start + _int(facts, 7)
    if not 0 < start < stop <= num_bytes:
        raise ValueError(f"column chunk: expected it within the file's {num_bytes} bytes, got [{start}, {stop})")
    return Chunk(column, start, stop, _int(facts, 5))


def _structs(value: Any) -> list[dict[int, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError("footer: expected a list of structs")
    return value


def _int(facts: dict[int, Any], number: int, default: int | None = None) -> int:
    value = facts.get(number, default)
    if not isinstance(value, int) or value < min(0, default or 0):
        raise ValueError(f"expected a number of at least 0 in field {number}, got {value!r}")
    return value


def pages(data: memoryview, chunk: Chunk) -> Iterator[Page]:
    """The pages of a column chunk.

    Raises:
        ValueError: If a header is malformed, or a page reaches beyond its chunk.
    """
    offset = chunk.start
    while offset < chunk.stop:
        header = _Compact(data[offset : min(chunk.stop, offset + MAX_HEADER_BYTES)])
        facts = header.struct(0)
        own: dict[int, Any] = next((facts[number] for number in (5, 7, 8) if isinstance(facts.get(number), dict)), {})
        offset += header.at + _int(facts, 3)
        if offset > chunk.stop:
            raise ValueError(f"page: expected its end within its column chunk, got {offset - chunk.stop} bytes more")
        yield Page(_int(facts, 2), _int(own, 4 if 8 in facts else 2))


class _Compact:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int) -> dict[int, Any]:
        """Values by field number: integers, bytes, structs and lists of those; others are passed over, and None."""
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != 0:
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            fields[number] = None if head & 15 in _BOOLS else self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("expected less nesting")
        if kind in _VARINTS:
            return self._zigzag()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in _LISTS:
            head = self._byte()
            num = head >> 4 if head >> 4 < 15 else self._varint()
            if num > len(self._data) - self.at:  # each takes a byte at least
                raise ValueError("expected a longer list, got the end")
            return [self._value(_BYTE if head & 15 in _BOOLS else head & 15, depth + 1) for _ in range(num)]
        if kind == _BINARY:
            length = self._varint()
            self._skip(length)
            return self._data[self.at - length : self.at]
        if kind not in (_BYTE, _DOUBLE):
            raise ValueError(f"expected a type of Thrift's compact protocol, got {kind}")
        self._skip(1 if kind == _BYTE else 8)
        return None

    def _skip(self, num_bytes: int) -> None:
        self.at += num_bytes
        if self.at > len(self._data):
            raise ValueError("expected more bytes, got the end")

    def _byte(self) -> int:
        self._skip(1)
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("expected a number of at most 10 bytes")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
