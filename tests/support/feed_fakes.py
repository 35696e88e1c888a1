"""Transfers that end when a test says so, and feeds of small slices on them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forebay.cache.cache import SliceCache
from forebay.cache.eviction import part_bytes
from forebay.cache.prefetch import SliceFeed
from forebay.errors import NetworkError
from support.calibration import scaled

SIZE = 1000
CONTENTS = [bytes([65 + key]) * SIZE for key in range(16)]
NAMES = [hashlib.sha256(content).hexdigest() for content in CONTENTS]


class FakeTransfer:
    """Writes real bytes when it is told to."""

    def __init__(self, key: int, part: Path, deaf: bool = False) -> None:
        self.key, self.part, self.deaf = key, part, deaf
        self.done = threading.Event()
        self.error: Exception | None = None
        self.received = 0
        self.callbacks: list[Callable[[Any], None]] = []

    def on_done(self, callback: Callable[[Any], None]) -> None:
        if self.done.is_set():
            callback(self)
        else:
            self.callbacks.append(callback)

    def wait(self, timeout: float) -> bool:
        return self.done.wait(timeout)

    def cancel(self) -> None:
        if not self.deaf:
            self.end(NetworkError("cancelled"))

    def end(self, error: Exception | None = None) -> None:
        if self.done.is_set():
            return
        self.error = error
        if error is None:
            self.part.write_bytes(CONTENTS[self.key])
            self.received = SIZE
        self.done.set()
        for callback in self.callbacks:
            callback(self)


@dataclass
class Origin:
    """Starts transfers: ended at once, or held until `end`."""

    at_once: bool = True
    failing: set[int] = field(default_factory=set)
    deaf: bool = False  # to being cancelled
    started: list[int] = field(default_factory=list)
    transfers: dict[int, FakeTransfer] = field(default_factory=dict)

    def start(self, key: int, part: Path) -> FakeTransfer:
        transfer = FakeTransfer(key, part, self.deaf)
        self.started.append(key)
        if key in self.failing:
            transfer.end(NetworkError("the origin is gone"))
        elif self.at_once:
            transfer.end()
        self.transfers[key] = transfer
        return transfer

    def end(self, key: int) -> None:
        self.transfers[key].end()


def uses_of(steps: list[list[int]]) -> Callable[[int, int], tuple[Any, Any]]:
    """Distinct (steps, keys) of a list of what each step reads."""

    def uses(start: int, stop: int) -> tuple[Any, Any]:
        pairs = [(step, key) for step in range(start, stop) for key in dict.fromkeys(steps[step])]
        table = np.array(pairs, np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    return uses


def room_for(slices: int) -> int:
    return slices * SIZE + part_bytes(SIZE) - SIZE


def feed_of(
    directory: Path, steps: list[list[int]], slices: int, origin: Origin, num_keys: int = len(NAMES), **options: Any
) -> SliceFeed:
    return SliceFeed(
        SliceCache(directory, room_for(slices)), NAMES[:num_keys], np.full(num_keys, SIZE), uses_of(steps), len(steps),
        origin.start, **options,
    )  # fmt: skip


def until(condition: Callable[[], object], what: str, seconds: float = 10) -> None:
    deadline = time.monotonic() + scaled(seconds)
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def read(feed: SliceFeed, steps: list[list[int]], start: int = 0, stop: int | None = None) -> None:
    for step in range(start, len(steps) if stop is None else stop):
        for key in steps[step]:
            assert feed.acquire(key, step + 1).read_bytes() == CONTENTS[key]
        feed.advance(step + 1)
