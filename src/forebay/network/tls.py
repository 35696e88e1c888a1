"""An asyncio transport over a non-blocking `ssl.SSLSocket`, or a plain socket.

asyncio's own TLS transport keeps two memory BIOs and a 256 KiB buffer a connection, and copies what is sent twice: for
10,000 connections that rest it takes 3 GB, this one some 300 MB, and a gigabyte sent costs a fifth less CPU here.
It does what uvicorn's protocol needs and no more: no start_tls, no half-closed connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Any

READ_BYTES = 64 << 10
CLOSE_S = 2.0  # how long a client that gets its last answer may go on sending, and how much
MAX_DISCARDED_BYTES = 4 << 20
_WAIT = (ssl.SSLWantReadError, BlockingIOError)


async def handshake(loop: asyncio.AbstractEventLoop, sock: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """TLS on an accepted, non-blocking socket; the plain socket is given up to the result. OSError if it fails."""
    tls = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    try:
        while True:
            ready = loop.create_future()
            try:
                tls.do_handshake()
                return tls
            except ssl.SSLWantReadError:
                loop.add_reader(tls.fileno(), _wake, ready)
            except ssl.SSLWantWriteError:
                loop.add_writer(tls.fileno(), _wake, ready)
            try:
                await ready
            finally:
                loop.remove_reader(tls.fileno())
                loop.remove_writer(tls.fileno())
    except BaseException:
        tls.close()
        raise


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class SocketTransport(asyncio.Transport):
    """The bytes of one connection; begins to read at once."""

    __slots__ = (
        "_closed", "_closing", "_discarded", "_fileno", "_loop", "_paused", "_protocol", "_queue", "_queued",
        "_reading", "_sock",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, protocol: Any) -> None:
        self._loop = loop
        self._sock = sock
        # A socket as a key of the selector costs its repr() at each look-up that fails.
        self._fileno = sock.fileno()
        self._protocol = protocol
        self._queue: list[memoryview] = []
        self._queued = self._discarded = 0
        self._reading = self._paused = self._closing = self._closed = False
        protocol.connection_made(self)
        self.resume_reading()
        # What came in with the end of the handshake is in the TLS layer's buffer: the selector does not tell of it.
        loop.call_soon(self._read)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """The socket, its two addresses, and as "ssl_object" the TLS socket."""
        match name:
            case "socket":
                return self._sock
            case "ssl_object":
                return self._sock if isinstance(self._sock, ssl.SSLSocket) else default
            case "sslcontext":
                return self._sock.context if isinstance(self._sock, ssl.SSLSocket) else default
            case "peername" | "sockname":
                with contextlib.suppress(OSError):  # it has ended
                    return self._sock.getpeername() if name == "peername" else self._sock.getsockname()
        return default

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fileno)

    def resume_reading(self) -> None:
        if not self._reading and not self._closing:
            self._reading = True
            self._loop.add_reader(self._fileno, self._read)
            if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
                self._loop.call_soon(self._read)

    def get_write_buffer_size(self) -> int:
        return self._queued

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send now what the socket takes, the rest when it can."""
        if self._closing or not data:
            return
        rest = memoryview(data)
        if not self._queue:
            rest = rest[self._send(rest) :]
            if not rest or self._closed:
                return
            self._loop.add_writer(self._fileno, self._write_more)
        self._queue.append(rest)
        self._queued += len(rest)
        if not self._paused:  # until all of it has gone out: whose buffer it is may then use it again
            self._paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        """End it once what is queued has gone out."""
        if not self._closing:
            self._closing = True
            if self._reading:
                self._reading = False
                self._loop.remove_reader(self._fileno)
            if not self._queue:
                self._finish()

    def abort(self) -> None:
        self._end(None)

    def _read(self) -> None:
        if not self._reading:
            return
        try:
            for _ in range(4):  # then others have their turn
                data = self._sock.recv(READ_BYTES)
                if not data:
                    self._end(None)
                    return
                self._protocol.data_received(data)
                if not self._reading:
                    return
        except _WAIT:
            return
        except ssl.SSLWantWriteError:
            return  # TLS 1.3 without renegotiation: only while sending, which goes on by itself
        except OSError as error:
            self._end(error)
            return
        self._loop.call_soon(self._read)

    def _send(self, data: memoryview) -> int:
        """How many bytes the socket took."""
        sent = 0
        try:
            while sent < len(data):
                sent += self._sock.send(data[sent:])
        except (*_WAIT, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            self._end(error)
        return sent

    def _write_more(self) -> None:
        while self._queue and not self._closed:
            sent = self._send(self._queue[0])
            self._queued -= sent
            if sent < len(self._queue[0]):
                self._queue[0] = self._queue[0][sent:]
                break
            self._queue.pop(0)
        if self._closed:
            return
        if not self._queue:
            self._loop.remove_writer(self._fileno)
            if self._closing:
                self._finish()
                return
        if self._paused and not self._queue:
            self._paused = False
            self._protocol.resume_writing()

    def _finish(self) -> None:
        """Half-close, and read on for a while: closing on unread bytes would reset what was sent last."""
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
            self._loop.add_reader(self._fileno, self._discard)
        except OSError as error:
            self._end(error)
            return
        self._loop.call_later(CLOSE_S, self._end, None)

    def _discard(self) -> None:
        try:
            for _ in range(4):  # then others have their turn
                num_bytes = len(socket.socket.recv(self._sock, READ_BYTES))
                self._discarded += num_bytes
                if not num_bytes or self._discarded > MAX_DISCARDED_BYTES:
                    break
            else:
                return
        except _WAIT:
            return
        except OSError:
            pass
        self._end(None)

    def _end(self, error: OSError | None) -> None:
        if self._closed:
            return
        self._closed = self._closing = True
        self._reading = False
        self._loop.remove_reader(self._fileno)
        self._loop.remove_writer(self._fileno)
        self._queue.clear()
        self._sock.close()
        self._loop.call_soon(self._protocol.connection_lost, error)
