"""Runs a generator in a background thread."""

import queue
import threading
from collections.abc import Callable, Generator
from typing import TypeVar

_STOP_POLL_S = 0.05
_T = TypeVar("_T")


def prefetch_in_thread(
    source: Generator[_T, None, None], depth: int, interrupt: Callable[[], object] = lambda: None
) -> Generator[_T, None, None]:
    """Yield the items of `source`, which a thread runs at most `depth` items ahead; its exceptions are raised here.

    Closing stops the thread, closes `source` and drops items that were not taken; it calls `interrupt`, which wakes up
    a waiting `source`.
    """
    items: queue.Queue[tuple[_T] | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: tuple[_T] | BaseException | None) -> None:
        while not stop.is_set():
            try:
                return items.put(item, timeout=_STOP_POLL_S)
            except queue.Full:
                continue

    def run() -> None:
        try:
            for item in source:
                put((item,))
                if stop.is_set():
                    return
                del item
            put(None)
        except BaseException as error:  # noqa: BLE001  It is raised in the caller's thread.
            put(error)
        finally:
            source.close()

    thread = threading.Thread(target=run, name="forebay-loader", daemon=True)
    thread.start()
    try:
        while (item := items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
            del item
    finally:
        stop.set()
        interrupt()
        thread.join()
