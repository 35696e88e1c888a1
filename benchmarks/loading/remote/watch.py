"""The bytes of a directory, watched from outside by a thread that lists it."""

from __future__ import annotations

import os
import threading
from pathlib import Path


class Watcher:
    """From `with` to its end; every hundredth of a second. `peak_bytes`: the most that its files had on the disk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            total = 0
            try:
                for item in os.scandir(self.directory):
                    try:
                        total += item.stat().st_blocks * 512 if item.is_file() else 0
                    except FileNotFoundError:
                        continue
            except FileNotFoundError:
                continue
            self.peak_bytes = max(self.peak_bytes, total)
