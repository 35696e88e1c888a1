"""A generator run ahead by a thread of its own."""

import queue
import threading
from collections.abc import Callable, Generator
from typing import TypeVar

_STOP_POLL_S = 0.05
_T = TypeVar("_T")


def run_ahead(
    source: Generator[_T, None, None], depth: int, interrupt: Callable[[], object] = lambda: None
) -> Generator[_T, None, None]:
    """What `source` yields, made by a thread at most `depth` items ahead; what it raises is raised here.

    Closing ends the thread and closes `source`; what was made and not taken is dropped. `interrupt` is called when
    closing, so that a `source` that waits for something wakes up (by an error, say).
    """
    made: queue.Queue[tuple[_T] | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: tuple[_T] | BaseException | None) -> None:
        while not stop.is_set():
            try:
                return made.put(item, timeout=_STOP_POLL_S)
            except queue.Full:
                continue

    def make() -> None:
        try:
            for item in source:
                put((item,))
                if stop.is_set():
                    return
                del item
            put(None)
        except BaseException as error:  # noqa: BLE001  The caller's thread raises it.
            put(error)
        finally:
            source.close()

    thread = threading.Thread(target=make, name="forebay-loader", daemon=True)
    thread.start()
    try:
        while (item := made.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
            del item
    finally:
        stop.set()
        interrupt()
        thread.join()
