"""HTTP by hand: sockets on which a test says exactly which bytes go out, and answers as they come."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from forebay.network.pki.identity import Identity
from forebay.network.server import Server
from support.calibration import scaled, stood_still_s


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Waits for a condition; fails the test if it does not come about."""
    began, limit_s = time.monotonic(), scaled(timeout_s)
    while not condition():
        late_s = time.monotonic() - began - limit_s
        # Who waits may wake up first after the machine stood still.
        assert late_s < 0 or late_s < stood_still_s(began), "the condition did not come about"
        time.sleep(0.005)


def connect(server: Server, identity: Identity | None) -> socket.socket:
    """A connection whose handshake is finished; plain where there is no identity."""
    plain = socket.create_connection((server.host, server.port), 20)
    return plain if identity is None else identity.client_context().wrap_socket(plain)


@dataclass(frozen=True)
class Answer:
    """One response; the names of its headers in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body)


def read_answers(sock: socket.socket, num: int = 1) -> list[Answer]:
    """So many responses with a Content-Length; fewer if the connection ends before."""
    data, answers = b"", list[Answer]()
    while len(answers) < num:
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            first, *lines = data[:end].decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            length = int(headers.get("content-length", 0))
            if len(data) >= end + 4 + length:
                answers.append(Answer(int(first.split(" ", 2)[1]), headers, data[end + 4 : end + 4 + length]))
                data = data[end + 4 + length :]
                continue
        try:
            piece = sock.recv(65536)
        except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError):
            piece = b""
        if not piece:
            return answers
        data += piece
    return answers


def send_all(sock: socket.socket, data: bytes) -> bool:
    """Sends bytes; whether the other end took them all."""
    try:
        sock.sendall(data)
    except TimeoutError:
        raise
    except OSError:  # cut: a reset, or an end that TLS did not announce
        return False
    return True
