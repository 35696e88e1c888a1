"""Memory maps of files that keep no file descriptor open.

Python's `mmap` and `numpy.memmap` hold a descriptor as long as the map lives, so that the usual limit of 1,024 open
files would be one of mapped files. POSIX lets a descriptor be closed once its file is mapped.
"""

import ctypes
import mmap
import os
import weakref
from typing import Any, BinaryIO

import numpy as np

from forebay.arrays import U8, Array

_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes, _libc.mmap.restype = (_ADDRESS, _SIZE, _INT, _INT, _INT, ctypes.c_ssize_t), _ADDRESS
_libc.munmap.argtypes, _libc.madvise.argtypes = (_ADDRESS, _SIZE), (_ADDRESS, _SIZE, _INT)
_FAILED = _ADDRESS(-1).value


def map_file(file: BinaryIO, num_bytes: int = -1, offset: int = 0, *, is_writable: bool = False) -> U8:
    """Return bytes of an open file as an array; the file may be closed then. The map ends with its last view.

    Args:
        num_bytes: By default all from `offset` on.
        offset: The byte of the file at which the array begins.
        is_writable: Whether the array is written to the file; else it is read-only.

    Returns:
        uint8 [num_bytes].

    Raises:
        OSError: If the system refuses, or the file is shorter: a process that reads behind its end is killed.
    """
    size = os.fstat(file.fileno()).st_size
    num_bytes = size - offset if num_bytes < 0 else num_bytes
    if not 0 <= offset <= offset + num_bytes <= size:
        raise OSError(f"expected at least {offset + num_bytes} bytes, got {size}")
    if not num_bytes:
        return np.zeros(0, np.uint8)
    before = offset % mmap.ALLOCATIONGRANULARITY  # A map begins at a page.
    length, access = before + num_bytes, mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    address = _libc.mmap(None, length, access, mmap.MAP_SHARED, file.fileno(), offset - before)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_uint8 * length).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, length).atexit = False  # Threads may read until the process ends.
    view = memoryview(memory).cast("B")
    return np.frombuffer(view if is_writable else view.toreadonly(), np.uint8)[before:]


def release_pages(array: Array) -> None:
    """Release the pages of an array of `map_file`; views stay valid and are read again on access."""
    base = _find_map(array)
    if base is not None and array.nbytes:
        before = array.ctypes.data % mmap.PAGESIZE
        _libc.madvise(array.ctypes.data - before, before + array.nbytes, mmap.MADV_DONTNEED)


def map_offset(array: Array) -> int:
    """Return the byte of its map at which an array begins: of its file, if all of that is mapped."""
    base = _find_map(array)
    assert base is not None
    return int(array.ctypes.data) - ctypes.addressof(base)


def _find_map(array: Array) -> ctypes.Array[ctypes.c_uint8] | None:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    return base if isinstance(base, ctypes.Array) else None
