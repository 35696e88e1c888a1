"""What a ledger proves: its chain, its signatures, and that each epoch used each sample exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import LedgerError, MillraceError
from millrace.ledger.chain import READ_BYTES, Entry, read_links
from millrace.ledger.coverage import count_coverage
from millrace.ledger.receipts import Used, receipt_message
from millrace.ledger.runs import decode_runs
from millrace.peer_id import peer_id_of

MAX_PROBLEMS = 100

# (public key, message, signature); raises a MillraceError unless the signature is right.
Verifier = Callable[[bytes, bytes, bytes], None]

_USE_FIELDS = ("epoch", "slice", "start", "stop")


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
    end = 0
    try:
        with path.open("rb", READ_BYTES) as file:
            for link in read_links(file, path):
                reading.entries += 1
                end += len(link.line) + 1
                _read_entry(link.entry(path), link.signed, reading, public_key, verify)
            if end != path.stat().st_size:
                reading.problem(
                    f"the last line has no end ({path}, line {reading.entries + 1}): torn by a crash, or cut"
                )
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
    entry: Entry, signed: bytes, reading: _Reading, public_key: bytes | None, verify: Verifier | None
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
            verify(key, signed, bytes.fromhex(entry.sig))
        if entry.kind == "worker":
            _read_worker(entry, reading)
        elif entry.kind == "use":
            _read_use(entry, reading, verify)
        elif entry.kind == "uses":
            _read_uses(entry, reading, verify)
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


def _read_uses(entry: Entry, reading: _Reading, verify: Verifier | None) -> None:
    body = entry.body
    uses = [Used.from_row(row) for row in body["uses"]]
    reading.uses.extend((use.epoch, use.slice, use.start, use.stop) for use in uses)
    if verify is not None:
        if body["worker"] not in reading.keys:
            raise LedgerError(f"worker {body['worker']} has no key in this ledger")
        verify(reading.keys[body["worker"]], receipt_message(reading.job_id, uses), bytes.fromhex(body["receipt"]))


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
