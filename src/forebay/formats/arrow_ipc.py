"""Checks how much memory the messages of Arrow IPC need, before a reader unpacks them.

Hides flatbuffers, as far as these headers need them. Every reader unpacks each buffer of a message as a whole, and only
its header says how large it becomes. Costs a read of a few bytes for each buffer.

Source: Arrow's Message.fbs and File.fbs, and the flatbuffers internals (tables and vectors).
"""

import io
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from forebay.errors import CorruptInputError
from forebay.storage.compression import ChunkStream

MAX_BUFFERED_BYTES = 512 << 20
"""A page (packed and unpacked; of a dictionary there is one more copy) or the buffers of a message: no more at once."""

_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_MAX_METADATA = 64 << 20
_ReadAt = Callable[[int, int], bytes]


@contextmanager
def _flatbuffer() -> Iterator[None]:
    try:
        yield
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise CorruptInputError(f"a damaged Arrow message: {error}.") from error


def _field(data: bytes, table: int, index: int) -> int:
    layout = table - struct.unpack_from("<i", data, table)[0]
    if layout < 0 or 6 + 2 * index > struct.unpack_from("<H", data, layout)[0]:
        return 0
    offset = struct.unpack_from("<H", data, layout + 4 + 2 * index)[0]
    return table + offset if offset else 0


def _follow(data: bytes, offset: int) -> int:
    return int(offset + struct.unpack_from("<I", data, offset)[0])


def _vector(data: bytes, table: int, index: int, member: str) -> list[tuple[int, ...]]:
    if not (offset := _field(data, table, index)):
        return []
    start = _follow(data, offset)
    size = struct.unpack_from("<I", data, start)[0] * struct.calcsize(member)
    return list(struct.iter_unpack(member, memoryview(data)[start + 4 : start + 4 + size]))


def _body_bytes(metadata: bytes) -> int:
    offset = _field(metadata, _follow(metadata, 0), 3)
    size = struct.unpack_from("<q", metadata, offset)[0] if offset else 0
    if size < 0:
        raise CorruptInputError("an Arrow message of negative length.")
    return int(size)


def _check_message(metadata: bytes, read_at: _ReadAt) -> None:
    message = _follow(metadata, 0)
    kind, header = _field(metadata, message, 1), _field(metadata, message, 2)
    if not kind or not header or metadata[kind] not in (_DICTIONARY_BATCH, _RECORD_BATCH):
        return
    batch = _follow(metadata, header)
    if metadata[kind] == _DICTIONARY_BATCH:
        batch = _follow(metadata, _field(metadata, batch, 1))
    if not _field(metadata, batch, 3):  # not packed
        return
    size = 0
    for offset, length in _vector(metadata, batch, 2, "<qq"):
        if length >= 8:
            claimed = int.from_bytes(read_at(offset, 8), "little", signed=True)
            size += length if claimed < 0 else claimed
    if size > MAX_BUFFERED_BYTES:
        raise CorruptInputError(
            f"a batch that unpacks to {size} bytes is larger than can be held: at most {MAX_BUFFERED_BYTES}. Write the "
            "file with smaller batches"
        )


def check_blocks(file: BinaryIO, start: int, stop: int) -> None:
    """Refuse an Arrow file if a dictionary, or one of its batches `[start, stop)`, takes too much memory (0: all)."""
    with _flatbuffer():
        end = file.seek(-10, 2)
        size = int.from_bytes(file.read(4), "little")
        if not 0 < size <= min(end, _MAX_METADATA):
            raise CorruptInputError(f"an Arrow file with a footer of {size} bytes.")
        file.seek(end - size)
        footer = file.read(size)
        root = _follow(footer, 0)
        batches = _vector(footer, root, 3, "<qi4xq")
        for offset, metadata_bytes, _ in [*_vector(footer, root, 2, "<qi4xq"), *batches[start : stop or len(batches)]]:
            _seek(file, offset)
            _check_message(_read_head(file)[1], _reader_at(file, offset + metadata_bytes))


def _seek(file: BinaryIO, offset: int) -> None:
    if not 0 <= offset < 1 << 63:
        raise ValueError(f"an offset of {offset}")
    file.seek(offset)


def _reader_at(file: BinaryIO, start: int) -> _ReadAt:
    def read_at(offset: int, size: int) -> bytes:
        _seek(file, start + offset)
        return file.read(size)

    return read_at


def check_stream(file: BinaryIO) -> None:
    """Refuse an Arrow stream, which can be sought in, if one of its messages takes too much memory."""
    with _flatbuffer():
        while (head := _read_head(file))[1]:
            start = file.tell()
            _check_message(head[1], _reader_at(file, start))
            _seek(file, start + _body_bytes(head[1]))


def _read_head(file: BinaryIO) -> tuple[bytes, bytes]:
    head = file.read(4)
    if head == b"\xff\xff\xff\xff":
        head += file.read(4)
    size = int.from_bytes(head[-4:], "little")
    if size > _MAX_METADATA:
        raise CorruptInputError("an Arrow file that is compressed as a whole, or no Arrow stream. Unpack it first.")
    return head, file.read(size)


def checked_stream(file: BinaryIO) -> BinaryIO:
    """Return the bytes of an Arrow stream; reading them raises CorruptInputError before a message that is too large."""

    def messages() -> Iterator[bytes]:
        with _flatbuffer():
            while (head := _read_head(file))[0]:
                size = _body_bytes(head[1]) if head[1] else 0
                if size > MAX_BUFFERED_BYTES:
                    raise CorruptInputError(
                        f"a batch of {size} bytes is larger than can be held: at most {MAX_BUFFERED_BYTES}."
                    )
                body = file.read(size)
                if body:
                    _check_message(head[1], _reader_at(io.BytesIO(body), 0))
                yield from (*head, body)

    return ChunkStream(messages())
