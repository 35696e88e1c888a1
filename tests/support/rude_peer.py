"""A member of a network that answers as a test tells it to: any bytes, at any moment, or none."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from forebay.network.pki.identity import Identity


@dataclass(frozen=True)
class Asked:
    """A request as received."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""
    certificate: bytes = b""  # of its sender, DER


Answer = Callable[[Asked], "bytes | Iterable[bytes] | None"]


def http(status: int, body: bytes | object = b"", **headers: str) -> bytes:
    """An answer as bytes; an object is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


class RudePeer:
    """Listens from `with` to its end.

    Attributes:
        asked: Each request, in order.
        connections: How many were accepted.

    Args:
        identity: None: plain HTTP.
        answer: Returns the bytes to send for a request, at once or in pieces; None closes the connection. They may be
            cut short or be no HTTP: the connection is closed after an answer that `is_last` says to be the last.
    """

    def __init__(
        self, identity: Identity | None, answer: Answer, is_last: Callable[[Asked], bool] = lambda asked: False
    ) -> None:
        self.identity = identity
        self.asked = []
        self.connections = 0
        self._answer, self._is_last = answer, is_last
        self._context = None if identity is None else identity.server_context()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._open = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> RudePeer:
        self._threads[0].start()
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """Close all connections that are open now."""
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self):
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(plain,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, plain):
        with contextlib.suppress(OSError, ValueError), plain:
            sock = plain if self._context is None else self._context.wrap_socket(plain, server_side=True)
            with self._lock:
                self._open.add(sock)
            try:
                with sock, sock.makefile("rb") as reader:
                    der = b"" if self._context is None else sock.getpeercert(binary_form=True)
                    while (asked := _read(reader, der)) is not None:
                        self.asked.append(asked)
                        data = self._answer(asked)
                        if data is None:
                            return
                        for piece in [data] if isinstance(data, bytes) else data:
                            sock.sendall(piece)
                        if self._is_last(asked):
                            return
            finally:
                with self._lock:
                    self._open.discard(sock)


def _read(reader, certificate):
    first = reader.readline().decode("latin-1").split()
    if len(first) != 3:
        return None
    headers = {}
    while line := reader.readline().decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return Asked(first[0], first[1], headers, reader.read(int(headers.get("content-length", "0"))), certificate)
