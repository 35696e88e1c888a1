"""Sends batches from helper processes through shared memory that is mapped once and used again.

A message in the queue is a few hundred bytes: arrays are pickled out of band, into a segment that both processes keep
mapped, and that is free when the last array that the reader made of it is deleted. A writer without a free segment, at
its limit of memory, sends the bytes themselves. Segments have no name in the file system, so a kill leaks none.
"""

import io
import mmap
import os
import pickle
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, count, islice
from multiprocessing import reduction
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from forebay.files import is_running

U8 = NDArray[np.uint8]
_Message = TypeVar("_Message", bound=Sized)

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


@dataclass(frozen=True)
class BatchBundle:
    """Some batches as they arrived."""

    raw: U8  # uint8 [n], the bytes of arrays. The segment is free when this and all views of it are deleted.
    ranges: Sequence[tuple[int, int]]  # Of each array, in `raw`.
    pickled: bytes  # A list of dicts of arrays, without the arrays' bytes.

    def unpack(self) -> list[dict[str, Any]]:
        """The batches; their arrays are views of `raw`."""
        view = self.raw.data
        batches: list[dict[str, Any]] = pickle.loads(self.pickled, buffers=[view[a:b] for a, b in self.ranges])
        return batches


class _HeldSegment(np.ndarray[Any, np.dtype[np.uint8]]):
    flag: U8

    def __del__(self) -> None:
        flag = getattr(self, "flag", None)
        if flag is not None:
            flag[0] = 0


class SegmentWriter:
    """Writes bundles in a helper process. Not thread-safe."""

    def __init__(self) -> None:
        self._token = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._segments: list[U8] = []
        self._free_bytes = _MAX_BYTES

    def write(self, batches: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        """Copy some batches; returns the arguments for `read` in another process."""
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        _Pickler(file, 5, buffer_callback=buffers.append).dump(list(batches))
        arrays = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
        stops = [_HEADER]
        starts = []
        for array in arrays:
            starts.append(-(-stops[-1] // _ALIGN) * _ALIGN)
            stops.append(starts[-1] + len(array))
        number, handle = self._acquire(stops[-1])
        segment = np.empty(stops[-1], np.uint8) if number is None else self._segments[number]
        for array, start in zip(arrays, starts):
            segment[start : start + len(array)] = array
        ranges = [(start - _HEADER, stop - _HEADER) for start, stop in zip(starts, stops[1:])]
        location = segment if number is None else (self._token, number, handle)
        return location, stops[-1], ranges, file.getvalue()

    def _acquire(self, size: int) -> tuple[int | None, Any]:
        for number, segment in enumerate(self._segments):
            if segment[0] == 0 and len(segment) >= size:
                segment[0] = 1
                return number, None
        capacity = max(_MIN_SEGMENT_BYTES, 1 << (size - 1).bit_length())
        if capacity > self._free_bytes:
            return None, None
        try:
            descriptor = create_shared_memory(capacity)
            try:
                segment = np.frombuffer(mmap.mmap(descriptor, capacity), np.uint8)
                handle = reduction.DupFd(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            return None, None  # No descriptors or no memory left: the bytes are sent in the message.
        self._free_bytes -= capacity
        segment[0] = 1
        self._segments.append(segment)
        return len(self._segments) - 1, (handle, capacity)


_writer: tuple[int, SegmentWriter] | None = None
_writing = threading.Lock()


def write(batches: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """`SegmentWriter.write` of this process's own writer."""
    global _writer
    with _writing:
        if _writer is None or _writer[0] != os.getpid():
            _writer = os.getpid(), SegmentWriter()
        return _writer[1].write(batches)


class BundleMessage:
    """Some batches that, pickled to another process, arrive as `receive(bundle)`."""

    def __init__(self, batches: Sequence[Mapping[str, Any]], receive: Callable[[BatchBundle], Any]) -> None:
        self._batches, self._receive = batches, receive

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_message, (self._receive, *write(self._batches))


def bundle_batches(
    batches: Iterator[Mapping[str, Any]], max_batches: int, receive: Callable[[BatchBundle], Any]
) -> Iterator[BundleMessage]:
    """Bundles of 1, 1, 2, 4, ... `max_batches`, so the first batches do not wait. An error comes after its batches."""
    sizes = chain([1], (min(1 << i, max_batches) for i in count()))
    while True:
        bundle: list[Mapping[str, Any]] = []
        try:
            for batch in islice(batches, next(sizes)):
                bundle.append(batch)
        except Exception:
            if bundle:
                yield BundleMessage(bundle, receive)
            raise
        if not bundle:
            return
        yield BundleMessage(bundle, receive)
        del bundle


def order_bundles(messages: Iterator[_Message], helpers: int) -> Iterator[tuple[_Message, int]]:
    """The bundles of several helpers in the order of steps: (message, index in it) of each step.

    Helper k makes steps k, k + helpers, ...; messages come from helpers 0, 1, ..., 0, 1, ... and have equally many
    steps in a round, except at a helper's end.
    """
    for first in messages:
        around: list[_Message | None] = [first]
        for i in range(len(first)):
            for helper in range(helpers):
                if i == 0 and helper > 0:
                    around.append(next(messages, None))
                message = around[helper]
                if message is None or i >= len(message):
                    for _ in messages:  # Raises the error that ended the helper, if any.
                        pass
                    return
                yield message, i


_opened: dict[tuple[str, int], tuple[mmap.mmap, U8]] = {}
_opening = threading.Lock()


def read(location: Any, size: int, ranges: Sequence[tuple[int, int]], pickled: bytes) -> BatchBundle:
    """What a SegmentWriter wrote. The first message of a segment opens it; the writer must still be running then."""
    if isinstance(location, np.ndarray):
        return BatchBundle(location[_HEADER:size], ranges, pickled)
    token, number, handle = location
    if handle is not None:
        with _opening:
            _open(token, number, *handle)
    memory, flag = _opened[token, number]
    segment = _HeldSegment((size - _HEADER,), np.uint8, memory, _HEADER)
    segment.flag = flag
    return BatchBundle(segment, ranges, pickled)


def _receive_message(receive: Callable[[BatchBundle], Any], *message: Any) -> Any:
    return receive(read(*message))


def _open(token: str, number: int, handle: Any, capacity: int) -> None:
    for key in [key for key in _opened if not is_running(int(key[0].partition("-")[0]))]:
        del _opened[key]
    descriptor = handle.detach()
    try:
        memory = mmap.mmap(descriptor, capacity)
        _opened[token, number] = memory, np.frombuffer(memory, np.uint8, 1)
    finally:
        os.close(descriptor)


def create_shared_memory(size: int) -> int:
    """A descriptor of anonymous shared memory, freed with its last map; the caller closes the descriptor."""
    if hasattr(os, "memfd_create"):  # Not limited by the size of /dev/shm, which is 64 MiB in many containers.
        descriptor = os.memfd_create("forebay")
    else:
        descriptor, name = tempfile.mkstemp(prefix="forebay-")
        os.unlink(name)  # noqa: PTH108  mkstemp returns a string.
    os.ftruncate(descriptor, size)
    return descriptor
