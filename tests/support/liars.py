"""Hostile peers as real servers: a certificate of the network, a true list of claims, and a lie where it counts.

    with Liar(identity, dataset, "endless", about="slices") as liar: …     liar.address, liar.asked

A lie gets the socket, under TLS, and what an honest node would have answered: the bytes [start, stop) of the body.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from forebay.dataset.reader import Dataset
from forebay.network.discovery import Claim
from forebay.network.pki.identity import Identity

Lie = Callable[[ssl.SSLSocket, bytes, int, int, int], None]
LIES: dict[str, Lie] = {}
END = threading.Event()  # set, it ends every lie that would last


def lie(notify: Lie) -> Lie:
    LIES[notify.__name__] = notify
    return notify


def head(length: object, start: int, stop: int, total: int, *more: str, status: str = "") -> bytes:
    """An honest head: 206 and a range where one was asked for, else 200."""
    ranged = total >= 0
    lines = [f"HTTP/1.1 {status or ('206 Partial Content' if ranged else '200 OK')}", f"Content-Length: {length}"]
    lines += [f"Content-Range: bytes {start}-{stop - 1}/{total}"] if ranged else []
    return "\r\n".join([*lines, *more, "", ""]).encode("latin-1")


def honest(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    tls.sendall(head(len(body), start, stop, total) + body)


@lie
def wrong_bytes(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    tls.sendall(head(len(body), start, stop, total) + bytes([body[0] ^ 1]) + body[1:])


@lie
def endless(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    """Bytes without an end, behind a head that names the right number."""
    tls.sendall(head(len(body), start, stop, total) + body[:-1] + b"\xff")
    for _ in range(64):
        tls.sendall(bytes(1 << 16))


@lie
def huge(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    """A length of a petabyte, and bytes to go with it."""
    tls.sendall(head(10**15, start, stop, total))
    for _ in range(64):
        tls.sendall(bytes(1 << 16))


@lie
def silent(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    END.wait(30.0)


@lie
def stall(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    tls.sendall(head(len(body), start, stop, total) + body[: len(body) // 2])
    END.wait(30.0)


@lie
def drip(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    tls.sendall(head(len(body), start, stop, total))
    for byte in body:
        tls.sendall(bytes([byte]))
        if END.wait(0.05):
            return


@lie
def drip_head(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    for byte in head(len(body), start, stop, total):
        tls.sendall(bytes([byte]))
        if END.wait(0.1):
            return


@lie
def wrong_range(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    """The right bytes, said to be others."""
    tls.sendall(head(len(body), start + 1, stop + 1, max(total, 0), status="206 Partial Content") + body)


@lie
def truncated(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    tls.sendall(head(len(body), start, stop, total) + body[: len(body) // 2])


@lie
def short_length(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    tls.sendall(head(len(body) // 2, start, stop, total) + body)


@lie
def negative_length(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    tls.sendall(head(-1, start, stop, total) + body)


@lie
def two_lengths(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    tls.sendall(head(len(body), start, stop, total, "Content-Length: 1") + body)


@lie
def chunked(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    tls.sendall(
        head(len(body), start, stop, total, "Transfer-Encoding: chunked") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    )


@lie
def giant_head(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    tls.sendall(b"HTTP/1.1 206 x\r\n")
    for _ in range(64):
        tls.sendall(b"X-Filler: " + b"y" * (1 << 16))


@lie
def redirect(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    tls.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/elsewhere\r\nContent-Length: 0\r\n\r\n")


@lie
def garbage(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    tls.sendall(bytes(range(256)) * 8 + b"\r\n\r\n")


@lie
def hang_up(tls: ssl.SSLSocket, body: bytes, start: int, stop: int, total: int) -> None:
    """Nothing at all."""


class Liar:
    """A server of the network that lies about one kind of path; a context manager.

    Args:
        tell: The lie's name in LIES, or "honest".
        about: "slices", "datasets" (manifest and table) or "claims".
        claims: What stands in its claims instead of the truth.
    """

    def __init__(
        self, identity: Identity, dataset: Dataset, notify: str, about: str = "slices", claims: Any = None
    ) -> None:
        self.identity = identity
        self.dataset = dataset
        self.about = about
        self.asked = 0
        self.told: list[tuple[str, int]] = []  # Of each lie the name of who asked, and the bytes asked for.
        self._tell = LIES.get(notify, honest)
        self._claims = claims
        self._slices = {dataset.table.row(i).sha256: dataset.slice_path(i) for i in range(dataset.num_slices)}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._context = identity.server_context()
        self.port = int(self._listener.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> Liar:
        END.clear()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        END.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        # Who is lied to may hang up at any moment.
        with contextlib.suppress(OSError), self._context.wrap_socket(plain, server_side=True) as tls:
            while self._answer(tls):
                pass

    def _answer(self, tls: ssl.SSLSocket) -> bool:
        """One request; whether the connection goes on."""
        text = b""
        while b"\r\n\r\n" not in text:
            piece = tls.recv(65536)
            if not piece:
                return False
            text += piece
        lead = text.decode("latin-1")
        path = lead.split(" ")[1].partition("?")[0]
        kind, full = self._honest_body(path)
        if full is None:
            tls.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
            return True
        result = re.search(r"(?i)\r\nrange: bytes=(\d+)-(\d+)", lead)
        start, stop = (int(result[1]), min(len(full), int(result[2]) + 1)) if result else (0, len(full))
        lies = kind == self.about
        self.asked += lies
        asker = self.identity.peer(tls.getpeercert(binary_form=True) or b"").name
        self.told += [(asker, stop - start)] * lies
        (self._tell if lies else honest)(tls, full[start:stop], start, stop, len(full) if result else -1)
        return not lies

    def _honest_body(self, path: str) -> tuple[str, bytes | None]:
        match path.split("/")[2:]:
            case ["claims"]:
                return "claims", json.dumps({"claims": self._made_claims()}).encode()
            case ["slices", sha256] if sha256 in self._slices:
                return "slices", self._slices[sha256].read_bytes()
            case ["datasets", self.dataset.id, name] if (self.dataset.path / name).is_file():
                return "datasets", (self.dataset.path / name).read_bytes()
        return "", None

    def _made_claims(self) -> Any:
        if self._claims is not None:
            return self._claims
        created = Claim(
            name=self.dataset.name,
            dataset_id=self.dataset.id,
            num_slices=self.dataset.num_slices,
            peer_id=self.identity.peer_id,
            address=self.address,
            expires_at=time.time() + 60.0,
        )
        return [created.to_json(self.identity)]
