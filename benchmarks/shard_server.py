"""Objects of a directory by `sendfile`, as fast as a socket takes them: `shard_server.py FOLDER BYTES_PER_S NICE`.

Prints its port. Answers GET and HEAD with one range, also as an S3 that checks no signature. 0 bytes/s: no limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

_PACED_STEP, _STEP = 256 << 10, 4 << 20
_DATE = b"Sat, 01 Jan 2022 00:00:00 GMT"


class Pace:
    """A rate that all connections share."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        self._until = 0.0

    def wait(self, num_bytes: int) -> None:
        """After so many bytes."""
        if not self.rate:
            return
        with self._lock:
            self._until = max(self._until, time.monotonic() - 0.01) + num_bytes / self.rate
            wait_s = self._until - time.monotonic()
        time.sleep(max(0.0, wait_s))


def serve(connection: socket.socket, folder: Path, pace: Pace) -> None:
    """One connection, to its end."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    rest = b""
    while True:
        while b"\r\n\r\n" not in rest:
            data = connection.recv(1 << 16)
            if not data:
                return
            rest += data
        head, _, rest = rest.partition(b"\r\n\r\n")
        path = folder / head.split(b" ")[1].decode().rpartition("/")[2].partition("?")[0]
        if not path.is_file():
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            continue
        size = path.stat().st_size
        match = re.search(rb"[Rr]ange: *bytes=(\d+)-(\d+)", head)
        start, stop = (int(match[1]), min(size, int(match[2]) + 1)) if match else (0, size)
        status = (
            b"206 Partial Content\r\nContent-Range: bytes %d-%d/%d" % (start, stop - 1, size) if match else b"200 OK"
        )
        head_format = b'HTTP/1.1 %s\r\nETag: "%x"\r\nLast-Modified: %s\r\nContent-Length: %d\r\n\r\n'
        connection.sendall(head_format % (status, size, _DATE, stop - start))
        if not head.startswith(b"HEAD"):
            _send(connection, path, start, stop, pace)


def _send(connection: socket.socket, path: Path, offset: int, stop: int, pace: Pace) -> None:
    with path.open("rb") as file:
        while offset < stop:
            step = min(stop - offset, _PACED_STEP if pace.rate else _STEP)
            sent = os.sendfile(connection.fileno(), file.fileno(), offset, step)
            pace.wait(sent)
            offset += sent


def main(folder: str, rate: str, nice: str) -> None:
    """Serve until killed."""
    os.nice(int(nice))
    pace = Pace(float(rate))

    def safely(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            serve(connection, Path(folder), pace)

    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            threading.Thread(target=safely, args=(listener.accept()[0],), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
