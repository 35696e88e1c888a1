"""The contents of a ledger: its first entry, the job; and its uses as a table, by worker and session.

Cost of `open_index`: one pass over the file, 15 us an entry.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from forebay.arrays import I64, Array
from forebay.errors import LedgerError
from forebay.ledger.chain import Entry, Used, read_entries, uses_of

LEDGER_FORMAT = 3  # in the job entry; earlier ones had no certificates, format 1 also another order of samples


@dataclass(frozen=True, eq=False)
class Job:
    """A job."""

    job_id: str  # the hash of the first entry
    body: dict[str, Any]
    scheduler: bytes  # the public key, 32 bytes
    samples: I64  # int64 [S], the samples of each slice
    first_ids: I64  # int64 [S], the id of its first sample; ids count the dataset, splits skip some
    dataset_id: str

    @classmethod
    def of(cls, entry: Entry) -> "Job":
        """The job of a ledger's first entry. Raises LedgerError if it is not one."""
        if entry.kind != "job" or entry.seq != 0:
            raise LedgerError(f"ledger entry {entry.seq}: expected kind job first and once, got {entry.kind}")
        body = entry.body
        if body.get("format") != LEDGER_FORMAT:
            raise LedgerError(
                f"ledger entry 0: expected format {LEDGER_FORMAT}, got {body.get('format', 'none')!r}. It was written "
                "by another version. Verify it with that version, or start in a new directory."
            )
        try:
            scheduler = bytes.fromhex(str(body.get("scheduler", "")))
        except ValueError:
            raise LedgerError("ledger entry 0: expected the scheduler's key in hex") from None
        samples = decode_runs(body.get("samples_per_slice"))
        skipped = decode_runs(body.get("skipped_samples", [[0, len(samples)]]))
        if len(skipped) != len(samples):
            raise LedgerError(f"ledger entry 0: expected skipped_samples of {len(samples)} slices, got {len(skipped)}.")
        first_ids = samples.cumsum() - samples + skipped.cumsum()
        return cls(entry.hash, body, scheduler, samples, first_ids, str(body.get("dataset_id", "")))

    @property
    def seed(self) -> int:
        """The seed of the samples' order."""
        return int(self.body.get("seed", 0))


Asides = dict[tuple[int, int], list[tuple[int, int, int]]]
"""(epoch, slice) to the ranges set aside: (slice, start, stop)."""


def apply_aside(entry: Entry, job: Job, aside: Asides, ended: Container[int]) -> None:
    """Apply an entry of kind set_aside or readmitted to `aside`. The latter counts for all epochs but those ended.

    LedgerError if the samples are not in the job.
    """
    index = entry.body["slice"]
    epoch = entry.body.get("epoch")
    if type(index) is not int or not 0 <= index < len(job.samples):
        raise LedgerError(f"expected counts, got {entry.body}")
    if entry.kind == "readmitted":
        for key in [k for k in aside if k[1] == index and k[0] not in ended]:
            del aside[key]
        return
    start = entry.body["start"]
    stop = entry.body["stop"]
    if not (type(epoch) is type(start) is type(stop) is int and 0 <= start < stop <= job.samples[index]):
        raise LedgerError(f"samples [{start}, {stop}) of slice {index} in epoch {epoch} are not in the dataset")
    aside.setdefault((epoch, index), []).append((index, start, stop))


MAX_SLICES = 100_000_000


def encode_runs(counts: I64) -> list[list[int]]:
    """The run-length form [[count, run], …] of an int64 array: a few bytes for any number of equal slices."""
    return [[count, sum(1 for _ in run)] for count, run in groupby(counts.tolist())]


def decode_runs(runs: Any) -> I64:
    """The inverse of `encode_runs`; also accepts a plain list of counts."""
    message = "ledger: expected samples_per_slice as counts or [count, run] pairs"
    if not isinstance(runs, list):
        raise LedgerError(f"{message}, got {type(runs).__name__}.")
    pairs = [r if isinstance(r, list) else [r, 1] for r in runs]
    for pair in pairs:
        if len(pair) != 2 or not all(type(v) is int and 0 <= v < 2**62 for v in pair):
            raise LedgerError(f"{message}, got {pair!r}.")
    if sum(pair[1] for pair in pairs) > MAX_SLICES:
        raise LedgerError(f"{message} of at most {MAX_SLICES} slices, got more.")
    counts, repeats = np.array(pairs, np.int64).reshape(-1, 2).T
    return np.repeat(counts, repeats)


USE = np.dtype(
    [(name, "<i8") for name in ("seq", "worker", "epoch", "slice", "start", "stop", "step", "session")]
    + [("at", "<f8")]
)
"""A use: `worker` is an index into the workers, `session` into their sessions (each numbers its own steps); `seq` is
the entry; `at` is in unix seconds."""
_BLOCK = 1 << 16


@dataclass
class UseColumns:
    """A growing table of uses. `workers`: peer ids; `sessions`: peer id, a space, name; both numbered by first use."""

    workers: dict[str, int] = field(default_factory=dict)
    sessions: dict[str, int] = field(default_factory=dict)
    _blocks: list[Array] = field(default_factory=list)
    _rows: list[tuple[float, ...]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._blocks) * _BLOCK + len(self._rows)

    def add(self, entry: Entry, worker: str, use: Used) -> None:
        """Add one use of an entry."""
        number = self.workers.setdefault(worker, len(self.workers))
        session = self.sessions.setdefault(f"{worker} {entry.body.get('session', '')}", len(self.sessions))
        self._rows.append(
            (entry.seq, number, use.epoch, use.slice, use.start, use.stop, use.step, session, entry.recorded_at)
        )
        if len(self._rows) == _BLOCK:
            self._blocks.append(np.array(self._rows, USE))
            self._rows = []

    def table(self) -> Array:
        """All uses, of dtype USE, in the order of adding."""
        return np.concatenate([np.empty(0, USE), *self._blocks, np.array(self._rows, USE)])


@dataclass(frozen=True, eq=False)
class LedgerIndex:
    """The contents of a ledger."""

    path: Path
    job: Job
    uses: Array  # Its dtype is USE. In the order of the ledger, within an entry by step. `worker` counts `workers`.
    workers: tuple[str, ...]  # Peer ids, in the order of their first uses.
    sessions: tuple[str, ...]  # Peer id, a space, and a session's name; likewise.
    names: dict[str, str]  # Peer id to the worker's name.


def open_index(path: str | Path) -> LedgerIndex:
    """Read a ledger. Raises LedgerError if it cannot be read."""
    path = Path(path)
    job: Job | None = None
    columns = UseColumns()
    names = dict[str, str]()
    try:
        for entry in read_entries(path):
            if entry.seq == 0:
                job = Job.of(entry)
            elif entry.kind == "uses":
                for use in sorted(uses_of(entry), key=lambda use: use.step):
                    columns.add(entry, str(entry.body["worker"]), use)
            elif entry.kind == "worker":
                names[str(entry.body.get("worker"))] = str(entry.body.get("name", ""))
    except OSError as error:
        raise LedgerError(f"ledger {path}: cannot read it: {error}. Give the file: ledger.jsonl.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"ledger {path}: expected the entries that a scheduler writes, got {error!r}. Run `forebay ledger verify`."
        ) from None
    if job is None:
        raise LedgerError(f"ledger {path}: expected a job entry first, got none.")
    return LedgerIndex(path, job, columns.table(), tuple(columns.workers), tuple(columns.sessions), names)
