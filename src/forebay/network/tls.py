"""An asyncio transport over a non-blocking `ssl.SSLSocket`, or a plain socket.

asyncio's TLS transport has two memory BIOs and a 256 KiB buffer per connection, and copies sent data twice: for 10,000
idle connections it takes 3 GB, this one some 300 MB, and a gigabyte sent costs a fifth less CPU here. It implements
only what uvicorn's protocol needs: no start_tls, no half-closed connections.
"""

import asyncio
import socket
import ssl
from typing import Any

READ_BYTES = 64 << 10
CLOSE_S = 2.0  # for a client to go on sending after its last response, and up to MAX_DISCARDED_BYTES
MAX_DISCARDED_BYTES = 4 << 20
_WAIT = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError)


async def handshake(loop: asyncio.AbstractEventLoop, sock: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """TLS handshake on an accepted, non-blocking socket, which the result replaces. Raises OSError."""
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
    """Transport of one connection; starts reading at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, protocol: Any) -> None:
        self._loop = loop
        self._sock = sock
        # With a socket as key the selector would format its repr() at each failed look-up.
        self._fileno = sock.fileno()
        self._protocol = protocol
        self._queue: list[memoryview] = []
        self._discarded = 0
        self._reading = self._closing = self._closed = False
        protocol.connection_made(self)
        self.resume_reading()
        # Data that came with the end of the handshake is in the TLS layer's buffer, which the selector does not see.
        loop.call_soon(self._read)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """The "socket"; where it speaks TLS also as "ssl_object", and its "sslcontext"."""
        tls = self._sock if isinstance(self._sock, ssl.SSLSocket) else None
        return {"socket": self._sock, "ssl_object": tls, "sslcontext": tls and tls.context}.get(name, default)

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

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send what the socket accepts now, the rest later."""
        if self._closing or not data:
            return
        rest = memoryview(data)
        if not self._queue:
            rest = rest[self._send(rest) :]
            if not rest or self._closed:
                return
            self._loop.add_writer(self._fileno, self._write_more)
            self._protocol.pause_writing()  # until all is sent: the caller may then reuse its buffer
        self._queue.append(rest)

    def close(self) -> None:
        """Close after the queued data is sent."""
        if not self._closing:
            self._closing = True
            self.pause_reading()
            if not self._queue:
                self._finish()

    def abort(self) -> None:
        self._end()

    def _read(self) -> None:
        if not self._reading:
            return
        try:
            for _ in range(4):  # then other connections take their turn
                data = self._sock.recv(READ_BYTES)
                if not data:
                    self._end()
                    return
                self._protocol.data_received(data)
                if not self._reading:
                    return
        except _WAIT:  # to write only while sending, which continues by itself
            return
        except OSError as error:
            self._end(error)
            return
        self._loop.call_soon(self._read)

    def _send(self, data: memoryview) -> int:
        """Number of bytes that the socket accepted."""
        sent = 0
        try:
            while sent < len(data):
                sent += self._sock.send(data[sent:])
        except _WAIT:
            pass
        except OSError as error:
            self._end(error)
        return sent

    def _write_more(self) -> None:
        while self._queue and not self._closed:
            sent = self._send(self._queue[0])
            if sent < len(self._queue[0]):
                self._queue[0] = self._queue[0][sent:]
                break
            self._queue.pop(0)
        if self._closed or self._queue:
            return
        self._loop.remove_writer(self._fileno)
        if self._closing:
            self._finish()
        else:
            self._protocol.resume_writing()

    def _finish(self) -> None:
        """Half-close and discard input for a while: closing with unread bytes would reset the connection."""
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
            self._loop.add_reader(self._fileno, self._discard)
        except OSError as error:
            self._end(error)
            return
        self._loop.call_later(CLOSE_S, self._end)

    def _discard(self) -> None:
        try:
            for _ in range(4):  # then other connections take their turn
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
        self._end()

    def _end(self, error: OSError | None = None) -> None:
        if self._closed:
            return
        self._closed = self._closing = True
        self._reading = False
        self._loop.remove_reader(self._fileno)
        self._loop.remove_writer(self._fileno)
        self._queue.clear()
        self._sock.close()
        self._loop.call_soon(self._protocol.connection_lost, error)
