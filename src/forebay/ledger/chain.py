"""The hash chain: the format of an entry, and its verification.

A line has `at` (unix seconds), `body`, `kind`, `prev` (the hash of the line before), `seq`, `sig` (the scheduler's
signature of all of these) and, in front, `hash`: the SHA-256 of the rest of the line. Any flipped byte is detected
without a key. Through `prev` the signature of an entry covers all entries before it: checking the last one checks all.

Verifying the chain parses no JSON: keys are sorted, so that the fields that link an entry are at the end of the line.
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
_TIME = re.compile(rb'"at":(-?[0-9]{1,18}(?:\.[0-9]{1,18})?),"body":')
_TAIL = re.compile(
    rb',"kind":"([a-z_]{1,32})","prev":"([0-9a-f]{64})","seq":(0|[1-9][0-9]{0,17}),"sig":"((?:[0-9a-f]{2})*)"\}'
)


def canonical_json(value: Any) -> bytes:
    """The canonical JSON of a value: sorted keys, no spaces, ASCII. This is hashed and signed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True)
class Entry:
    """One line of the ledger. The next line's `prev` is this line's `hash`."""

    seq: int
    prev: str
    recorded_at: float
    kind: str
    body: dict[str, Any]
    sig: str
    hash: str


@dataclass(frozen=True)
class Checkpoint:
    """A position in a chain: opening with it reads only later entries. It saves time and proves nothing."""

    seq: int  # Number of entries, and the seq of the next.
    prev: str  # The hash of the last.
    size: int  # Bytes of the file.
    last_bytes: int  # Bytes of the last line, newline included.
    first: str  # The hash of entry 0.

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Checkpoint | None:
        """The inverse of `to_json`; None for invalid input."""
        try:
            checkpoint = cls(**value)
        except TypeError:
            return None
        numbers, texts = (checkpoint.seq, checkpoint.size, checkpoint.last_bytes), (checkpoint.prev, checkpoint.first)
        is_valid = all(type(n) is int and n > 0 for n in numbers) and all(isinstance(t, str) for t in texts)
        return checkpoint if is_valid and checkpoint.last_bytes <= checkpoint.size else None


class Link(NamedTuple):
    """An entry with a verified hash and position in the chain; its body is not parsed."""

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
        """Parse the body. Raises LedgerError if it is not an entry."""
        recorded_at = _TIME.match(self.line, _HEAD_BYTES)
        try:
            body = orjson.loads(self.line[recorded_at.end() : self.body_end]) if recorded_at else None
        except ValueError as error:
            raise LedgerError(f"ledger entry {self.seq}: expected JSON, got {error!r} ({path}).") from None
        if recorded_at is None or not isinstance(body, dict):
            raise LedgerError(f"ledger entry {self.seq}: expected a time and an object ({path}, line {self.seq + 1}).")
        return Entry(self.seq, self.prev, float(recorded_at[1]), self.kind, body, self.sig, self.hash)


def make_line(seq: int, prev: str, recorded_at: float, kind: str, body: dict[str, Any], sign: Any) -> Link:
    """The line of a new entry, signed; `Link.line` lacks its newline."""
    content = canonical_json({"at": recorded_at, "body": body, "kind": kind, "prev": prev, "seq": seq})
    content = content[:-1] + b',"sig":"' + sign(content).hex().encode() + b'"}'
    line = _HEAD + hashlib.sha256(content).hexdigest().encode() + b'",' + content[1:]
    return read_link(line, seq, prev, "a new entry")


def read_link(line: bytes, seq: int, prev: str | None, path: Path | str) -> Link:
    """Verify and return the entry in a line without its newline; `prev` None: the entry before is unknown."""
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
    """The last entry before a checkpoint; None if the checkpoint does not belong to this file."""
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
    """The entries from the file's position on. A last line without a newline is incomplete and not returned."""
    for line in file:
        if line[-1:] != b"\n":
            return
        link = read_link(line[:-1], seq, prev, path)
        seq, prev = seq + 1, link.hash
        yield link


def read_entries(path: Path) -> Iterator[Entry]:
    """The entries of a ledger file in order, each checked against the chain. See `read_links`."""
    with Path(path).open("rb", READ_BYTES) as file:
        for link in read_links(file, path):
            yield link.entry(path)
