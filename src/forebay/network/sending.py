"""An answer onto its connection: the head and a short body at once, a file through one buffer a thread.

What the choice costs: a file is read into the buffer and encrypted from there, 16 KiB a TLS record; the kernel
cannot send it by itself, as the keys are in user space.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable

from forebay.network.exchange import FileRange, Response, error_response
from forebay.network.heads import status_line
from forebay.network.limits import Throttle
from forebay.network.parking import Connection
from forebay.network.peer import Peer

PIECE_BYTES = 256 << 10
log = logging.getLogger("forebay.network")


class Sender:
    """Sends answers for all threads of a server.

    Args:
        closing: Set when the server closes: nobody waits for a turn any longer.
        send_s: How long a client may take nothing.
    """

    def __init__(
        self,
        throttle: Throttle,
        closing: threading.Event,
        send_s: float,
        on_bytes: Callable[[Peer, int], None] | None,
    ) -> None:
        self.num_bytes = 0
        self._throttle = throttle
        self._closing = closing
        self._send_s = send_s
        self._on_bytes = on_bytes
        self._piece_bytes = throttle.piece_bytes(PIECE_BYTES)
        self._buffers = threading.local()
        self._lock = threading.Lock()

    def send(self, connection: Connection, response: Response, keep: bool) -> bool:
        """Send it; the connection is non-blocking before and after. Returns whether it can go on.

        Raises:
            OSError: If the client left or reads nothing.
        """
        sock, body = connection.socket, response.body
        sock.settimeout(self._send_s)
        if isinstance(body, bytes):
            _send_all(sock, memoryview(_lead(response, len(body), keep) + body))
            self._count(connection, len(body))
        else:
            try:
                descriptor = os.open(body.path, os.O_RDONLY)
            except OSError:
                log.exception("server: cannot open %s", body.path)
                lost = error_response(500, "unreadable", "the node cannot read this file; see its log")
                return self.send(connection, lost, keep)
            try:
                _send_all(sock, memoryview(_lead(response, body.stop - body.start, keep)))
                keep = self._send_file(connection, descriptor, body) and keep
            finally:
                os.close(descriptor)
        sock.settimeout(0.0)
        return keep

    def _send_file(self, connection: Connection, descriptor: int, body: FileRange) -> bool:
        buffer, at = self._buffer(), body.start
        assert connection.peer is not None
        payer = connection.peer.peer_id or connection.address
        while at < body.stop:
            # Read, not mapped: a file truncated under a mapping would kill the node by SIGBUS.
            count = os.preadv(descriptor, [buffer[: body.stop - at]], at)
            if count == 0:
                log.error("server: %s ends at %d of %d", body.path, at, body.stop)
                return False  # the length is promised: only a cut tells the peer
            self._throttle.pace(payer, count, sleep=self._closing.wait)
            _send_all(connection.socket, buffer[:count])
            at += count
            self._count(connection, count)
        return True

    def _buffer(self) -> memoryview:
        if not hasattr(self._buffers, "view"):
            self._buffers.view = memoryview(bytearray(self._piece_bytes))
        view: memoryview = self._buffers.view
        return view

    def _count(self, connection: Connection, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
        if self._on_bytes is not None and connection.peer is not None:
            self._on_bytes(connection.peer, num_bytes)


def _lead(response: Response, length: int, keep: bool) -> bytes:
    head = [status_line(response.status), f"Content-Type: {response.content_type}", f"Content-Length: {length}"]
    head += [f"{name}: {value}" for name, value in response.headers.items()]
    head += [] if keep else ["Connection: close"]
    return "\r\n".join([*head, "", ""]).encode("latin-1")


def _send_all(sock: socket.socket, data: memoryview) -> None:
    """All of it; the socket's time-out holds for each step, so that a slow reader is borne and a dead one is not."""
    while data:
        data = data[sock.send(data) :]
