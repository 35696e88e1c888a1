"""Items of a generator, made by the caller, or ahead of it by a thread while the caller is busy.

The thread makes items only when the caller has not asked for `_BUSY_S`. A caller that asks again at once makes each
item itself, and no item is handed from thread to thread: prefetching is then as fast as none.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

_BUSY_S = 1e-3
_MAX_DELAY_S = 8e-3
_T = TypeVar("_T")


class _End:
    """The end of the items, with the error that ended them."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetcher(Generic[_T]):
    """The items of `source`, each changed by `convert`, in order. For one caller.

    Args:
        source: Closed by `close`.
        depth: Items made ahead at most; 0 starts no thread.
        convert: Applied to each item where it is made.
        interrupt: Wakes up a waiting `source` for `close`.
    """

    def __init__(
        self, source: Generator[Any, None, None], depth: int, convert: Callable[[Any], _T],
        interrupt: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._source, self._depth, self._convert, self._interrupt = source, depth, convert, interrupt
        self.convert_s = 0.0  # In `convert`, by the caller and the thread.
        self._ready: deque[_T | _End] = deque()
        self._making = threading.RLock()
        self._calls = 0  # Odd while the caller waits.
        self._returned_at = 0.0
        self._is_full = False
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        item = self._take() if self._depth else self._make()
        if self._stop.is_set():  # Closed meanwhile: what was made of it may lack chunks.
            raise StopIteration
        if isinstance(item, _End):
            raise StopIteration if item.error is None else item.error
        return item

    def close(self) -> None:
        """End the thread, close the source and drop the items that were not taken. May be repeated."""
        self._stop.set()
        self._wake.set()
        self._interrupt()
        if self._thread is not None:
            self._thread.join()
        with self._making:  # Another thread may ask for an item; it gets none.
            self._source.close()
        self._ready.clear()

    def _take(self) -> _T | _End:
        self._calls += 1
        if self._ready:
            item = self._ready.popleft()
        else:
            with self._making:
                item = self._ready.popleft() if self._ready else self._make()
        self._calls += 1
        self._returned_at = time.perf_counter()
        if self._is_full:
            self._wake.set()
        elif self._thread is None and not isinstance(item, _End):
            self._thread = threading.Thread(target=self._run, name="forebay-loader", daemon=True)
            self._thread.start()
        return item

    def _make(self) -> _T | _End:
        try:
            with self._making:
                item = next(self._source, None)
            if item is None:
                return _End(None)
            started_at = time.perf_counter()
            converted = self._convert(item)
            self.convert_s += time.perf_counter() - started_at
            return converted
        except BaseException as error:  # noqa: BLE001  It is raised in the caller's thread.
            return _End(error)

    def _run(self) -> None:
        delay_s = _BUSY_S
        while not self._stop.is_set():
            self._is_full = True
            if len(self._ready) >= self._depth:
                self._wake.wait()
                delay_s = _BUSY_S
            self._wake.clear()
            self._is_full = False
            time.sleep(delay_s)
            calls = self._calls
            if calls % 2 or time.perf_counter() - self._returned_at < _BUSY_S:
                delay_s = min(2 * delay_s, _MAX_DELAY_S)  # Looking costs the caller time, too.
                continue
            while len(self._ready) < self._depth and calls == self._calls and not self._stop.is_set():
                with self._making:
                    item = self._make()
                    self._ready.append(item)
                if isinstance(item, _End):
                    return
                del item
