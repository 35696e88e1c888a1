"""Fetches and verifies a shard in a process of the lowest priority, so that training is not slowed down.

Threads beside the training loop would compete with it for the interpreter's lock, 250 000 times a GB, and for the
processors. The process ends when its parent does. Cost: 0.4 s of a processor to start, and 60 MB; shards below 64 MiB
are fetched in threads. It is not started by `multiprocessing`, which would run the user's program again.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError, UsageError
from forebay.load.shard_folder import Progress, ShardFiles, ShardFolder
from forebay.storage.base import Timeouts
from forebay.storage.origins import open_origin
from forebay.storage.ranged_download import DownloadResult

MIN_PROCESS_BYTES = 64 << 20
_PRIORITY = 19
_POLL_S = 0.1
_EXIT_S = 5.0


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
            [sys.executable, "-P", "-m", "forebay.load.shard_helper", str(theirs.fileno())],
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
        )  # fmt: skip
    with process, ours:
        try:
            ours.send((folder, index))
            while not stop.is_set():
                if not ours.poll(_POLL_S):
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
                raise UsageError(f"shard {index}: cancelled while it was fetched.")
        except (EOFError, ConnectionError):
            code = process.wait(_EXIT_S)
            raise UsageError(
                f"shard {index}: the process that fetched it ended with code {code} before it was complete. It is "
                "retried; fetch='thread' needs no process."
            ) from None
        finally:
            process.kill()  # Partial files stay.
    if kind == "error":
        raise content
    files: tuple[ShardFiles, DownloadResult | None] = content
    return files


def main(pipe: Connection) -> None:
    """Fetch the shard that the pipe names, and send progress, log records and the result."""
    lock = threading.Lock()

    def send(kind: str, content: Any) -> None:
        with lock:
            pipe.send((kind, content))

    folder, index = pipe.recv()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles it.
    with contextlib.suppress(OSError):
        os.nice(_PRIORITY)
    threading.Thread(target=_exit_with_parent, args=(pipe,), daemon=True).start()
    handler = QueueHandler(None)  # type: ignore[arg-type]
    handler.enqueue = lambda record: send("log", record)  # type: ignore[method-assign]
    logging.getLogger("forebay").addHandler(handler)
    logging.getLogger("forebay").setLevel(logging.INFO)
    try:
        files = open_folder(*folder).obtain(
            index, stop=threading.Event(), on_progress=lambda *sizes: send("progress", sizes)
        )
    except ForebayError as error:
        return send("error", error)
    send("files", files)


def _exit_with_parent(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os._exit(0)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
