"""Members that attack: a valid certificate, and requests that no client of ours would send."""

import contextlib
import http.client
import json
import ssl
from pathlib import Path
from typing import Any

from forebay.network.peer import Scope
from forebay.network.pki.identity import Identity, create_organisation, join
from support.wire import Answer, connect, read_answers
from support.wire import request_bytes as request

HOST = "127.0.0.1"


def issue(
    network_dir: Path, name: str, *roles: str, by: Path | None = None, datasets: tuple[str, ...] = ()
) -> Identity:
    """A member with these roles, all if none are named; `by`: the organisation that admits it."""
    scope = Scope(frozenset(roles), datasets)
    return join(by or network_dir, network_dir.parent / "nodes" / name, name, scope=scope)


def organisation(network_dir: Path, name: str) -> Path:
    """The directory of an organisation, which may issue as many certificates as it likes."""
    create_organisation(network_dir, network_dir.parent / name, name)
    return network_dir.parent / name


def answers(sock: ssl.SSLSocket, *requests: bytes) -> list[Answer]:
    """The answers to requests sent one after another."""
    result = []
    for each in requests:
        sock.sendall(each)
        result += read_answers(sock)
    return result


def ask(member: Identity, address: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of one request on a connection of its own."""
    with connect(member, address) as sock:
        sock.sendall(request(method, path, body, **headers))
        answer = http.client.HTTPResponse(sock, method=method)
        answer.begin()
        data = answer.read()
    with contextlib.suppress(ValueError):
        return answer.status, json.loads(data)
    return answer.status, data
