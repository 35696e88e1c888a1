"""HTTP as bytes: requests that a test writes itself, and responses as they come."""

import socket
import ssl
from dataclasses import dataclass
from typing import Any

import orjson

from forebay.network.pki.identity import Identity
from forebay.storage.hosts import parse_address


def connect(member: Identity, address: str) -> ssl.SSLSocket:
    """A TLS connection of a member, its handshake finished."""
    return member.client_context().wrap_socket(socket.create_connection(parse_address(address)))


def request_bytes(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    """A request; a body that is not bytes is sent as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else orjson.dumps(body)
    defaults = {"Host": "x", "Content-Length": f"{len(data)}", "Content-Type": "application/json"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in {**defaults, **named}.items())]
    return "\r\n".join([*lines, "", ""]).encode() + data


@dataclass(frozen=True)
class Answer:
    """One response; the names of its headers in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def refusal(self) -> tuple[int, str]:
        """Its status, and the code of its error."""
        return self.status, self.json()["error"]


def parse_answers(data: bytes) -> tuple[list[Answer], bytes]:
    """The whole responses at the start of `data`, by their Content-Length, and the rest."""
    answers = []
    while (end := data.find(b"\r\n\r\n")) >= 0:
        first, *lines = data[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        stop = end + 4 + int(headers.get("content-length", 0))
        if len(data) < stop:
            break
        answers.append(Answer(int(first.split(" ", 2)[1]), headers, data[end + 4 : stop]))
        data = data[stop:]
    return answers, data


def read_answers(sock: socket.socket, num: int = 1) -> list[Answer]:
    """So many responses; fewer if the connection ends before."""
    answers, data = [], b""
    while len(answers) < num:
        try:
            piece = sock.recv(65536)
        except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError):
            piece = b""
        if not piece:
            break
        more, data = parse_answers(data + piece)
        answers += more
    return answers
