"""Verify a ledger: its chain, signatures and certificates, and that each epoch used each sample exactly once.

One pass: 15 us an entry, and a signature check of 0.11 ms for each receipt. Of the scheduler's signatures only
the last is checked: it covers the chain. A million entries: 20 s, and 2 minutes for their receipts.
"""

from binascii import a2b_base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forebay.arrays import I64, Array
from forebay.errors import ForebayError, LedgerError
from forebay.ledger.chain import READ_BYTES, Entry, iter_entries, read_entries, receipt_message, uses_of
from forebay.ledger.index import Asides, Job, UseColumns, apply_aside
from forebay.peer_id import peer_id_of

MAX_PROBLEMS = 100
RECORDED_S = 60.0  # the longest time between a scheduler's check of a worker's certificate and the entry of its uses

# (public key, message, signature); raises a ForebayError unless the signature is valid.
Verifier = Callable[[bytes, bytes, bytes], None]
# A certificate (DER); returns its `network.peer.Peer`, raises a ForebayError if it is not valid.
Certifier = Callable[[bytes], Any]
# (job, epoch, slice, start, stop): the sample ids of a use, counted in its slice, and their receipt.
Replay = Callable[[Job, int, int, int, int], tuple[I64, str]]


@dataclass(frozen=True)
class LedgerReport:
    """Result of `verify_ledger`, and the output of `forebay ledger verify --json`."""

    ok: bool  # Intact, and every started epoch used every sample once, apart from the share that may be set aside.
    intact: bool  # The chain, the signatures and the receipts are valid.
    # Of each: epoch, samples, missing, repeated; set_aside if any.
    epochs: list[dict[str, int]]
    problems: list[str]
    entries: int
    scheduler: str = ""  # Peer id of the key that must have signed the entries.
    missing: list[dict[str, int]] = field(default_factory=list)  # The first, by epoch: slice, start, stop.
    repeated: list[dict[str, int]] = field(default_factory=list)  # The same, and the entry.


@dataclass
class _Reading:
    """State of one pass over the file."""

    verify: Verifier | None
    certify: Certifier | None
    problems: list[str] = field(default_factory=list)
    job: Job | None = None
    entries: int = 0
    uses: UseColumns = field(default_factory=UseColumns)
    digests: dict[int, str] = field(default_factory=dict)
    workers: dict[str, Any] = field(default_factory=dict)  # Peers, by peer id.
    reached: dict[tuple[str, int, int], tuple[int, int]] = field(default_factory=dict)
    aside_of: Asides = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def problem(self, text: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)


def verify_ledger(
    path: Path, public_key: bytes | None = None, verify: Verifier | None = None, replay: Replay | None = None,
    max_set_aside: float = 0.0, certify: Certifier | None = None,
) -> LedgerReport:  # fmt: skip
    """Check the chain, the signatures and that each epoch used each sample exactly once.

    Args:
        public_key: The scheduler's key, 32 bytes; by default the key that the ledger itself names.
        verify, certify: Check one signature, and one certificate; without both only hashes are checked.
        replay: Computes the sample ids of each use: coverage is then also counted by sample, and the digests
            that workers signed are compared.
        max_set_aside: Share of an epoch's samples, 0 to 1, that may be set aside and unused.

    Returns:
        A report; a broken chain is read up to the break, and the rest counts as missing.
    """
    path = Path(path)
    reading = _Reading(verify, certify)
    last: Entry | None = None
    end = 0
    try:
        with path.open("rb", READ_BYTES) as file:
            for last in iter_entries(file, path):
                reading.entries += 1
                end += len(last.line) + 1
                _read_entry(last, reading)
            if end != path.stat().st_size:
                reading.problem(
                    f"the last line has no end ({path}, line {reading.entries + 1}): torn by a crash, or cut"
                )
    except OSError as error:
        raise LedgerError(f"ledger {path}: cannot read it: {error}. Give the file: ledger.jsonl.") from error
    except LedgerError as error:
        reading.problem(str(error))
    job = reading.job
    if job is None or last is None:
        reading.problem(f"no job entry ({path}): the ledger does not say what it is about")
        return LedgerReport(False, False, [], reading.problems, reading.entries)
    key = public_key or job.scheduler
    if verify is not None and not _is_signed(last, key, verify):
        # The last signature covers all; where it is wrong, the first wrong one is found.
        entry = next(entry for entry in read_entries(path) if not _is_signed(entry, key, verify))
        reading.problem(f"entry {entry.seq} ({entry.kind}): it is not signed by the scheduler; nor is what follows")
    scheduler = peer_id_of(key)
    if scheduler in reading.workers:
        reading.problem(f"worker {scheduler}: expected another key than the scheduler's, which signs for itself")
    return _report(reading, job, replay, max_set_aside, scheduler)


def _is_signed(entry: Entry, key: bytes, verify: Verifier) -> bool:
    try:
        verify(key, entry.signed, bytes.fromhex(entry.sig))
    except (ForebayError, ValueError):
        return False
    return True


def _read_entry(entry: Entry, reading: _Reading) -> None:
    if entry.seq == 0:
        reading.job = Job.of(entry)
        return
    job = reading.job
    assert job is not None
    try:
        match entry.kind:
            case "job":
                reading.problem(f"entry {entry.seq}: a second job entry")
            case "worker":
                body = entry.body
                if not (certificate := a2b_base64(body.get("certificate", ""))):
                    raise LedgerError(f"expected a certificate of worker {body['worker']}, got none")
                peer = reading.certify and reading.certify(certificate)
                if peer is not None and (peer.peer_id, peer.name) != (body["worker"], body["name"]):
                    raise LedgerError(f"the certificate is not that of worker {body['worker']} {body['name']!r}")
                name = str(job.body.get("name", ""))
                if peer is not None and not (peer.scope.allows("worker") and peer.scope.covers(name)):
                    raise LedgerError(f"expected a certificate for a worker of dataset {name!r}, got {peer.scope}")
                reading.workers[body["worker"]] = peer
            case "uses":
                _read_uses(entry, job, reading)
            case "set_aside" | "readmitted":
                apply_aside(entry, job, reading.aside_of, reading.ended)
            case "epoch":
                epoch = entry.body["epoch"]
                if type(epoch) is not int or epoch < 0:
                    raise LedgerError(f"expected an epoch, got {entry.body}")
                if epoch in reading.ended:
                    raise LedgerError(f"epoch {epoch} had ended before")
                reading.ended.add(epoch)
                reading.reached.clear()
    except (ForebayError, ValueError, KeyError, TypeError) as error:
        reading.problem(f"entry {entry.seq} ({entry.kind}): {error}")


def _read_uses(entry: Entry, job: Job, reading: _Reading) -> None:
    body = entry.body
    uses = uses_of(entry)
    worker = str(body["worker"])
    for use in uses:
        if use.slice >= len(job.samples) or not use.start < use.stop <= job.samples[use.slice]:
            reading.problem(
                f"epoch {use.epoch}: samples [{use.start}, {use.stop}) of slice {use.slice} are not in the dataset"
            )
            continue
        lease = (use.lease_id, use.epoch, use.slice)
        low, high = reading.reached.get(lease, (use.start, use.start))
        if use.start > high or use.stop <= low:  # What overlaps is counted as repeated.
            reading.problem(
                f"entry {entry.seq} (uses): out of order: lease {use.lease_id} of slice {use.slice} goes on at "
                f"{use.start}, expected {high}"
            )
        reading.reached[lease] = (low, max(high, use.stop))
        if use.epoch in reading.ended:
            reading.problem(f"entry {entry.seq} (uses): slice {use.slice} of epoch {use.epoch}, which had ended")
        if use.digest:
            reading.digests[len(reading.uses)] = use.digest
        reading.uses.add(entry, worker, use)
    if reading.verify is not None:
        peer = reading.workers.get(worker)
        if peer is None or not peer.valid_from <= entry.recorded_at <= peer.valid_until + RECORDED_S:
            raise LedgerError(f"worker {worker} has no certificate in this ledger that was valid then")
        reading.verify(peer.public_key, receipt_message(job.job_id, uses), bytes.fromhex(body["receipt"]))


def _report(reading: _Reading, job: Job, replay: Replay | None, max_set_aside: float, scheduler: str) -> LedgerReport:
    table = reading.uses.table()
    epochs, missing, repeated = (list[dict[str, int]]() for _ in range(3))
    last = int(table["epoch"].max()) if len(table) else -1
    for epoch in range(max([last, *reading.ended]) + 1):
        if epoch > reading.entries:
            reading.problem(f"epoch {epoch} and later: more epochs than entries")
            break
        mine = table[table["epoch"] == epoch]
        aside = [samples for (other, _), rows in reading.aside_of.items() if other == epoch for samples in rows]
        coverage = cover(job.samples, mine["slice"], mine["start"], mine["stop"], aside)
        epochs.append({"epoch": epoch, **coverage.counts})
        for index, start, stop in coverage.missing[: MAX_PROBLEMS - len(missing)].tolist():
            missing.append({"epoch": epoch, "slice": index, "start": start, "stop": stop})
        for index, start, stop, which in coverage.repeated[: MAX_PROBLEMS - len(repeated)].tolist():
            interval = {"epoch": epoch, "slice": index, "start": start, "stop": stop}
            repeated.append({**interval, "entry": int(mine["seq"][which])})
    if replay is not None:
        _check_samples(reading, job, table, replay)
    intact = not reading.problems
    for e in epochs:
        num_aside = e.get("set_aside", 0)
        total = e["samples"] + e["missing"] + num_aside
        if num_aside > max_set_aside * total:
            reading.problem(
                f"epoch {e['epoch']}: {num_aside:,} of {total:,} samples were set aside and never used, more than the "
                f"share {max_set_aside:g} that is allowed (--max-set-aside)"
            )
    is_complete = all(e["missing"] == e["repeated"] == 0 for e in epochs)
    ok = is_complete and not reading.problems
    return LedgerReport(ok, intact, epochs, reading.problems, reading.entries, scheduler, missing, repeated)


def _check_samples(reading: _Reading, job: Job, table: Array, replay: Replay) -> None:
    """Check by sample ids: the digest of each use, and that no sample of a slice is used twice in an epoch."""
    for row, digest in reading.digests.items():
        use = table[row]
        _, expected = replay(job, *(int(use[name]) for name in ("epoch", "slice", "start", "stop")))
        if expected != digest:
            reading.problem(
                f"entry {use['seq']} (uses): samples [{use['start']}, {use['stop']}) of slice {use['slice']} in epoch "
                f"{use['epoch']} have the receipt {expected}, the worker signed {digest}: it read other samples"
            )
    order = np.lexsort((table["start"], table["slice"], table["epoch"]))
    edges = np.flatnonzero(np.diff(table["slice"][order], prepend=-1) | np.diff(table["epoch"][order], prepend=-1))
    for group in np.split(order, edges[1:]) if len(order) else []:
        epoch = int(table["epoch"][group[0]])
        index = int(table["slice"][group[0]])
        seen = np.zeros(int(job.samples[index]), np.int32)
        for row in group:
            ids, _ = replay(job, epoch, index, int(table["start"][row]), int(table["stop"][row]))
            seen[ids] += 1
        if (seen > 1).any():
            which = np.flatnonzero(seen > 1)
            reading.problem(f"epoch {epoch}: {len(which)} samples of slice {index} used twice, from {which[0]} on")


@dataclass(frozen=True, eq=False)
class Coverage:
    """The uses of an epoch's samples."""

    counts: dict[str, int]  # samples (repeated uses included), missing, repeated; set_aside if any.
    missing: I64  # (slice, start, stop): neither used nor set aside. int64 [M, 3].
    repeated: I64  # (slice, start, stop, which use): used before by another. int64 [R, 4].


def cover(samples: I64, slices: I64, starts: I64, stops: I64, aside: Iterable[tuple[int, int, int]]) -> Coverage:
    """The coverage of slices with `samples` [S] by non-empty uses [N] in any order.

    `aside` has (slice, start, stop), in any order. All must lie within their slices.
    """
    base = np.concatenate([[0], np.cumsum(samples)]).astype(np.int64)
    order = np.argsort(base[slices] + starts, kind="stable")
    low = (base[slices] + starts)[order]
    high = (base[slices] + stops)[order]
    reached = _reached(high)
    num_used = int(np.maximum(high - np.maximum(low, reached), 0).sum())
    again = np.flatnonzero(low < reached)
    twice = slices[order[again]]
    twice_stops = np.minimum(high[again], reached[again])
    repeated = np.stack([twice, low[again] - base[twice], twice_stops - base[twice], order[again]], axis=1)
    rows = np.array(list(aside), np.int64).reshape(-1, 3)
    missing = _gaps(
        np.concatenate([low, base[rows[:, 0]] + rows[:, 1]]),
        np.concatenate([high, base[rows[:, 0]] + rows[:, 2]]),
        base,
    )
    num_missing = int((missing[:, 2] - missing[:, 1]).sum())
    total = int((high - low).sum())
    counts = {"samples": total, "missing": num_missing, "repeated": total - num_used}
    if num_aside := int(base[-1]) - num_used - num_missing:  # samples that were set aside and used count as used
        counts["set_aside"] = num_aside
    return Coverage(counts, missing, repeated)


def _reached(stops: I64) -> I64:
    """For intervals sorted by start: the largest stop of all intervals before each."""
    return np.maximum.accumulate(np.concatenate([[0], stops]).astype(np.int64))[:-1]


def _gaps(starts: I64, stops: I64, base: I64) -> I64:
    """(slice, start, stop) of the samples outside of intervals; slice i has the samples [base[i], base[i + 1])."""
    # An empty interval at each end of a slice cuts the gaps there.
    starts = np.concatenate([starts, base])
    stops = np.concatenate([stops, base])
    order = np.argsort(starts, kind="stable")
    low = _reached(stops[order])
    high = starts[order]
    low, high = low[low < high], high[low < high]
    of = np.searchsorted(base, low, "right") - 1
    return np.stack([of, low - base[of], high - base[of]], axis=1)
