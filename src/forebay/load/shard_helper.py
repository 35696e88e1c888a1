"""A shard fetched and judged by a process of its own, of the lowest priority, so that training feels it least.

Threads beside the training loop would take turns with it at the interpreter's lock, 250 000 times a GB, and at the
processors. The process takes what training leaves; it ends when its parent does. Cost: its start, 0.4 s of a
processor, and 60 MB; shards below 64 MiB are not worth it and come in threads.

Its stdin: one line of JSON, then nothing until it shall end. Its stdout: lines of JSON, progress and then the end.
"""

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from forebay import errors
from forebay.errors import ForebayError, UsageError
from forebay.load.shard_check import SampleCheck
from forebay.store.large import Fetched
from forebay.store.origins import Patience, open_origin
from forebay.store.shards import Judge, Pair, ShardFolder

LEAST_APART_BYTES = 64 << 20
_LOOK_S = 0.1
_END_S = 5.0
log = logging.getLogger("forebay.load")


@dataclass(frozen=True)
class Helper:
    """How to fetch shards in a process of its own.

    Attributes:
        url: Where they are; credentials come from the environment, which the process inherits.
        settings: Of ShardFolder, by name, as JSON takes them.
        nice: Its priority, 0 to 19.
    """

    url: str
    folder: Path
    sequence_length: int
    kind: str
    settings: dict[str, Any]
    nice: int = 19

    def obtain(
        self,
        index: int,
        *,
        stop: threading.Event,
        on_progress: Callable[[int, int], object] | None = None,
        on_judge: Callable[[Judge], object] | None = None,
    ) -> tuple[Pair, Fetched | None]:
        """As of ShardFolder, without a judge to look at. UsageError, too, if the process died."""
        del on_judge
        told = {
            "index": index, "url": self.url, "folder": str(self.folder), "sequence_length": self.sequence_length,
            "kind": self.kind, "settings": self.settings, "nice": self.nice,
        }  # fmt: skip
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "forebay.load.shard_helper"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
        ) as process:  # fmt: skip
            try:
                with contextlib.suppress(BrokenPipeError):
                    assert process.stdin is not None
                    process.stdin.write(json.dumps(told).encode() + b"\n")
                    process.stdin.flush()
                return _follow(process, index, stop, on_progress)
            finally:
                process.kill()  # What was fetched stays.


def _follow(
    process: subprocess.Popen[bytes],
    index: int,
    stop: threading.Event,
    on_progress: Callable[[int, int], object] | None,
) -> tuple[Pair, Fetched | None]:
    for line in _lines(process, stop):
        if "received" in line and on_progress is not None:
            on_progress(line["received"], line["total"])
        elif "log" in line:
            log.log(line["log"], "%s", line["text"])
        elif "error" in line:
            kind: Any = getattr(errors, line["error"], UsageError)
            if not (isinstance(kind, type) and issubclass(kind, ForebayError)):
                kind = UsageError
            raise kind(line["text"])
        elif "pair" in line:
            tokens, ids, num_bytes = line["pair"]
            got = line["fetched"]
            fetched = None if got is None else Fetched(Path(got[0]), *got[1:])
            return Pair(index, Path(tokens), Path(ids), num_bytes), fetched
    if stop.is_set():
        raise UsageError(f"shard {index}: given up while it was fetched.")
    code = process.wait(_END_S)
    raise UsageError(
        f"shard {index}: the process that fetched it ended with code {code} before it was there. It is tried again; "
        "fetch='thread' does without such a process."
    )


def _lines(process: subprocess.Popen[bytes], stop: threading.Event) -> Any:
    """What it says, until it ends or `stop` is set."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not stop.is_set():
            if not selector.select(_LOOK_S):
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                return
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield json.loads(line)


class _Tell(logging.Handler):
    """Log records as lines to the parent."""

    def __init__(self, say: Callable[..., None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(log=record.levelno, text=record.getMessage())


def main(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    """Fetch one shard, as the line says."""
    lock = threading.Lock()

    def say(**what: Any) -> None:
        with lock:
            stdout.write(json.dumps(what).encode() + b"\n")
            stdout.flush()

    told = json.loads(stdin.readline())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's
    with contextlib.suppress(OSError):
        os.nice(told["nice"])
    threading.Thread(target=_end_with_parent, args=(stdin,), daemon=True).start()
    logging.getLogger("forebay").addHandler(_Tell(say))
    kind = np.dtype(told["kind"]) if told["kind"] else None
    settings = told["settings"]
    try:
        folder = ShardFolder(
            open_origin(told["url"], patience=Patience.within(settings["patience_s"])),
            Path(told["folder"]),
            lambda index, ids, size: SampleCheck(index, ids, size, told["sequence_length"], kind),
            **{**settings, "tmp_dir": Path(settings["tmp_dir"]) if settings["tmp_dir"] else None},
        )
        pair, got = folder.obtain(
            told["index"],
            stop=threading.Event(),
            on_progress=lambda received, total: say(received=received, total=total),
        )
    except ForebayError as error:
        return say(error=type(error).__name__, text=str(error))
    fetched = got and [str(got.path), got.num_bytes, got.bytes_fetched, got.etag, got.seconds, got.retries]
    say(pair=[str(pair.tokens), str(pair.ids), pair.num_bytes], fetched=fetched)


def _end_with_parent(stdin: IO[bytes]) -> None:
    stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
