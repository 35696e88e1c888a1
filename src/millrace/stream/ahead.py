"""A generator run ahead by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import TypeVar

_STOP_POLL_S = 0.05
T = TypeVar("T")


def ahead(made: Generator[T, None, None], most: int) -> Generator[T, None, None]:
    """The same items, made by a thread at most `most` ahead of who takes them; what it raises is raised here.

    Closing ends the thread and closes `made`; what was made and not taken is dropped.
    """
    ready: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(most)
    stop = threading.Event()

    def put(item: tuple[T] | BaseException | None) -> None:
        while not stop.is_set():
            try:
                return ready.put(item, timeout=_STOP_POLL_S)
            except queue.Full:
                continue

    def make() -> None:
        try:
            for item in made:
                put((item,))
                if stop.is_set():
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001  The caller's thread raises it.
            put(error)
        finally:
            made.close()

    thread = threading.Thread(target=make, name="millrace-stream", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        stop.set()
        thread.join()
