"""Sends batches between processes through shared memory that is mapped once and used again.

A message in the socket is a few hundred bytes: arrays are pickled out of band, into a segment that both processes keep
mapped, and that is free when the last array that the reader made of it is deleted. A writer without a free segment, at
its limit of memory, sends the bytes themselves. Segments have no name in the file system, so a kill leaks none.
"""

import io
import mmap
import os
import pickle
import socket
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]

_HEADER = 64  # Byte 0: 1 while a reader holds the segment, or a message is on its way.
_ALIGN = 64
_MIN_SEGMENT_BYTES = 1 << 16
_MAX_BYTES = 512 << 20  # Of a writer's segments; pages that no batch reached cost nothing.


class _Pickler(pickle.Pickler):
    """Pickles a view of a contiguous array as that array and a position; NumPy would copy inputs and labels."""

    def reducer_override(self, value: Any) -> Any:
        base = getattr(value, "base", None)
        if type(value) is not np.ndarray or value.flags.c_contiguous or type(base) is not np.ndarray:
            return NotImplemented
        if not base.flags.c_contiguous or base.nbytes > 2 * value.nbytes:
            return NotImplemented
        offset = value.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        return np.ndarray, (value.shape, value.dtype, base, offset, value.strides)


class _HeldSegment(np.ndarray[Any, np.dtype[np.uint8]]):
    flag: U8

    def __del__(self) -> None:
        flag = getattr(self, "flag", None)
        if flag is not None:
            flag[0] = 0


class SegmentWriter:
    """Sends objects with arrays. For one thread, and one end of a pair of Unix sockets."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._connection = end, Connection(os.dup(end.fileno()))
        self._segments: list[U8] = []
        self._free_bytes = _MAX_BYTES

    def send(self, head: Any, items: Any) -> None:
        """Send `head` (pickled), and `items`, whose arrays are copied once."""
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        _Pickler(file, 5, buffer_callback=buffers.append).dump(items)
        arrays = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
        stops = [_HEADER]
        starts = []
        for array in arrays:
            starts.append(-(-stops[-1] // _ALIGN) * _ALIGN)
            stops.append(starts[-1] + len(array))
        number, descriptor = self._acquire(stops[-1])
        segment = np.empty(stops[-1], np.uint8) if number is None else self._segments[number]
        for array, start in zip(arrays, starts):
            segment[start : start + len(array)] = array
        ranges = [(start - _HEADER, stop - _HEADER) for start, stop in zip(starts, stops[1:])]
        location = segment if number is None else (number, 0 if descriptor is None else len(segment))
        self._connection.send((head, location, stops[-1], ranges, file.getvalue()))
        if descriptor is not None:
            socket.send_fds(self._socket, [b"\0"], [descriptor])
            os.close(descriptor)

    def _acquire(self, size: int) -> tuple[int | None, int | None]:
        """The number of a free segment, and its descriptor if it is new; None if there is none."""
        for number, segment in enumerate(self._segments):
            if segment[0] == 0 and len(segment) >= size:
                segment[0] = 1
                return number, None
        capacity = max(_MIN_SEGMENT_BYTES, 1 << (size - 1).bit_length())
        if capacity > self._free_bytes:
            return None, None
        try:
            descriptor = create_shared_memory(capacity)
            segment = np.frombuffer(mmap.mmap(descriptor, capacity), np.uint8)
        except OSError:
            return None, None  # No descriptors or no memory left: the bytes are sent in the message.
        self._free_bytes -= capacity
        segment[0] = 1
        self._segments.append(segment)
        return len(self._segments) - 1, descriptor


class SegmentReader:
    """Receives what a SegmentWriter sends. For one thread."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._connection = end, Connection(os.dup(end.fileno()))
        self._segments: list[mmap.mmap] = []

    def receive(self) -> tuple[Any, Any]:
        """(head, items); arrays of the items are views of a segment, which is free when all are deleted.

        Raises:
            EOFError, OSError: If the writer's process has ended.
        """
        head, location, size, ranges, pickled = self._connection.recv()
        if isinstance(location, np.ndarray):
            raw = location[_HEADER:size]
        else:
            number, capacity = location
            if capacity:
                _, (descriptor,), _, _ = socket.recv_fds(self._socket, 1, 1)
                self._segments.append(mmap.mmap(descriptor, capacity))
                os.close(descriptor)
            raw = _HeldSegment((size - _HEADER,), np.uint8, self._segments[number], _HEADER)
            raw.flag = np.frombuffer(self._segments[number], np.uint8, 1)
        view = raw.data
        return head, pickle.loads(pickled, buffers=[view[a:b] for a, b in ranges])

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
