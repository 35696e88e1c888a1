"""The chain: how an entry lies in the file, and what shows that nobody changed it.

A line holds `at` (unix seconds), `body`, `kind`, `prev` (the hash of the line before), `seq`, `sig` (the scheduler's
signature of all of these) and, in front, `hash`: the SHA-256 of the rest of the line. Any flipped byte is noticed with
no key at hand. `prev` makes the signature of an entry one of all entries before it: checking the last is checking all.

Reading for the chain alone parses no JSON: keys are sorted, so that what links an entry stands at the line's end.
About 2 us an entry of 500 bytes, half of it SHA-256; with its body parsed, 4.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from forebay.errors import LedgerError

GENESIS = "0" * 64
READ_BYTES = 1 << 20

_HEAD = b'{"hash":"'
_HEAD_BYTES = 75  # {"hash":"<64>",
_AT = re.compile(rb'"at":(-?[0-9]{1,18}(?:\.[0-9]{1,18})?),"body":')
_TAIL = re.compile(
    rb',"kind":"([a-z_]{1,32})","prev":"([0-9a-f]{64})","seq":(0|[1-9][0-9]{0,17}),"sig":"((?:[0-9a-f]{2})*)"\}'
)


def canonical_json(value: Any) -> bytes:
    """The one JSON encoding of a value: sorted keys, no spaces, ASCII; what is hashed and signed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True)
class Entry:
    """One line of the ledger; `hash` is what the next line's `prev` repeats."""

    seq: int
    prev: str
    at: float
    kind: str
    body: dict[str, Any]
    sig: str
    hash: str


@dataclass(frozen=True)
class Checkpoint:
    """Where a chain stood: opening with it reads only what came later. It saves time and proves nothing."""

    seq: int  # How many entries there were, and the seq of the next.
    prev: str  # The hash of the last.
    size: int  # Bytes of the file.
    last_bytes: int  # Bytes of the last line, its newline too.
    first: str  # The hash of entry 0.

    def to_json(self) -> dict[str, Any]:
        """Plain JSON for whoever keeps it."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Checkpoint | None:
        """What `to_json` gave; None for anything else."""
        try:
            found = cls(**value)
        except TypeError:
            return None
        numbers, texts = (found.seq, found.size, found.last_bytes), (found.prev, found.first)
        whole = all(type(n) is int and n > 0 for n in numbers) and all(isinstance(t, str) for t in texts)
        return found if whole and found.last_bytes <= found.size else None


class Link(NamedTuple):
    """An entry whose hash and place in the chain are right, its body still bytes."""

    seq: int
    prev: str
    hash: str
    kind: str
    sig: str
    line: bytes
    body_end: int

    @property
    def signed(self) -> bytes:
        """The bytes that the entry's signature covers: the line without `hash` and `sig`."""
        return b"{" + self.line[_HEAD_BYTES : self.line.rindex(b',"sig":"')] + b"}"

    def entry(self, path: Path | str = "ledger") -> Entry:
        """With its body parsed. Raises LedgerError if it is not an entry."""
        at = _AT.match(self.line, _HEAD_BYTES)
        try:
            body = orjson.loads(self.line[at.end() : self.body_end]) if at else None
        except ValueError as error:
            raise LedgerError(f"ledger entry {self.seq}: expected JSON, got {error!r} ({path}).") from None
        if at is None or not isinstance(body, dict):
            raise LedgerError(f"ledger entry {self.seq}: expected a time and an object ({path}, line {self.seq + 1}).")
        return Entry(self.seq, self.prev, float(at[1]), self.kind, body, self.sig, self.hash)


def make_line(seq: int, prev: str, at: float, kind: str, body: dict[str, Any], sign: Any) -> Link:
    """The line of a new entry, signed; `Link.line` lacks its newline."""
    content = canonical_json({"at": at, "body": body, "kind": kind, "prev": prev, "seq": seq})
    content = content[:-1] + b',"sig":"' + sign(content).hex().encode() + b'"}'
    line = _HEAD + hashlib.sha256(content).hexdigest().encode() + b'",' + content[1:]
    return read_link(line, seq, prev, "a new entry")


def read_link(line: bytes, seq: int, prev: str | None, path: Path | str) -> Link:
    """The entry in a line without its newline; `prev` None: the hash of the entry before is not at hand."""
    digest = hashlib.sha256(b"{" + line[_HEAD_BYTES:]).hexdigest()
    if line[:9] != _HEAD or line[73:_HEAD_BYTES] != b'",' or line[9:73] != digest.encode():
        raise LedgerError(f"ledger entry {seq}: its hash does not match its content ({path}, line {seq + 1}).")
    end = line.rfind(b',"kind":"')
    tail = _TAIL.fullmatch(line, end) if end >= 0 else None
    if tail is None:
        raise LedgerError(f"ledger entry {seq}: expected kind, prev, seq and sig ({path}, line {seq + 1}).")
    kind, before, number, sig = tail.groups()
    if int(number) != seq:
        raise LedgerError(f"ledger entry {seq}: expected seq {seq}, got {int(number)} ({path}, line {seq + 1}).")
    if prev is not None and before != prev.encode():
        raise LedgerError(f"ledger entry {seq}: it does not follow the entry before it ({path}, line {seq + 1}).")
    return Link(seq, before.decode(), digest, kind.decode(), sig.decode(), line, end)


def link_before(file: BinaryIO, checkpoint: Checkpoint, path: Path | str) -> Link | None:
    """The last entry before a checkpoint; None if the checkpoint is not of this file."""
    file.seek(checkpoint.size - checkpoint.last_bytes)
    line = file.read(checkpoint.last_bytes)
    if len(line) != checkpoint.last_bytes or line[-1:] != b"\n":
        return None
    try:
        link = read_link(line[:-1], checkpoint.seq - 1, None, path)
    except LedgerError:
        return None
    return link if link.hash == checkpoint.prev else None


def read_links(file: BinaryIO, path: Path | str, seq: int = 0, prev: str = GENESIS) -> Iterator[Link]:
    """The entries from where the file stands. A last line without its newline is not an entry and ends it."""
    for line in file:
        if line[-1:] != b"\n":
            return
        link = read_link(line[:-1], seq, prev, path)
        seq, prev = seq + 1, link.hash
        yield link


def read_entries(path: Path) -> Iterator[Entry]:
    """The entries of a ledger file in order, each checked against the chain; reads, never writes. As `read_links`."""
    with Path(path).open("rb", READ_BYTES) as file:
        for link in read_links(file, path):
            yield link.entry(path)
