"""Hostile peers as real servers: a certificate of the network, a true list of claims, and a lie where it counts.

with Liar(identity, dataset, "endless", about="slices") as liar: …     liar.address, liar.requests
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from forebay.dataset.reader import Dataset
from forebay.network.discovery import Claim
from forebay.network.pki.identity import Identity
from support.rude_peer import RudePeer

END = threading.Event()  # set, it ends every lie that would last


@dataclass(frozen=True)
class Honest:
    """An honest answer: the bytes [start, stop) of a body; `total` is -1 where no range was asked for."""

    body: bytes
    start: int
    stop: int
    total: int

    def head(self, *more: str, length: object = None, shift: int = 0) -> bytes:
        """206 and a range where one was asked for, else 200."""
        status = "206 Partial Content" if self.total >= 0 or shift else "200 OK"
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(self.body) if length is None else length}"]
        if self.total >= 0 or shift:
            first, last = self.start + shift, self.stop - 1 + shift
            lines.append(f"Content-Range: bytes {first}-{last}/{max(self.total, 0)}")
        return "\r\n".join([*lines, *more, "", ""]).encode("latin-1")


def each_after(seconds: float, data: bytes, head: bytes = b"") -> Iterator[bytes]:
    yield head
    for byte in data:
        yield bytes([byte])
        if END.wait(seconds):
            return


def then_nothing(*pieces: bytes) -> Iterator[bytes]:
    yield from pieces
    END.wait(30.0)


def then_zeros(*pieces: bytes) -> Iterable[bytes]:
    return [*pieces, *repeat(bytes(1 << 16), 64)]


LIES = {
    "wrong_bytes": lambda answer: [answer.head(), bytes([answer.body[0] ^ 1]) + answer.body[1:]],
    # Bytes without an end, behind a head that names the right number.
    "endless": lambda answer: then_zeros(answer.head() + answer.body[:-1] + b"\xff"),
    "huge": lambda answer: then_zeros(answer.head(length=10**15)),
    "silent": lambda answer: then_nothing(),
    "stall": lambda answer: then_nothing(answer.head() + answer.body[: len(answer.body) // 2]),
    "drip": lambda answer: each_after(0.05, answer.body, answer.head()),
    "drip_head": lambda answer: each_after(0.1, answer.head()),
    "wrong_range": lambda answer: [answer.head(shift=1), answer.body],  # the right bytes, said to be others
    "truncated": lambda answer: [answer.head(), answer.body[: len(answer.body) // 2]],
    "short_length": lambda answer: [answer.head(length=len(answer.body) // 2), answer.body],
    "negative_length": lambda answer: [answer.head(length=-1), answer.body],
    "two_lengths": lambda answer: [answer.head("Content-Length: 1"), answer.body],
    "chunked": lambda answer: [
        answer.head("Transfer-Encoding: chunked"), b"%x\r\n%b\r\n0\r\n\r\n" % (len(answer.body), answer.body)
    ],
    "giant_head": lambda answer: [b"HTTP/1.1 206 x\r\n", *repeat(b"X-Filler: " + b"y" * (1 << 16), 64)],
    "redirect": lambda answer: [
        b"HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/elsewhere\r\nContent-Length: 0\r\n\r\n"
    ],
    "garbage": lambda answer: [bytes(range(256)) * 8 + b"\r\n\r\n"],
    "hang_up": lambda answer: [],
}  # fmt: skip


class Liar(RudePeer):
    """A server of the network that lies about one kind of path; a context manager.

    Args:
        lie: Its name in LIES, or "honest".
        about: "slices", "datasets" (manifest and table) or "claims".
        claims: Its claims, if they are not the truth.

    Attributes:
        requests: Of each lie the name of who asked, and the bytes asked for.
    """

    def __init__(
        self, identity: Identity, dataset: Dataset, lie: str, about: str = "slices", claims: Any = None
    ) -> None:
        super().__init__(identity, self._reply, lambda asked: self._kind(asked.path) == about)
        self.dataset, self.about, self.requests = dataset, about, []
        self.identity = identity
        self._lie, self._claims = LIES.get(lie), claims
        self._slices = {dataset.table.row(i).sha256: dataset.slice_path(i) for i in range(dataset.num_slices)}

    def __enter__(self) -> Liar:
        END.clear()
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        END.set()
        super().__exit__()

    @staticmethod
    def _kind(path):
        return path.partition("?")[0].split("/")[2]

    def _reply(self, asked):
        body = self._body(asked.path.partition("?")[0])
        if body is None:
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", asked.headers.get("range", ""))
        start, stop = (int(span[1]), min(len(body), int(span[2]) + 1)) if span else (0, len(body))
        answer = Honest(body[start:stop], start, stop, len(body) if span else -1)
        if self._kind(asked.path) == self.about:
            self.requests.append((self.identity.peer(asked.certificate).name, stop - start))
            if self._lie is not None:
                return self._lie(answer)
        return answer.head() + answer.body

    def _body(self, path):
        match path.split("/")[2:]:
            case ["claims"]:
                claims = [self._true_claim()] if self._claims is None else self._claims
                return json.dumps({"claims": claims}).encode()
            case ["slices", sha256] if sha256 in self._slices:
                return self._slices[sha256].read_bytes()
            case ["datasets", self.dataset.id, name] if (self.dataset.path / name).is_file():
                return (self.dataset.path / name).read_bytes()
        return None

    def _true_claim(self):
        dataset, member = self.dataset, self.identity
        expires_at = time.time() + 60.0
        claim = Claim(dataset.name, dataset.id, dataset.num_slices, member.peer_id, self.address, expires_at)
        return claim.to_json(member)
