"""TFRecord files of tf.train.Example and SequenceExample, without TensorFlow.

Hides: the framing and its checksums, and the wire format of the messages. A record whose data is damaged is passed
over; a damaged length ends the file, since nothing says where the next record begins.

Source: the layout is that of tensorflow/core/lib/io/record_writer and core/example/{example,feature}.proto; the mask
of checksums (rotate right by 15, add 0xa282ead8) is that of core/lib/hash/crc32c.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import BinaryIO

from forebay.errors import PrepareError, install_command
from forebay.prepare.documents import Record
from forebay.prepare.read.base import Format, Piece, ReadOptions
from forebay.prepare.read.fields import to_record
from forebay.prepare.read.opening import Damaged, open_source, skip_to

_STEP = 1 << 20
_MASK = 0xA282EAD8
Value = bytes | int


class NotExampleError(Exception):
    """The bytes are no message of the kind expected."""


def crc32c() -> Callable[[bytes], int]:
    try:
        import google_crc32c
    except ImportError as error:
        raise PrepareError(
            f"prepare: TFRecord needs the package google-crc32c. Install it with: {install_command('prepare')}"
        ) from error
    value: Callable[[bytes], int] = google_crc32c.value
    return value


def masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _read(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    with open_source(piece.sources[0], options) as file:
        for place, (position, data, problem) in enumerate(frames(file, options.max_document_bytes, piece.start)):
            where = f"byte {position}"
            if not problem:
                try:
                    yield to_record(place, parse_example(data), options, where, position)
                    continue
                except NotExampleError as error:
                    problem = f"not a tf.train.Example: {error}"
            shown = data[:200].decode("utf-8", "replace")
            yield Record(place, text=shown, problem=problem, where=where, start=position)


def frames(file: BinaryIO, limit: int, start: int) -> Iterator[tuple[int, bytes, str]]:
    """Where each record begins, its data, and what is wrong with it."""
    crc = crc32c()
    position = start
    skip_to(file, start)
    try:
        while head := _take(file, 12):
            length = int.from_bytes(head[:8], "little")
            if len(head) < 12:
                yield position, b"", "the file ends within a record's length"
                return
            if masked(crc(head[:8])) != int.from_bytes(head[8:], "little"):
                yield position, b"", "the checksum of a record's length does not match; what follows cannot be found"
                return
            data, problem, left = b"", "", length + 4
            if length > limit:
                problem = f"a record of {length} bytes is larger than max_document_bytes, {limit}"
                while left and (passed := len(_take(file, min(left, _STEP)))):
                    left -= passed
                if left:
                    problem = "the file ends within a record"
            else:
                data = _take(file, left)
                left -= len(data)
                if left:
                    problem = f"the file ends {len(data)} bytes into a record of {length}"
                elif masked(crc(data[:-4])) != int.from_bytes(data[-4:], "little"):
                    problem = "the checksum of the record does not match"
            yield position, data[:length], problem
            if left:
                return
            position += 12 + length + 4
    except Damaged as error:
        yield position, b"", str(error)


def _take(file: BinaryIO, size: int) -> bytes:
    """Up to that many bytes. Raises Damaged if damage stands in the way."""
    data = file.read(size)
    while len(data) < size and (more := file.read(size - len(data))):
        data += more
    return data


def parse_example(data: bytes) -> dict[str, object]:
    """The features of an Example or SequenceExample by name: bytes, a number, or the steps of a sequence in lines."""
    row: dict[str, object] = {}
    for number, name, feature in features(data):
        steps = [message(step) for _, step in fields(feature)] if number == 2 else [feature]
        values = [value for step in steps for value in _feature_values(step)]
        if values:
            is_bytes = all(isinstance(value, bytes) for value in values)
            row[name] = b"\n".join(v for v in values if isinstance(v, bytes)) if is_bytes else values[0]
    for key, value in row.items():
        if isinstance(value, bytes):
            with suppress(UnicodeDecodeError):  # told if it is the text
                row[key] = value.decode()
    return row


def features(data: bytes) -> Iterator[tuple[int, str, bytes]]:
    """Each feature of an Example (number 1), and list of features of a SequenceExample (2): number, name, message."""
    for number, entries in fields(data):
        if number not in (1, 2) or not isinstance(entries, bytes):
            raise NotExampleError(f"unknown field {number}")
        for _, entry in fields(entries):
            pair = dict(fields(message(entry)))
            yield number, message(pair.get(1, b"")).decode("utf-8", "replace"), message(pair.get(2, b""))


def _feature_values(feature: bytes) -> Iterator[Value]:
    """The values of a Feature: of a bytes_list (1) all, of an int64_list (3) the first; floats are not needed."""
    for kind, values in fields(feature):
        for _, value in fields(message(values)) if kind in (1, 3) else ():
            if kind == 1:
                yield message(value)
            else:
                number = varint(value, 0)[0] if isinstance(value, bytes) and value else value
                if isinstance(number, int):
                    yield number - (1 << 64) if number >> 63 else number
                return


def message(value: Value) -> bytes:
    """A field's bytes. Raises NotExampleError if it is a number."""
    if not isinstance(value, bytes):
        raise NotExampleError("a number where a message should be")
    return value


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Field numbers and values of a protobuf message: numbers, or bytes."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        kind = tag & 7
        if kind == 0:
            number, at = varint(data, at)
            yield tag >> 3, number
            continue
        if kind == 2:
            size, at = varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise NotExampleError(f"unknown wire type {kind}")
        if at + size > len(data):
            raise NotExampleError("a field that is longer than the message")
        yield tag >> 3, data[at : at + size]
        at += size


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
        shift += 7
    raise NotExampleError("a number without an end")


TFRECORD = Format("tfrecord", _read)
