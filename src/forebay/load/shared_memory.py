"""Sends batches between processes through shared memory that is mapped once and used again.

A message in the socket is a few hundred bytes: arrays are copied into a segment that both processes keep mapped, and
that is free when the last array that the reader made of it is deleted. A writer without a free segment, at its limit of
memory, sends the bytes themselves. Segments have no name in the file system, so a kill leaks none.
"""

import io
import mmap
import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import numpy as np

from forebay.arrays import U8
from forebay.load.batch import owner_of

_Part: TypeAlias = tuple[bytes, list[tuple[int, int]]]  # A pickled item, and where its arrays are in the segment.

_HEADER = 64  # Byte 0: 1 while a reader holds the segment, or a message is on its way.
_ALIGN = 64
_MIN_SEGMENT_BYTES = 1 << 16
_MAX_BYTES = 512 << 20  # A writer's segments together; pages that no batch reached cost nothing.


class _HeldSegment(np.ndarray[Any, np.dtype[np.uint8]]):
    flag: U8

    def __del__(self) -> None:
        flag = getattr(self, "flag", None)
        if flag is not None:
            flag[0] = 0


class SegmentWriter:
    """Sends lists of batches. For one thread, and one end of a pair of Unix sockets."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self.connection = end, Connection(os.dup(end.fileno()))
        self._segments: list[U8] = []
        self._new: list[int] = []  # Descriptors of the last segments, which the reader does not have.
        self._free_bytes = _MAX_BYTES

    def send(self, items: Iterable[Any], max_items: int, head: Callable[[], Any]) -> int:
        """Send at most `max_items`, each copied as soon as it is made, and then `head()`; return how many.

        An error of `items` is raised after the items before it were sent.
        """
        number, segment, stop = None, np.empty(0, np.uint8), _HEADER
        parts: list[_Part] = []
        error: Exception | None = None
        iterator = iter(items)
        while len(parts) < max_items:
            try:
                item = next(iterator, None)
            except Exception as failure:  # noqa: BLE001  It is raised below.
                item, error = None, failure
            if item is None:
                break
            pickled, buffers = _pickle(item)
            del item  # Its memory is used for the next one.
            size = sum(buffer.nbytes + _ALIGN for buffer in buffers)
            if stop + size > len(segment):  # Usually for the first item only: the others have its size.
                last, last_number, capacity = segment, number, stop + size * (max_items - len(parts))
                number = self._acquire(capacity)
                segment = np.empty(capacity, np.uint8) if number is None else self._segments[number]
                segment[_HEADER:stop] = last[_HEADER:stop]
                if last_number is not None:
                    last[0] = 0
            places = []
            for buffer in buffers:
                segment[stop : stop + buffer.nbytes] = buffer
                places.append((stop - _HEADER, stop - _HEADER + buffer.nbytes))
                stop += -(-buffer.nbytes // _ALIGN) * _ALIGN
            del buffers, buffer
            parts.append((pickled, places))
        if parts or error is None:
            location = segment[:stop] if number is None else number
            new = [len(segment) for segment in self._segments[len(self._segments) - len(self._new) :]]
            self.connection.send((head(), new, location, stop, parts))
            for descriptor in self._new:
                socket.send_fds(self._socket, [b"\0"], [descriptor])
                os.close(descriptor)
            self._new = []
        if error is not None:
            raise error
        return len(parts)

    def _acquire(self, size: int) -> int | None:
        """The number of a free segment; None if there is none."""
        for number, segment in enumerate(self._segments):
            if segment[0] == 0 and len(segment) >= size:
                segment[0] = 1
                return number
        capacity = max(_MIN_SEGMENT_BYTES, 1 << (size - 1).bit_length())
        if capacity > self._free_bytes:
            return None
        try:
            descriptor = create_shared_memory(capacity)
            segment = np.frombuffer(mmap.mmap(descriptor, capacity), np.uint8)
        except OSError:
            return None  # No descriptors or no memory left: the bytes are sent in the message.
        self._free_bytes -= capacity
        segment[0] = 1
        self._segments.append(segment)
        self._new.append(descriptor)
        return len(self._segments) - 1


class SegmentReader:
    """Receives what a SegmentWriter sends. For one thread."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._connection = end, Connection(os.dup(end.fileno()))
        self._segments: list[mmap.mmap] = []

    def receive(self) -> tuple[Any, list[Any]]:
        """(head, items); arrays of the items are views of a segment, which is free when all are deleted.

        Raises:
            EOFError, OSError: If the writer's process has ended.
        """
        head, new, location, stop, parts = self._connection.recv()
        for capacity in new:
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
            if not descriptors:
                raise EOFError
            self._segments.append(mmap.mmap(descriptors[0], capacity))
            os.close(descriptors[0])
        if isinstance(location, np.ndarray):
            raw = location[_HEADER:]
        else:
            raw = _HeldSegment((stop - _HEADER,), np.uint8, self._segments[location], _HEADER)
            raw.flag = np.frombuffer(self._segments[location], np.uint8, 1)
        view = memoryview(raw)  # type: ignore[arg-type]
        return head, [
            pickle.loads(pickled, buffers=[view[low:high] for low, high in places]) for pickled, places in parts
        ]

    def close(self) -> None:
        """Close the connection; arrays stay valid."""
        self._connection.close()


def create_shared_memory(size: int) -> int:
    """A descriptor of anonymous shared memory, freed with its last map; the caller closes the descriptor."""
    if hasattr(os, "memfd_create"):  # Not limited by the size of /dev/shm, which is 64 MiB in many containers.
        descriptor = os.memfd_create("forebay")
    else:
        descriptor, name = tempfile.mkstemp(prefix="forebay-")
        os.unlink(name)  # noqa: PTH108  mkstemp returns a string.
    os.ftruncate(descriptor, size)
    return descriptor


class _Pickler(pickle.Pickler):
    """Two views of one array cross as that array."""

    def reducer_override(self, item: Any) -> Any:
        owner = owner_of(item) if type(item) is np.ndarray else item
        if owner is item:
            return NotImplemented
        offset = item.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
        return np.ndarray, (item.shape, item.dtype, owner, offset, item.strides)


def _pickle(item: Any) -> tuple[bytes, list[U8]]:
    """(an item without the bytes of its arrays, these bytes)."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, 5, buffer_callback=buffers.append).dump(item)
    return file.getvalue(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
