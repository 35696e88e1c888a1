"""A shard fetched and judged by a process of its own, of the lowest priority, so that training feels it least.

Threads beside the training loop would take turns with it at the interpreter's lock, 250 000 times a GB, and at the
processors. The process takes what training leaves; it ends when its parent does. Cost: its start, 0.4 s of a
processor, and 60 MB; shards below 64 MiB are not worth it and come in threads.

The two talk through a pipe of `multiprocessing`; its own way to start processes would run the user's program again.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError, UsageError
from forebay.load.shard_folder import Pair, ShardFolder
from forebay.storage.base import Timeouts
from forebay.storage.origins import open_origin
from forebay.storage.ranged_download import DownloadResult

LEAST_APART_BYTES = 64 << 20
_LOOK_S = 0.1
_END_S = 5.0


def open_folder(url: str, folder: Path, settings: dict[str, Any]) -> ShardFolder:
    """The shards of a URL in a directory; one and the same: they are used in place."""
    origin = open_origin(url, timeouts=Timeouts.within(settings["patience_s"]))
    return ShardFolder(None if Path(origin.url) == folder else origin, folder, **settings)


def obtain_apart(
    given: tuple[str, Path, dict[str, Any]],
    nice: int,
    index: int,
    *,
    stop: threading.Event,
    on_progress: Callable[[int, int], object],
) -> tuple[Pair, DownloadResult | None]:
    """As `obtain` of `open_folder(*given)`, by a process of priority `nice`. UsageError, too, if the process died.

    Credentials come from the environment, which the process inherits.
    """
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "forebay.load.shard_helper", str(theirs.fileno())],
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
        )  # fmt: skip
    with process, ours:
        try:
            ours.send((given, nice, index))
            while not stop.is_set():
                if not ours.poll(_LOOK_S):
                    continue
                kind, content = ours.recv()
                if kind == "progress":
                    on_progress(*content)
                elif kind == "log":
                    logger = logging.getLogger(content.name)
                    if logger.isEnabledFor(content.levelno):
                        logger.handle(content)
                else:
                    break
            else:
                raise UsageError(f"shard {index}: given up while it was fetched.")
        except (EOFError, ConnectionError):
            code = process.wait(_END_S)
            raise UsageError(
                f"shard {index}: the process that fetched it ended with code {code} before it was there. It is tried "
                "again; fetch='thread' does without such a process."
            ) from None
        finally:
            process.kill()  # What was fetched stays.
    if kind == "error":
        raise content
    found: tuple[Pair, DownloadResult | None] = content
    return found


def main(pipe: Connection) -> None:
    """Fetch one shard, as the pipe says."""
    lock = threading.Lock()

    def send(kind: str, content: Any) -> None:
        with lock:
            pipe.send((kind, content))

    given, nice, index = pipe.recv()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's
    with contextlib.suppress(OSError):
        os.nice(nice)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    handler = QueueHandler(None)  # type: ignore[arg-type]
    handler.enqueue = lambda record: send("log", record)  # type: ignore[method-assign]
    logging.getLogger("forebay").addHandler(handler)
    logging.getLogger("forebay").setLevel(logging.INFO)
    try:
        folder = open_folder(*given)
        found = folder.obtain(index, stop=threading.Event(), on_progress=lambda *sizes: send("progress", sizes))
    except ForebayError as error:
        return send("error", error)
    send("pair", found)


def _end_with_parent(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os._exit(0)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
