"""Local slices brought into memory before they are used, by the known future and the kernel's own reading ahead.

Hides a thread that names slices to the kernel (`posix_fadvise`), so that a batch is gathered from the page cache and
not from the disk. It copies nothing and holds nothing: the pages are the kernel's, and go when memory is short.
Where the call is missing (macOS), it does nothing.
"""

import os
import queue
import threading
from collections.abc import Iterable
from pathlib import Path


class ReadAhead:
    """Names files to the kernel, one after the other, in a thread that begins with the first of them."""

    def __init__(self) -> None:
        self._paths: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def tell(self, paths: Iterable[Path]) -> None:
        """These will be read soon, in this order."""
        if not hasattr(os, "posix_fadvise"):
            return
        for path in paths:
            self._paths.put(path)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="forebay-readahead", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread, after the file that it is at."""
        thread, self._thread = self._thread, None
        if thread is not None:
            while not self._paths.empty():
                self._paths.get()
            self._paths.put(None)
            thread.join()

    def _run(self) -> None:
        while (path := self._paths.get()) is not None:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # Who reads it says why.
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
