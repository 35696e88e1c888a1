"""The samples of one shard, and its download in a thread, retried until it is complete.

While training runs, a large shard is fetched and verified in a process of the lowest priority: threads beside the
training loop would compete with it for the interpreter's lock, 250 000 times a GB, and for the processors. The process
is not started by `multiprocessing`, which would run the user's program again. Cost: 0.4 s of a processor to start, and
60 MB.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import DatasetError, ForebayError, IntegrityError, UsageError
from forebay.formats.external import map_file
from forebay.formats.vectors import vector_in
from forebay.load.shard_folder import ShardFiles, ShardFolder, read_ids
from forebay.processes import end_with_parent
from forebay.storage.base import Timeouts
from forebay.storage.locks import Lock
from forebay.storage.origins import open_origin
from forebay.storage.ranged_download import DownloadResult, Progress

MIN_PROCESS_BYTES = 64 << 20  # Smaller shards are fetched in threads.
_FIRST_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_LOG_EVERY_S = 10.0
_FINAL = (DatasetError, IntegrityError)  # Errors that do not go away.
log = logging.getLogger("forebay.load")


class ShardDataset:
    """The samples of one shard, all verified by their ids.

    Attributes:
        index: Of the shard.
        sample_ids: U64 [N], a view of the mapped file.
    """

    def __init__(self, files: ShardFiles, seq_len: int, lock: Lock) -> None:
        self.index = files.index
        self._lock = lock
        self.sample_ids = read_ids(files.ids)
        memory = map_file(files.tokens)
        is_wide = len(memory) // (len(self) * seq_len) != 2
        vector = vector_in(files.tokens, len(memory), "<u4" if is_wide else "<u2")
        self._samples: NDArray[Any] | None = memory[vector.offset :].view(vector.kind).reshape(-1, seq_len)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int | NDArray[np.int64]) -> NDArray[Any]:
        """Tokens of a sample, U16 or U32 [L], a read-only view; or of samples [B], a copy [B, L]."""
        if self._samples is None:
            raise UsageError(f"shard {self.index}: it is closed. Read it before the next shard is active.")
        samples: NDArray[Any] = self._samples[index]
        return samples

    def close(self) -> None:
        """Unmap the files, so that they can be removed. A view of them keeps its disk space. May be called twice."""
        self._samples = None
        self.sample_ids = np.empty(0, np.uint64)
        self._lock.release()


class ShardDownload:
    """The download of one shard, in a thread, by `obtain` (see `ShardFolder.obtain`).

    `lock` keeps the shard from being removed; it is released by `stop`, or belongs to the opened dataset.
    """

    def __init__(self, index: int, lock: Lock, obtain: Callable[..., ShardFiles]) -> None:
        self.index = index
        self.files: ShardFiles | None = None  # Set when it is complete.
        self.error: ForebayError | None = None  # Of the last attempt, if it failed.
        self.received = self.total = 0  # Bytes of the tokens.
        self._obtain = obtain
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._lock: Lock | None = lock
        self._thread = threading.Thread(target=self._run, name=f"shard-{index}", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> float:
        """Wait until the shard is complete; returns how long, in seconds.

        Raises:
            ForebayError: Of the last attempt, if it is final, or after `timeout_s`.
        """
        started_at = logged_at = time.monotonic()
        with self._changed:
            while self.files is None:
                waited_s = time.monotonic() - started_at
                if self._stop.is_set():
                    raise UsageError(f"shard {self.index}: its download was cancelled. Request it again.")
                if self.error is not None and (isinstance(self.error, _FINAL) or waited_s >= timeout_s):
                    raise self.error
                self._changed.wait(0.5)
                if time.monotonic() - logged_at >= _LOG_EVERY_S:
                    logged_at = time.monotonic()
                    log.warning(
                        "training waits for shard %d since %.1f s: %d of %s bytes received%s", self.index,
                        logged_at - started_at, self.received, self.total or "unknown",
                        "" if self.error is None else f"; the last attempt failed: {self.error}",
                    )  # fmt: skip
        return time.monotonic() - started_at

    def open(self, seq_len: int) -> ShardDataset:
        """The samples, after `wait`. The lock then belongs to the dataset."""
        with self._changed:
            assert self._lock is not None and self.files is not None
            lock, self._lock = self._lock, None
            return ShardDataset(self.files, seq_len, lock)

    def stop(self) -> None:
        """Cancel the download; partial files stay. May be called twice."""
        self._stop.set()
        self._thread.join(5.0)
        with self._changed:
            if self._lock is not None:
                self._lock.release()
            self._changed.notify_all()

    def _run(self) -> None:
        pause_s = _FIRST_RETRY_S
        while not self._stop.is_set():
            try:
                self.files, self.error = self._obtain(self.index, stop=self._stop, on_progress=self._progress), None
            except ForebayError as error:
                self.error = error
            except Exception as error:  # noqa: BLE001 - `wait` raises it
                self.error = DatasetError(f"shard {self.index}: {type(error).__name__}: {error}")
            with self._changed:
                self._changed.notify_all()
            if self.files is not None or isinstance(self.error, _FINAL) or self._stop.is_set():
                return
            log.warning("download of shard %d failed, retrying in %.0f s: %s", self.index, pause_s, self.error)
            self._stop.wait(pause_s)
            pause_s = min(_MAX_RETRY_S, 2 * pause_s)

    def _progress(self, received: int, total: int) -> None:
        self.received, self.total = received, total


def open_folder(url: str, folder: Path, settings: dict[str, Any]) -> ShardFolder:
    """The shards of a URL, in a local directory; if both are the same, they are used in place."""
    origin = open_origin(url, timeouts=Timeouts.within(settings["timeout_s"]))
    return ShardFolder(None if Path(origin.url) == folder else origin, folder, **settings)


def obtain_in_process(
    folder: tuple[str, Path, dict[str, Any]], index: int, *, stop: threading.Event, on_progress: Progress
) -> tuple[ShardFiles, DownloadResult | None]:
    """`obtain` of `open_folder(*folder)`, in a process. Raises UsageError, too, if the process dies.

    Credentials are in the environment, which the process inherits.
    """
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "forebay.load.shard_download", str(theirs.fileno())],
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
        )  # fmt: skip
    with process, ours:
        try:
            ours.send((folder, index))
            while not stop.is_set():
                if not ours.poll(0.1):
                    continue
                kind, content = ours.recv()
                if kind == "error":
                    raise content
                if kind == "files":
                    files: tuple[ShardFiles, DownloadResult | None] = content
                    return files
                on_progress(*content)
        except (EOFError, ConnectionError):
            raise UsageError(
                f"shard {index}: the process that fetched it ended with code {process.wait(5.0)} before it was "
                "complete. It is retried."
            ) from None
        finally:
            process.kill()  # Partial files stay.
    raise UsageError(f"shard {index}: cancelled while it was fetched.")


def main(pipe: Connection) -> None:
    """Fetch the shard that the pipe names, and send progress and the result. Ends with its parent."""
    folder, index = pipe.recv()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles it.
    end_with_parent()  # Else it ends when it cannot send.
    os.nice(19)
    try:
        files = open_folder(*folder).obtain(
            index, stop=threading.Event(), on_progress=lambda *sizes: pipe.send(("progress", sizes))
        )
    except ForebayError as error:
        return pipe.send(("error", error))
    pipe.send(("files", files))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
