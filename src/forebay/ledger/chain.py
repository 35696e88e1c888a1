"""The hash chain: the format of an entry, its verification, and the receipts that workers sign in it.

A line has `at` (unix seconds), `body`, `kind`, `prev` (the hash of the line before), `seq`, `sig` (the scheduler's
signature of all of these) and, in front, `hash`: the SHA-256 of the rest of the line. Any flipped byte is detected
without a key. Through `prev` the signature of an entry covers all entries before it: checking the last one checks all.

Cost: about 6 us an entry of 500 bytes.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from forebay.base import Json
from forebay.errors import LedgerError

GENESIS = "0" * 64
READ_BYTES = 1 << 20
MAX_COUNT = 1 << 62

_HEAD = b'{"hash":"'
_HEAD_BYTES = 75  # {"hash":"<64>",
_SIGNATURE = b',"sig":"'


def canonical_json(value: Any) -> bytes:
    """The canonical JSON of a value: sorted keys, no spaces, ASCII. This is hashed and signed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True)
class Entry:
    """One line of the ledger. The next line's `prev` is this line's `hash`; `line` lacks its newline."""

    seq: int
    prev: str
    recorded_at: float
    kind: str
    body: Json
    sig: str
    hash: str
    line: bytes = field(default=b"", repr=False)

    @property
    def signed(self) -> bytes:
        """The bytes that the entry's signature covers: the line without `hash` and `sig`."""
        return b"{" + self.line[_HEAD_BYTES : self.line.rindex(_SIGNATURE)] + b"}"


_Positive = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class Checkpoint:
    """A position in a chain: opening with it reads only later entries. It saves time and proves nothing."""

    seq: _Positive  # Number of entries, and the seq of the next.
    prev: str  # The hash of the last.
    size: _Positive  # Bytes of the file.
    last_bytes: _Positive  # Bytes of the last line, newline included.
    first: str  # The hash of entry 0.

    @classmethod
    def from_json(cls, value: Any) -> "Checkpoint | None":
        """The checkpoint of a dict of these fields; None for invalid input."""
        try:
            checkpoint = _CHECKPOINT.validate_python(value)
        except ValidationError:
            return None
        return checkpoint if checkpoint.last_bytes <= checkpoint.size else None


_CHECKPOINT = TypeAdapter(Checkpoint)


def make_entry(seq: int, prev: str, recorded_at: float, kind: str, body: Json, sign: Callable[[bytes], bytes]) -> Entry:
    """A new entry, signed."""
    content = canonical_json({"at": recorded_at, "body": body, "kind": kind, "prev": prev, "seq": seq})
    sig = sign(content).hex()
    content = content[:-1] + _SIGNATURE + sig.encode() + b'"}'
    digest = hashlib.sha256(content).hexdigest()
    return Entry(seq, prev, recorded_at, kind, body, sig, digest, _HEAD + digest.encode() + b'",' + content[1:])


def read_entry(line: bytes, seq: int, prev: str | None, path: Path | str) -> Entry:
    """Verify and return the entry in a line without its newline; `prev` None: the entry before is unknown."""
    location = f"({path}, line {seq + 1})"
    digest = hashlib.sha256(b"{" + line[_HEAD_BYTES:]).hexdigest()
    if line[:_HEAD_BYTES] != _HEAD + digest.encode() + b'",':
        raise LedgerError(f"ledger entry {seq}: its hash does not match its content {location}.")
    try:
        fields = orjson.loads(line)
        seq_read, prev_read, kind, body, sig = (fields[name] for name in ("seq", "prev", "kind", "body", "sig"))
        entry = Entry(seq_read, prev_read, float(fields["at"]), kind, body, sig, digest, line)
        if not isinstance(entry.body, dict) or not line.endswith(_SIGNATURE + entry.sig.encode() + b'"}'):
            raise ValueError("no body, or no signature at the end")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(
            f"ledger entry {seq}: expected at, body, kind, prev, seq and sig, got {error!r} {location}."
        ) from None
    if type(entry.seq) is not int or entry.seq != seq:
        raise LedgerError(f"ledger entry {seq}: expected seq {seq}, got {str(entry.seq)[:40]} {location}.")
    if prev is not None and entry.prev != prev:
        raise LedgerError(f"ledger entry {seq}: it does not follow the entry before it {location}.")
    return entry


def entry_before(file: BinaryIO, checkpoint: Checkpoint, path: Path | str) -> Entry | None:
    """The last entry before a checkpoint; None if the checkpoint does not belong to this file."""
    file.seek(checkpoint.size - checkpoint.last_bytes)
    line = file.read(checkpoint.last_bytes)
    if len(line) != checkpoint.last_bytes or line[-1:] != b"\n":
        return None
    try:
        entry = read_entry(line[:-1], checkpoint.seq - 1, None, path)
    except LedgerError:
        return None
    return entry if entry.hash == checkpoint.prev else None


def iter_entries(file: BinaryIO, path: Path | str, seq: int = 0, prev: str = GENESIS) -> Iterator[Entry]:
    """The entries from the file's position on. A last line without a newline is incomplete and not returned."""
    for line in file:
        if line[-1:] != b"\n":
            return
        entry = read_entry(line[:-1], seq, prev, path)
        seq = seq + 1
        prev = entry.hash
        yield entry


def read_entries(path: Path) -> Iterator[Entry]:
    """The entries of a ledger file in order. See `iter_entries`."""
    with Path(path).open("rb", READ_BYTES) as file:
        yield from iter_entries(file, path)


# Receipts: signed statements of workers about the samples that they used, one signature for many uses.


@dataclass(frozen=True)
class Used:
    """Samples [start, stop) of a slice, in the slice's order in an epoch, used under a lease by a worker's `step`.

    `digest`, if not empty, is the receipt of the sample ids that were read (`order.shard_windows.receipt`, 32 hex
    digits): it shows that the worker read in the job's order.
    """

    lease_id: str
    epoch: int
    slice: int
    start: int
    stop: int
    step: int
    digest: str = ""

    def to_row(self) -> list[Any]:
        """The row in a `uses` entry, which the worker signs: 6 values, 7 with a digest."""
        row = [self.lease_id, self.epoch, self.slice, self.start, self.stop, self.step]
        return [*row, self.digest] if self.digest else row

    @classmethod
    def from_row(cls, row: Any) -> "Used":
        """The inverse of `to_row`. Raises LedgerError for an invalid row."""
        is_valid = (
            isinstance(row, list)
            and len(row) in (6, 7)
            and isinstance(row[0], str)
            and all(type(number) is int and 0 <= number < MAX_COUNT for number in row[1:6])
            and all(isinstance(digest, str) and len(digest) == 32 for digest in row[6:])
        )
        if not is_valid:
            raise LedgerError(f"expected a lease, 5 counts from 0 and maybe a digest, got {str(row)[:100]}")
        return cls(*row)


def receipt_message(job_id: str, uses: Sequence[Used]) -> bytes:
    """The bytes that a worker signs for these uses, in this order."""
    return b"forebay receipt 3\n" + canonical_json({"job": job_id, "uses": [use.to_row() for use in uses]})


def uses_of(entry: Entry) -> list[Used]:
    """The uses of a `uses` entry. Raises LedgerError if it is not one."""
    try:
        return [Used.from_row(row) for row in entry.body["uses"]]
    except (KeyError, TypeError) as error:
        raise LedgerError(f"expected uses, got {error!r}") from None
