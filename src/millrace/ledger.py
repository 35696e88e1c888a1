"""The ledger: which worker used which samples at which step, in a chain that cannot be quietly changed.

A text file of JSON lines. A line holds `seq`, `prev` (the hash of the line before), `at` (unix seconds),
`kind`, `body`, `sig` (the scheduler's signature of all of that) and, in front, `hash`: the SHA-256 of the
rest of the line. Any flipped byte is noticed with no key at hand; with the key, so is a chain that was
made anew. Only a cut at the end of the file leaves a valid chain, and that shows as samples missing.

An entry is on disk (fsync) before `append` returns: the price is one fsync an entry, a few milliseconds.
Kinds: `job` (always first: dataset, seed, seq_len, samples of each slice, the scheduler's key), `worker`
(peer id and public key, once each) and `use` (a worker's signed receipt for samples [start, stop) of a
slice in an epoch). Coverage is computed with sorted arrays: a quarter of a million entries take seconds.

No network and no cryptography in here: what signs and what checks a signature is passed in.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.errors import LedgerError, MillraceError
from millrace.peer_id import peer_id_of

GENESIS = "0" * 64
MAX_SLICES = 100_000_000
MAX_PROBLEMS = 100

Signer = Callable[[bytes], bytes]
# (public key, message, signature); raises a MillraceError unless the signature is right.
Verifier = Callable[[bytes, bytes, bytes], None]

_HEAD = b'{"hash":"'
_USE_FIELDS = ("epoch", "slice", "start", "stop")


def canonical_json(value: Any) -> bytes:
    """The one JSON encoding of a value: sorted keys, no spaces, ASCII; what is hashed and signed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def receipt_message(
    *, job_id: str, lease_id: str, epoch: int, slice_index: int, start: int, stop: int, step: int
) -> bytes:
    """What a worker signs to say that it used samples [start, stop) of a slice under a lease."""
    return b"millrace receipt 1\n" + canonical_json(
        {
            "job": job_id,
            "lease": lease_id,
            "epoch": epoch,
            "slice": slice_index,
            "start": start,
            "stop": stop,
            "step": step,
        }
    )


def encode_runs(counts: NDArray[np.int64]) -> list[list[int]]:
    """Run-length form [[count, run], …] of an int64 array: equal slices take a few bytes, however many."""
    if len(counts) == 0:
        return []
    edges = np.flatnonzero(np.diff(counts)) + 1
    starts = np.concatenate([[0], edges])
    runs = np.diff(np.concatenate([starts, [len(counts)]]))
    return [[int(counts[i]), int(run)] for i, run in zip(starts, runs)]


def decode_runs(runs: Any) -> NDArray[np.int64]:
    """The array that `encode_runs` encoded, or that a plain list of counts gives.

    Raises:
        LedgerError: If it is neither, a count is negative, or it is beyond any dataset's size.
    """
    message = "ledger: expected samples_per_slice as counts or [count, run] pairs"
    if not isinstance(runs, list):
        raise LedgerError(f"{message}, got {type(runs).__name__}.")
    pairs = [r if isinstance(r, list) else [r, 1] for r in runs]
    for pair in pairs:
        if len(pair) != 2 or not all(type(v) is int and 0 <= v < 2**62 for v in pair):
            raise LedgerError(f"{message}, got {pair!r}.")
    if sum(pair[1] for pair in pairs) > MAX_SLICES:
        raise LedgerError(f"{message} of at most {MAX_SLICES} slices, got more.")
    counts = np.array([p[0] for p in pairs], np.int64)
    return np.repeat(counts, np.array([p[1] for p in pairs], np.int64))


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


def _parse(line: bytes, seq: int, prev: str, path: Path) -> Entry:
    """The entry in one line without its newline, its hash and place in the chain checked."""
    where = f"{path}, line {seq + 1}"
    content = b"{" + line[75:]
    digest = hashlib.sha256(content).hexdigest()
    if line[:9] != _HEAD or line[73:75] != b'",' or line[9:73] != digest.encode():
        raise LedgerError(f"ledger entry {seq}: its hash does not match its content ({where}).")
    try:
        value = json.loads(content)
        entry = Entry(value["seq"], value["prev"], value["at"], value["kind"], value["body"], value["sig"], digest)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LedgerError(f"ledger entry {seq}: expected a JSON entry, got {error!r} ({where}).") from None
    if not (isinstance(entry.body, dict) and isinstance(entry.kind, str) and isinstance(entry.sig, str)):
        raise LedgerError(f"ledger entry {seq}: expected kind, body and sig of the right types ({where}).")
    if type(entry.at) not in (int, float):
        raise LedgerError(f"ledger entry {seq}: expected a time, got {entry.at!r} ({where}).")
    if type(entry.seq) is not int or entry.seq != seq:
        raise LedgerError(f"ledger entry {seq}: expected seq {seq}, got {entry.seq!r} ({where}).")
    if entry.prev != prev:
        raise LedgerError(f"ledger entry {seq}: it does not follow the entry before it ({where}).")
    return entry


def _signed_part(line: bytes) -> bytes:
    """The bytes that an entry's signature covers: the line without `hash` and `sig`."""
    content = b"{" + line[75:]
    return content[: content.rindex(b',"sig":"')] + b"}"


class Ledger:
    """An open ledger, one writer at a time; close it, or use it in a `with`. Not thread-safe."""

    def __init__(self, path: Path, fd: int, signer: Signer, now: Callable[[], float]) -> None:
        self.path = path
        self.truncated_bytes = 0
        self._fd = fd
        self._signer = signer
        self._now = now
        self._seq = 0
        self._prev = GENESIS
        self._size = 0
        self.first: Entry | None = None

    @classmethod
    def open(cls, path: Path, signer: Signer, now: Callable[[], float] = time.time) -> Ledger:
        """Opens or creates a ledger, checks its whole chain and cuts off a last line that a crash tore.

        Raises:
            LedgerError: If the chain is broken, or another process has it open.
        """
        path = Path(path)
        fresh = not path.exists()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        ledger = cls(path, fd, signer, now)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LedgerError(
                    f"ledger {path}: another process has it open. Stop the other scheduler, "
                    "or give this one a state directory of its own."
                ) from None
            ledger._recover()
            if fresh:
                _fsync_directory(path.parent)
        except BaseException:
            os.close(fd)
            raise
        return ledger

    def _recover(self) -> None:
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    self.truncated_bytes = len(line)
                    break
                entry = _parse(line[:-1], self._seq, self._prev, self.path)
                self._advance(entry, len(line))
        if self.truncated_bytes:
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)

    def _advance(self, entry: Entry, size: int) -> None:
        if self.first is None:
            self.first = entry
        self._seq, self._prev, self._size = entry.seq + 1, entry.hash, self._size + size

    @property
    def next_seq(self) -> int:
        """How many entries there are, which is the seq of the next."""
        return self._seq

    def append(self, kind: str, body: dict[str, Any]) -> Entry:
        """Signs an entry, writes it and returns it once it is on disk.

        Raises:
            LedgerError: If it cannot be written whole; the ledger is then as it was before.
        """
        value = {
            "seq": self._seq,
            "prev": self._prev,
            "at": round(self._now(), 3),
            "kind": kind,
            "body": body,
        }
        sig = self._signer(canonical_json(value)).hex()
        content = canonical_json({**value, "sig": sig})
        digest = hashlib.sha256(content).hexdigest()
        line = _HEAD + digest.encode() + b'",' + content[1:] + b"\n"
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(f"{written} of {len(line)} bytes written")
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            raise LedgerError(f"ledger {self.path}: cannot append an entry: {error}. Is the disk full?") from error
        entry = Entry(value["seq"], value["prev"], value["at"], kind, body, sig, digest)  # type: ignore[arg-type]
        self._advance(entry, len(line))
        return entry

    def entries(self, start: int = 0) -> Iterator[Entry]:
        """The entries from seq `start` on, as they lie on disk."""
        for entry in read_entries(self.path):
            if entry.seq >= start:
                yield entry

    def close(self) -> None:
        """Gives the file up; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_entries(path: Path) -> Iterator[Entry]:
    """The entries of a ledger file in order, each checked against the chain; reads, never writes.

    A last line without its newline is not an entry and ends the iteration.

    Raises:
        LedgerError: At the first entry that is not what its hash says or does not follow the one before.
    """
    prev = GENESIS
    with Path(path).open("rb") as file:
        for seq, line in enumerate(file):
            if not line.endswith(b"\n"):
                return
            entry = _parse(line[:-1], seq, prev, Path(path))
            prev = entry.hash
            yield entry


@dataclass(frozen=True)
class LedgerReport:
    """What a ledger proves.

    `intact`: the chain, the signatures and the receipts are right. `ok`: intact, and every epoch that was
    begun used every sample exactly once. `epochs` has a dict each: epoch, samples, missing, repeated.
    """

    ok: bool
    intact: bool
    epochs: list[dict[str, int]]
    problems: list[str]
    entries: int = 0
    job: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What `millrace ledger verify --json` prints."""
        return {
            "ok": self.ok,
            "intact": self.intact,
            "epochs": self.epochs,
            "problems": self.problems,
            "entries": self.entries,
        }


@dataclass
class _Reading:
    """What one pass over the file gathers."""

    problems: list[str] = field(default_factory=list)
    job: dict[str, Any] = field(default_factory=dict)
    job_id: str = ""
    entries: int = 0
    uses: list[tuple[int, int, int, int]] = field(default_factory=list)
    keys: dict[str, bytes] = field(default_factory=dict)

    def problem(self, text: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)


def verify_ledger(path: Path, public_key: bytes | None = None, verify: Verifier | None = None) -> LedgerReport:
    """Checks the chain, the signatures and that each epoch used each sample exactly once.

    Args:
        public_key: The scheduler's key, 32 bytes; without it, the key that the ledger itself names.
        verify: Checks one signature; without it signatures and receipts are left unchecked, hashes are not.

    Returns:
        The report; a broken chain is read up to the break, and the rest counts as missing.

    Raises:
        LedgerError: If the file cannot be read.

    Cost: about 10 us an entry, and two signature checks of about 0.1 ms where `verify` is given.
    """
    path = Path(path)
    reading = _Reading()
    prev = GENESIS
    try:
        with path.open("rb") as file:
            for seq, line in enumerate(file):
                if not line.endswith(b"\n"):
                    reading.problem(f"the last line has no end ({path}, line {seq + 1}): torn by a crash, or cut")
                    break
                entry = _parse(line[:-1], seq, prev, path)
                prev = entry.hash
                reading.entries += 1
                _read_entry(entry, line[:-1], reading, public_key, verify)
    except OSError as error:
        raise LedgerError(f"ledger {path}: cannot read it: {error}.") from error
    except LedgerError as error:
        reading.problem(str(error))
    if not reading.job:
        reading.problem(f"no job entry ({path}): the ledger does not say what it is about")
        return LedgerReport(False, False, [], reading.problems, reading.entries)
    epochs = _coverage(reading)
    intact = not reading.problems
    whole = all(e["missing"] == 0 and e["repeated"] == 0 for e in epochs)
    return LedgerReport(intact and whole, intact, epochs, reading.problems, reading.entries, reading.job)


def _read_entry(
    entry: Entry, line: bytes, reading: _Reading, public_key: bytes | None, verify: Verifier | None
) -> None:
    if entry.kind == "job":
        if entry.seq != 0:
            reading.problem(f"entry {entry.seq}: a second job entry")
            return
        reading.job, reading.job_id = entry.body, entry.hash
    elif entry.seq == 0:
        raise LedgerError("ledger entry 0: expected kind job, got " + entry.kind)
    try:
        if verify is not None:
            key = public_key or bytes.fromhex(str(reading.job.get("scheduler", "")))
            verify(key, _signed_part(line), bytes.fromhex(entry.sig))
        if entry.kind == "worker":
            _read_worker(entry, reading)
        elif entry.kind == "use":
            _read_use(entry, reading, verify)
    except (MillraceError, ValueError, KeyError, TypeError) as error:
        reading.problem(f"entry {entry.seq} ({entry.kind}): {error}")


def _read_worker(entry: Entry, reading: _Reading) -> None:
    key = bytes.fromhex(entry.body["key"])
    if peer_id_of(key) != entry.body["worker"]:
        raise LedgerError(f"the key is not that of worker {entry.body['worker']}")
    reading.keys[entry.body["worker"]] = key


def _read_use(entry: Entry, reading: _Reading, verify: Verifier | None) -> None:
    body = entry.body
    values = tuple(body[name] for name in _USE_FIELDS)
    if not all(type(v) is int and 0 <= v < 2**62 for v in values):
        raise LedgerError(f"expected counts from 0, got {values}")
    epoch, index, start, stop = values
    reading.uses.append((epoch, index, start, stop))
    if verify is not None:
        if body["worker"] not in reading.keys:
            raise LedgerError(f"worker {body['worker']} has no key in this ledger")
        message = receipt_message(
            job_id=reading.job_id,
            lease_id=body["lease"],
            epoch=epoch,
            slice_index=index,
            start=start,
            stop=stop,
            step=body["step"],
        )
        verify(reading.keys[body["worker"]], message, bytes.fromhex(body["receipt"]))


def _coverage(reading: _Reading) -> list[dict[str, int]]:
    """Counts samples, missing and repeated for each epoch begun, with arrays over all entries."""
    try:
        samples = decode_runs(reading.job.get("samples_per_slice"))
    except LedgerError as error:
        reading.problem(str(error))
        return []
    if not reading.uses:
        return []
    base = np.concatenate([[0], np.cumsum(samples)]).astype(np.int64)
    table = np.array(reading.uses, np.int64)
    index = np.minimum(table[:, 1], len(samples) - 1)
    wrong = (table[:, 1] != index) | (table[:, 2] >= table[:, 3]) | (table[:, 3] > samples[index])
    for row in table[wrong][:MAX_PROBLEMS]:
        epoch, slice_index, start, stop = (int(v) for v in row)
        reading.problem(f"epoch {epoch}: samples [{start}, {stop}) of slice {slice_index} are not in the dataset")
    table, index = table[~wrong], index[~wrong]
    epochs = []
    for epoch in range(int(table[:, 0].max()) + 1 if len(table) else 0):
        if epoch > len(table):
            reading.problem(f"epoch {epoch} and later: more epochs than entries")
            break
        here = table[:, 0] == epoch
        starts, stops = base[index[here]] + table[here, 2], base[index[here]] + table[here, 3]
        epochs.append({"epoch": epoch, **count_coverage(starts, stops, int(base[-1]))})
    return epochs


def count_coverage(starts: NDArray[np.int64], stops: NDArray[np.int64], num_samples: int) -> dict[str, int]:
    """How the intervals [start, stop) cover [0, num_samples).

    Args:
        starts, stops: int64 [N], 0 <= start < stop <= num_samples, in any order.

    Returns:
        samples: the sum of the lengths; missing: how many points no interval covers; repeated: how many
        uses of a point came after its first.

    Cost: one sort, O(N log N), no loop in Python.
    """
    total = int((stops - starts).sum())
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    reached = np.maximum.accumulate(np.concatenate([[0], stops]).astype(np.int64))[:-1]
    covered = int(np.maximum(stops - np.maximum(starts, reached), 0).sum())
    return {"samples": total, "missing": num_samples - covered, "repeated": total - covered}
