"""Arrays from a helper process to the one that trains: written once, into memory that both keep mapped.

Hides the shared memory: who may write to a segment, how it gets across once, when it is free again. A message is
then a few hundred bytes, whatever the batch; a tensor sent PyTorch's own way costs a new file, its page faults and a
handshake over a socket each time. A segment is free when the last array that the reader made of it is gone, so a
batch that is kept stays whole; a writer that finds none free, and may open no more, sends the bytes themselves.

Arrays that overlap in memory (inputs and labels of one buffer) travel as one. Nothing has a name in the file system.
"""

import ctypes
import mmap
import os
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
_SMALLEST = 1 << 16
_MOST_BYTES = 512 << 20  # Of a writer's segments: pages that no batch reached cost nothing.
_Field = tuple[str, str, tuple[int, ...], tuple[int, ...], int]  # name, dtype, shape, strides, offset


@dataclass(frozen=True)
class Parcel:
    """Some dicts of arrays as they arrived."""

    raw: U8  # uint8 [n]: the bytes. The segment is free again when this and all views of it are gone.
    fields: Sequence[Sequence[_Field]]  # Of each dict, where its arrays lie in `raw`.
    rest: Sequence[dict[str, Any]]  # Of each dict, what is no array.

    def __len__(self) -> int:
        return len(self.fields)

    def unpack(self, index: int) -> dict[str, Any]:
        """Dict `index`, its arrays views of `raw`, writable."""
        found: dict[str, Any] = {
            name: np.ndarray(shape, dtype, self.raw, offset, strides)
            for name, dtype, shape, strides, offset in self.fields[index]
        }
        return found | self.rest[index]


class _Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of a segment that a reader holds.

    Made of the map and not of an array over it: NumPy's views keep the innermost array, which must be this one.
    """

    flag: U8

    def __del__(self) -> None:
        flag = getattr(self, "flag", None)
        if flag is not None:
            flag[0] = 0


class Writer:
    """A helper process's end. One thread at a time."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._token = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._segments: list[U8] = []
        self._room = most_bytes

    def write(self, dicts: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        """A copy of some dicts, ready to be pickled to another process: the arguments that `read` takes there.

        Values that are no arrays travel as they are.
        """
        size, pieces, fields = _HEADER, [], []
        for one in dicts:
            arrays = {name: value for name, value in one.items() if isinstance(value, np.ndarray)}
            placed, more, size = _place(arrays, size)
            fields.append(placed)
            pieces += more
        rest = [{name: value for name, value in one.items() if not isinstance(value, np.ndarray)} for one in dicts]
        number, handle = self._take(size)
        target = np.empty(size, np.uint8) if number is None else self._segments[number]
        address = target.ctypes.data
        for array, first, length, offset in pieces:
            ctypes.memmove(address + offset, first, length)
            del array  # Held until here: `first` points into it.
        where = target if number is None else (self._token, number, handle)
        relative = [[(*field[:4], field[4] - _HEADER) for field in placed] for placed in fields]
        return where, size, relative, rest

    def _take(self, size: int) -> tuple[int | None, Any]:
        """A free segment of at least `size` bytes, marked as taken, and what opens it if it is new; or none."""
        for number, segment in enumerate(self._segments):
            if segment[0] == 0 and len(segment) >= size:
                segment[0] = 1
                return number, None
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
        if capacity > self._room:
            return None, None
        try:
            descriptor = shared_memory(capacity)
            try:
                segment = np.frombuffer(mmap.mmap(descriptor, capacity), np.uint8)
                handle = reduction.DupFd(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            return None, None  # No descriptors or no memory left: the slower way works still.
        self._room -= capacity
        segment[0] = 1
        self._segments.append(segment)
        return len(self._segments) - 1, (handle, capacity)


_writer: tuple[int, Writer] | None = None
_writing = threading.Lock()


def write(dicts: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """As `Writer.write`, by this process's own."""
    global _writer
    with _writing:
        if _writer is None or _writer[0] != os.getpid():
            _writer = os.getpid(), Writer()
        return _writer[1].write(dicts)


class Bundle:
    """Some dicts of arrays that, pickled to another process, arrive as what `receive` makes of their Parcel."""

    def __init__(self, dicts: Sequence[Mapping[str, Any]], receive: Callable[[Parcel], Any]) -> None:
        self._dicts, self._receive = dicts, receive

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._receive, *write(self._dicts))


def bundled(dicts: Iterator[Mapping[str, Any]], most: int, receive: Callable[[Parcel], Any]) -> Iterator[Bundle]:
    """1, 1, 2, 4, … `most` of them at a time: the first wait for nobody. What came before an error goes first."""
    sizes = chain([1], (min(1 << i, most) for i in count()))
    while True:
        bundle: list[Mapping[str, Any]] = []
        try:
            for one in islice(dicts, next(sizes)):
                bundle.append(one)
        except Exception:
            if bundle:
                yield Bundle(bundle, receive)
            raise
        if not bundle:
            return
        yield Bundle(bundle, receive)
        del bundle


def in_turn(messages: Iterator[_Message], helpers: int) -> Iterator[tuple[_Message, int]]:
    """Puts bundles of several helpers in the order of steps: (message, index in it) of each step.

    Helper k makes steps k, k + helpers, …; messages come from helpers 0, 1, …, 0, 1, … and hold as many steps in a
    round each, but where a helper is at its end.
    """
    for first in messages:
        around: list[_Message | None] = [first]
        for i in range(len(first)):
            for helper in range(helpers):
                if i == 0 and helper > 0:
                    around.append(next(messages, None))
                message = around[helper]
                if message is None or i >= len(message):
                    for _ in messages:  # Nothing follows but an error, if that ended the helper.
                        pass
                    return
                yield message, i


_opened: dict[tuple[str, int], tuple[mmap.mmap, U8]] = {}
_opening = threading.Lock()


def read(where: Any, size: int, fields: Sequence[Sequence[_Field]], rest: Sequence[dict[str, Any]]) -> Parcel:
    """What a Writer wrote. The first message about a segment opens it; the writer must still live then."""
    if isinstance(where, np.ndarray):
        return Parcel(where[_HEADER:size], fields, rest)
    token, number, handle = where
    if handle is not None:
        with _opening:
            _open(token, number, *handle)
    memory, flag = _opened[token, number]
    lease = _Lease((size - _HEADER,), np.uint8, memory, _HEADER)
    lease.flag = flag
    return Parcel(lease, fields, rest)


def _received(receive: Callable[[Parcel], Any], *message: Any) -> Any:
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


def shared_memory(size: int) -> int:
    """A descriptor of bytes that no file system names; the caller closes it. They are gone with their last map."""
    if hasattr(os, "memfd_create"):  # Not bounded by the size of /dev/shm, which is 64 MiB in many containers.
        descriptor = os.memfd_create("forebay")
    else:
        descriptor, name = tempfile.mkstemp(prefix="forebay-")
        os.unlink(name)  # noqa: PTH108  mkstemp gives a string.
    os.ftruncate(descriptor, size)
    return descriptor


def _place(
    arrays: Mapping[str, NDArray[Any]], start: int
) -> tuple[list[_Field], list[tuple[NDArray[Any], int, int, int]], int]:
    """Where arrays go in a segment from byte `start` on.

    Returns:
        The fields; what to copy as (array to keep alive, address, bytes, offset); the first byte after.
    """
    spans = []
    for name, array in arrays.items():
        first, stop = _bounds(array)
        if stop - first > 2 * array.nbytes:
            array = np.ascontiguousarray(array)
            first, stop = _bounds(array)
        spans.append((first, stop, name, array))
    spans.sort(key=lambda span: span[:2])
    fields: list[_Field] = []
    pieces: list[tuple[NDArray[Any], int, int, int]] = []
    begin = end = offset = 0
    for first, stop, name, array in spans:
        if not pieces or first >= end:
            start = offset = -(-start // _ALIGN) * _ALIGN
            begin, end = first, stop
            pieces.append((array, begin, end - begin, offset))
        elif stop > end:
            end = stop
            pieces[-1] = (array, begin, end - begin, offset)
        start = offset + end - begin
        fields.append((name, array.dtype.str, array.shape, array.strides, offset + first - begin))
    return fields, pieces, start


def _bounds(array: NDArray[Any]) -> tuple[int, int]:
    """The first byte of an array's memory and the one after its last; strides below 0 are made none by a copy."""
    first: int = array.__array_interface__["data"][0]
    if array.size == 0:
        return first, first
    if any(stride < 0 for stride in array.strides):
        return first, first + 3 * array.nbytes  # Too far apart to be sent as it lies.
    reach = map(lambda n, stride: (n - 1) * stride, array.shape, array.strides)
    return first, first + sum(reach) + array.itemsize
