"""What a process tells its helper processes, and they each other: a small shared memory, at any start method.

The state is written by the process that trains alone, between passes. The mark is one number, so that helpers may
all write it at once.
"""

from __future__ import annotations

import json
import mmap
import os
from multiprocessing import context, reduction
from typing import Any

import numpy as np

from forebay.errors import StateError
from forebay.load.parcels import shared_memory

_BYTES = 1 << 16
_HEADER = 16  # Mark, length of the state: int64 each.


class Board:
    """A loader's state, or none; and which pass began last, of which epoch. Closed with the process."""

    def __init__(self) -> None:
        self._open(shared_memory(_BYTES))

    def _open(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._bytes = np.frombuffer(mmap.mmap(descriptor, _BYTES), np.uint8)
        self._numbers = self._bytes[:_HEADER].view(np.int64)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def __getstate__(self) -> dict[str, Any]:
        """The memory itself for a process that is being started; for anything else (a copy) what is in it."""
        if context.get_spawning_popen() is not None:
            return {"handle": reduction.DupFd(self._descriptor)}
        return {"content": self._bytes.tobytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open(state["handle"].detach() if "handle" in state else shared_memory(_BYTES))
        if "content" in state:
            self._bytes[:] = np.frombuffer(state["content"], np.uint8)

    def read(self) -> dict[str, Any] | None:
        """The state written last, if any was."""
        length = int(self._numbers[1])
        return json.loads(self._bytes[_HEADER : _HEADER + length].tobytes()) if length else None

    def write(self, state: dict[str, Any]) -> None:
        """The next pass begins at `state`. Raises StateError if it is too long."""
        text = json.dumps(state).encode()
        if len(text) > _BYTES - _HEADER:
            raise StateError(f"loader state: expected at most {_BYTES - _HEADER} bytes of JSON, got {len(text)}.")
        self._bytes[_HEADER : _HEADER + len(text)] = np.frombuffer(text, np.uint8)
        self._numbers[:] = 0, len(text)

    def begin_pass(self, mark: int, first_epoch: int, at_first: bool) -> int:
        """The epoch of the pass that all helpers know as `mark`: the one after the last pass's.

        Args:
            mark: In [0, 2**31); the same for all helpers of a pass.
            first_epoch: Of the first pass since a state was written, and of this one if `at_first`.
        """
        value = int(self._numbers[0])
        epoch = first_epoch
        if value and not at_first:
            epoch = (value & 0xFFFF_FFFF) - 1
            epoch += value >> 32 != mark
        self._numbers[0] = mark << 32 | epoch + 1
        return epoch
