"""The footer and the pages of a Parquet file that a stranger may have written, looked at before a library reads it.

A reader allocates what a page's own header says, and Arrow's C++ aborts the process on some damaged footers. Memory:
some 40 bytes for each byte of the footer. Source: parquet.thrift (FileMetaData, PageHeader) and the specification of
Thrift's compact protocol.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias

MAX_FOOTER_BYTES = 1 << 20
MAX_DEPTH = 8
MAX_HEADER_BYTES = 64 << 10  # without statistics that are longer
Struct: TypeAlias = dict[int, Any]  # Values by field number.
_DICTIONARY = 2
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
class ColumnChunk:
    """A column's values in one row group: where its pages lie in the file."""

    start: int
    stop: int
    num_values: int


@dataclass(frozen=True)
class Footer:
    """What a file says of itself. `groups`: rows and chunks of each row group."""

    num_rows: int
    columns: list[Column]
    groups: list[tuple[int, list[ColumnChunk]]]


@dataclass(frozen=True)
class Page:
    """What a page's header says: how many values, bytes packed and unpacked, how the values are encoded."""

    is_dictionary: bool
    values: int
    packed_bytes: int
    bytes: int
    encoding: int = -1  # a number of `parquet.thrift`, -1 if unknown
    stop: int = 0  # where the page ends


def read_footer(data: bytes) -> Footer:
    """The footer of a file; ValueError if it is malformed, too large or encrypted."""
    length = int.from_bytes(data[-8:-4], "little")
    if len(data) < 12 or data[-4:] != _MAGIC or not 0 < length <= min(MAX_FOOTER_BYTES, len(data) - 12):
        raise ValueError(f"expected a footer of at most {MAX_FOOTER_BYTES} bytes, got {length}")
    metadata = _Compact(io.BytesIO(data[len(data) - 8 - length : -8]), length).struct()
    root, *leaves = _structs(metadata.get(2))
    if not all(isinstance(leaf.get(4), bytes) for leaf in leaves):
        raise ValueError("footer: expected a name of each column")
    columns = [
        Column(leaf[4].decode(), _int(leaf, 1, -1), _int(leaf, 2, 0),
               _int(leaf, 3, 0) in (0, 1) and not leaf.get(5))
        for leaf in leaves
    ]  # fmt: skip
    groups = []
    for group in _structs(metadata.get(4)):
        chunks = _structs(group.get(1))
        if len(chunks) != len(columns) or root.get(5) != len(columns):
            raise ValueError(f"expected {len(columns)} flat columns in each row group, got {len(chunks)}")
        if _int(group, 3):  # A group without rows has no pages.
            groups.append((_int(group, 3), [_chunk(chunk.get(3), len(data)) for chunk in chunks]))
    return Footer(_int(metadata, 3), columns, groups)


def _chunk(metadata: Any, num_bytes: int) -> ColumnChunk:
    if not isinstance(metadata, dict):
        raise ValueError("column chunk: expected its facts in the footer")
    start, dictionary = _int(metadata, 9), _int(metadata, 11, 0)
    start = dictionary if 0 < dictionary < start else start
    stop = start + _int(metadata, 7)
    if not 0 < start < stop <= num_bytes:
        raise ValueError(f"column chunk: expected it within the file's {num_bytes} bytes, got [{start}, {stop})")
    return ColumnChunk(start, stop, _int(metadata, 5))


def _structs(value: Any) -> list[Struct]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError("footer: expected a list of structs")
    return value


def _int(fields: Struct, number: int, default: int | None = None) -> int:
    value = fields.get(number, default)
    if not isinstance(value, int) or value < min(0, default or 0):
        raise ValueError(f"expected a number of at least 0 in field {number}, got {value!r}")
    return value


def pages(file: BinaryIO, start: int, stop: int) -> Iterator[Page]:
    """The pages of the column chunk at `[start, stop)`; ValueError if a header is malformed."""
    while start < stop:
        file.seek(start)
        header = _Compact(file, MAX_HEADER_BYTES).struct()
        own: Struct = next((header[number] for number in (5, 7, 8) if isinstance(header.get(number), dict)), {})
        packed, encoding = _int(header, 3), _int(own, 4 if 8 in header else 2, -1)
        start = file.tell() + packed
        yield Page(_int(header, 1) == _DICTIONARY, _int(own, 1, 0), packed, _int(header, 2), encoding, start)


class _Compact:
    """Values of the compact protocol, read from where a stream stands: no more than `limit` bytes are kept."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file = file
        self._remaining = limit

    def struct(self, depth: int = 0) -> Struct:
        """Values by field number: integers, bytes, structs and lists of those; others are skipped, and None."""
        fields: Struct = {}
        number = 0
        while (head := self._take(1)[0]) != 0:
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
            head = self._take(1)[0]
            num = head >> 4 if head >> 4 < 15 else self._varint()
            if num > self._remaining:  # each takes a byte at least
                raise ValueError("expected a longer list, got the end")
            return [self._value(_BYTE if head & 15 in _BOOLS else head & 15, depth + 1) for _ in range(num)]
        if kind == _BINARY:
            if (length := self._varint()) <= self._remaining:
                return self._take(length)
            self._file.seek(min(length, 1 << 40), 1)
            return None
        if kind not in (_BYTE, _DOUBLE):
            raise ValueError(f"expected a type of Thrift's compact protocol, got {kind}")
        self._take(1 if kind == _BYTE else 8)
        return None

    def _take(self, num_bytes: int) -> bytes:
        self._remaining -= num_bytes
        data = self._file.read(num_bytes) if self._remaining >= 0 else b""
        if len(data) < num_bytes:
            raise ValueError("expected more bytes, got the end")
        return data

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("expected a number of at most 10 bytes")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
