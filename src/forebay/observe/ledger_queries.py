"""Queries on a ledger: from a step to the samples, documents and workers of its batch; from a document to all workers
that used it; and all uses as a table.

A worker uses one lease after the other, one batch of consecutive samples per step, so samples acknowledged at step b
after step a were used in steps (a, b]; a batch that goes on in the next lease has a use of its own there. Its batch
size, derived from its receipts, gives the exact samples of each step.
Sample ids are a pure function of the job's seed, epoch and slice.

A coordinator's log of steps is its SQLite file (`coordinator/store.py`); the samples of a step are a pure function and
need no record. The file may be read while a coordinator runs: a copy of it and its WAL is opened.

Cost: 0.1 s for a million uses, besides reading the ledger, and the pages that are read of a few slices.
"""

import json
import shutil
import tempfile
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from forebay.arrays import I64, Array
from forebay.coordinator.store import ROSTER_NAME, RunStore
from forebay.dataset.documents import DocumentRange, Documents
from forebay.errors import LedgerError, StateError, UsageError
from forebay.files import open_atomic, remove_stale
from forebay.ledger.index import Job, LedgerIndex
from forebay.order.bijection import derive_key, inverse
from forebay.order.plan import lease_order
from forebay.order.shard_windows import receipt

_BLOCK = 1 << 14  # rows
_MAGIC = b"SQLite format 3\0"
_TRIES = 50
_COUNTS = ("epoch", "slice", "start", "stop", "step")


@dataclass(frozen=True)
class BatchShare:
    """The samples that one worker used in a step, or of a document."""

    worker: str  # Peer id.
    name: str
    session: str  # The worker's process, if it has several: each numbers its own steps.
    epoch: int
    slice: int
    start: int  # Positions in the slice's order of that epoch.
    stop: int
    first_step: int  # Used in one of the worker's steps [first_step, last_step].
    last_step: int
    recorded_at: float  # Unix seconds of the receipt.
    entry: int  # Of the ledger.
    exact: bool = True  # False: the samples belong to these steps; which of them to the requested step is unknown.
    samples: list[int] = field(default_factory=list)  # Global sample ids, over all slices of the job.
    # Of the samples, one after another; empty without a dataset.
    documents: list[DocumentRange] = field(default_factory=list)


def replay(job: Job, epoch: int, slice_index: int, start: int, stop: int) -> tuple[I64, str]:
    """The sample indexes (within the slice) of a use, and the receipt of their global ids: `Used.digest`."""
    ids = lease_order(job.seed, epoch, slice_index, int(job.samples[slice_index]), start, stop)
    return ids, receipt((ids + job.first_ids[slice_index]).astype(np.uint64))[0]


def steps_before(uses: Array) -> I64:
    """For each use the last earlier step of the same session: 0 where the session started or restarted.

    A batch with samples of two leases has two uses that end with its step: the second has this step only.
    """
    order = np.argsort(uses["session"], kind="stable")
    sessions, steps = uses["session"][order], uses["step"][order]
    before = np.concatenate([[0], steps[:-1]])
    before[np.concatenate([[True], sessions[1:] != sessions[:-1]])[: len(before)]] = 0
    before = np.where(before == steps, steps - 1, np.where(before < steps, before, 0))
    result = np.empty(len(uses), np.int64)
    result[order] = before[: len(uses)]
    return result


def batch_sizes(uses: Array, before: I64, num_sessions: int) -> I64:
    """The batch size of each session, int64 [S], derived from the samples and steps of its uses.

    Only a use's last batch may be short. 0 if no single size fits: a session that restarted with another size.
    """
    counts, steps, sessions = uses["stop"] - uses["start"], uses["step"] - before, uses["session"]
    min_sizes, max_sizes = np.zeros(num_sessions, np.int64), np.full(num_sessions, np.iinfo(np.int64).max)
    np.maximum.at(min_sizes, sessions, -(-counts // steps))
    many = steps > 1
    np.minimum.at(max_sizes, sessions[many], (counts[many] - 1) // (steps[many] - 1))
    return np.where(min_sizes <= max_sizes, min_sizes, 0)


def blame_step(
    index: LedgerIndex, step: int, *, worker: str = "", documents: Documents | None = None
) -> list[BatchShare]:
    """The shares of a step of leasing workers. `documents` are of the job's dataset.

    Steps are numbered per worker (given by its peer id, a prefix of it, or its name); without one, all workers count.
    """
    uses = index.uses
    before = steps_before(uses)
    is_mine = np.isin(uses["worker"], _workers(index, worker))
    rows = np.flatnonzero((before < step) & (uses["step"] >= step) & is_mine)
    if not len(rows):
        raise UsageError(
            f"blame: step {step} is not in {index.path}; {'this worker' if worker else 'the longest'} got to "
            f"{int(uses['step'][is_mine].max(initial=0))}. Steps count from 1; only acknowledged samples are listed."
        )
    sizes = batch_sizes(uses, before, len(index.sessions))
    return [_narrowed(index, int(row), before, sizes, step, documents) for row in rows]


def _workers(index: LedgerIndex, worker: str) -> list[int]:
    """The numbers of the selected workers: one, or all for an empty name."""
    if not worker:
        return list(range(len(index.workers)))
    names = index.names
    numbers = [n for n, peer in enumerate(index.workers) if names.get(peer) == worker or peer == worker]
    numbers = numbers or [n for n, peer in enumerate(index.workers) if peer.startswith(worker)]
    if len(numbers) != 1:
        listed = ", ".join(f"{names.get(peer, '')} ({peer})" for peer in index.workers[:8])
        raise UsageError(f"blame: expected one worker {worker!r}, got {len(numbers)}. Workers: {listed}.")
    return numbers


def _part(index: LedgerIndex, row: int, before: I64, sizes: I64) -> tuple[BatchShare, int]:
    """All of a use, and the batch size of its session."""
    use = index.uses[row]
    peer = index.workers[int(use["worker"])]
    share = BatchShare(
        peer, index.names.get(peer, ""), index.sessions[int(use["session"])].partition(" ")[2], int(use["epoch"]),
        int(use["slice"]), int(use["start"]), int(use["stop"]), int(before[row]) + 1, int(use["step"]),
        float(use["at"]), int(use["seq"]),
    )  # fmt: skip
    return share, int(sizes[use["session"]])


def _narrowed(
    index: LedgerIndex, row: int, before: I64, sizes: I64, step: int, documents: Documents | None
) -> BatchShare:
    """The samples of one step among those of a use."""
    share, size = _part(index, row, before, sizes)
    start, stop, exact = share.start, share.stop, share.first_step == share.last_step
    if size and not exact:
        start = min(stop, start + (step - share.first_step) * size)
        stop, exact = min(stop, start + size), True
    ids, _ = replay(index.job, share.epoch, share.slice, start, stop)
    steps = (step, step) if exact else (share.first_step, share.last_step)
    pieces = []
    if documents is not None:
        _check_plain(index.job)
        length = _seq_len(index.job)
        pieces = [
            piece
            for sample in (ids.tolist() if length else ())
            for piece in documents.pieces(share.slice, sample * length, (sample + 1) * length)
        ]
    return replace(
        share, start=start, stop=stop, exact=exact, first_step=steps[0], last_step=steps[1],
        samples=(ids + index.job.first_ids[share.slice]).tolist(), documents=pieces,
    )  # fmt: skip


def _seq_len(job: Job) -> int:
    """Tokens of a sample; 0 of rows."""
    return int(job.body.get("seq_len") or 0) if job.body.get("layout", "tokens") == "tokens" else 0


def _check_plain(job: Job) -> None:
    """Raise UsageError for samples that are no consecutive tokens of whole slices."""
    for name in ("packing", "documents", "split"):
        if value := job.body.get(name):
            raise UsageError(
                f"blame: expected a job without {name}, got {value!r}: its samples are not tokens by their number. "
                "Find its documents by Loader.documents(batch), with the job's settings and the batch's sample ids."
            )


def who_saw(index: LedgerIndex, slice_index: int, start: int, stop: int) -> list[BatchShare]:
    """Every use, in all epochs, of samples with any of tokens (or rows) [start, stop) of a slice, by time.

    Slices are numbered over all datasets of the job.
    """
    job, uses = index.job, index.uses
    _check_plain(job)
    if not 0 <= slice_index < len(job.samples) or not 0 <= start < stop:
        raise UsageError(f"who: expected a slice of {len(job.samples)} and A:B, got {slice_index} and {start}:{stop}.")
    count = int(job.samples[slice_index])
    seq_len = _seq_len(job) or 1
    samples = np.arange(start // seq_len, min(count, -(-stop // seq_len)), dtype=np.uint64)
    base = int(job.first_ids[slice_index])
    rows = np.flatnonzero(uses["slice"] == slice_index)
    before = steps_before(uses)
    sizes = batch_sizes(uses, before, len(index.sessions))
    shares = []
    for epoch in np.unique(uses["epoch"][rows]).tolist():
        places = inverse(samples, count, derive_key(job.seed, "lease", epoch, slice_index)).astype(np.int64)
        order = np.argsort(places, kind="stable")
        places, ids = places[order], samples[order]
        for row in rows[uses["epoch"][rows] == epoch].tolist():
            low, high = np.searchsorted(places, [uses["start"][row], uses["stop"][row]])
            if low == high:
                continue
            (share, size), used = _part(index, row, before, sizes), ids[low:high].astype(np.int64) + base
            if not size:  # Which of its steps is not known.
                is_exact = share.first_step == share.last_step
                shares.append(replace(share, exact=is_exact, samples=used.tolist()))
                continue
            steps = share.first_step + (places[low:high] - share.start) // size
            for step in np.unique(steps).tolist():
                samples_of_step = used[steps == step].tolist()
                shares.append(replace(share, first_step=step, last_step=step, samples=samples_of_step))
    return sorted(shares, key=lambda part: (part.recorded_at, part.first_step))


def export_uses(index: LedgerIndex, out: str | Path, *, sample_ids: bool) -> int:
    """Write one row per use, as Parquet if `out` ends so and else as JSON lines; return their number.

    `sample_ids` adds a column `samples`: the global ids in the order of reading. It costs 20 ns a sample, and 8 bytes
    before compression.
    """
    remove_stale(Path(out).parent)
    blocks = (_block(index, first, sample_ids) for first in range(0, len(index.uses), _BLOCK))
    with open_atomic(out) as file:
        if Path(out).suffix == ".parquet":
            schema = _block(index, 0, sample_ids, num=0).schema
            with pq.ParquetWriter(file, schema, compression="zstd") as writer:
                for block in blocks:
                    writer.write_table(block)
        else:
            for block in blocks:
                for row in block.to_pylist():
                    file.write(json.dumps({**row, "at": row["at"].timestamp()}).encode() + b"\n")
    return len(index.uses)


def _block(index: LedgerIndex, first: int, sample_ids: bool, num: int = _BLOCK) -> pa.Table:
    job, uses = index.job, index.uses[first : first + num]
    peers = [index.workers[worker] for worker in uses["worker"].tolist()]
    columns = {
        "entry": pa.array(uses["seq"]),
        "at": pa.array((uses["at"] * 1000).round().astype("int64"), pa.timestamp("ms", "UTC")),
        "worker": pa.array(peers, pa.string()),
        "name": pa.array([index.names.get(peer, "") for peer in peers], pa.string()),
        "dataset_id": pa.array([job.dataset_id] * len(uses), pa.string()),
        **{name: pa.array(uses[name]) for name in _COUNTS},
    }
    if sample_ids:
        samples = [replay(job, *use)[0] + job.first_ids[use[1]] for use in uses[list(_COUNTS[:4])].tolist()]
        columns["samples"] = pa.array(samples, pa.list_(pa.int64()))
    return pa.table(columns)


def is_roster(path: Path) -> bool:
    """Whether a path is a coordinator's state: its directory, or the file in it."""
    path = path / ROSTER_NAME if path.is_dir() else path
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


@dataclass(frozen=True)
class StepsReport:
    """Result of `verify_steps`; `epochs` has one dict: samples, missing, repeated, redone (by a later generation)."""

    ok: bool
    epochs: list[dict[str, int]]
    problems: list[str]
    generations: int
    steps: int


def _copy(path: Path, directory: Path) -> None:
    """Copy the file and its WAL at one moment; retry if a coordinator wrote meanwhile."""
    files = [path, path.with_name(path.name + "-wal")]
    for _ in range(_TRIES):
        before = _stamps(files)
        for file in files:
            copy = directory / file.name.replace(path.name, ROSTER_NAME)
            copy.unlink(missing_ok=True)
            if file.exists():
                shutil.copyfile(file, copy)
        if _stamps(files) == before:
            return
    raise LedgerError(f"{path}: it changes while it is read. Ask the coordinator (GET /v1/log), or stop it first.")


def _stamps(files: list[Path]) -> list[tuple[int, int]]:
    return [(stat.st_size, stat.st_mtime_ns) for stat in (file.stat() for file in files if file.exists())]


def verify_steps(path: Path) -> StepsReport:
    """Verify that each global sample from the first on was used once by the steps that count.

    A generation's steps count up to the start of the next one. Cost: one pass over the log's rows.
    """
    path = path / ROSTER_NAME if path.is_dir() else path
    with tempfile.TemporaryDirectory() as directory:
        try:
            _copy(path, Path(directory))
            with closing(RunStore(directory)) as roster:
                generations, rows = roster.generations(), roster.rows()
        except (OSError, StateError) as error:
            raise LedgerError(f"{path}: cannot read the coordinator's log: {error}.") from error
    end_steps: dict[int, int | None] = {}
    first_later_step = None
    for generation in reversed(generations):
        end_steps[generation["number"]] = first_later_step
        start = int(generation["start_step"])
        first_later_step = start if first_later_step is None else min(first_later_step, start)
    problems = []
    samples = missing = repeated = redone = steps = 0
    next_step = next_sample = 0
    for number, start, stop, first_sample, count in rows:
        if number not in end_steps or not 0 <= start < stop or count < 0:
            problems.append(f"steps [{start}, {stop}) of generation {number}: there is no such generation or step")
            continue
        end = end_steps[number]
        counted_stop = stop if end is None else max(start, min(stop, end))
        redone += (stop - counted_stop) * count
        if counted_stop == start:
            continue
        if start != next_step:
            problems.append(f"generation {number}: step {start} follows, expected step {next_step}")
        gap = first_sample - next_sample
        missing, repeated = missing + max(gap, 0), repeated + max(-gap, 0)
        samples += (counted_stop - start) * count
        steps += counted_stop - start
        next_step, next_sample = counted_stop, max(next_sample, first_sample + (counted_stop - start) * count)
    epoch = {"epoch": 0, "samples": samples, "missing": missing, "repeated": repeated, "redone": redone}
    ok = not problems and not missing and not repeated and steps > 0
    return StepsReport(ok, [epoch], problems, len(generations), steps)
