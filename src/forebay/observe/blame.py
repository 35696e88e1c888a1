"""From a step to the samples and documents of its batch and who used them; and from a document to all who saw it.

Lease mode asks a ledger's index. A worker takes one lease after the other, a batch of consecutive samples a step, so
that what it acknowledged at step b after step a it used in steps (a, b]; with its batch size, as its receipts show it,
a step's samples are known to the sample. Which samples those are is a pure function of the job's seed, epoch and slice.

Cost: 0.1 s for an index of a million uses, and what is read of the dataset: a few slices' pages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.documents import DocumentRange, Documents
from forebay.errors import UsageError
from forebay.ledger.index import LedgerIndex
from forebay.ledger.job import Job
from forebay.order.bijection import derive_key, inverse
from forebay.order.plan import lease_order, part_of
from forebay.order.run import Run
from forebay.order.shard_windows import receipt

I64 = NDArray[np.int64]
AROUND = 20


@dataclass(frozen=True)
class Part:
    """What one worker, or rank, did in a step, or with a document."""

    worker: str  # Peer id; "" where only the order is known, or the name that a coordinator knows it by.
    name: str = ""
    rank: int = -1  # In order mode; -1 otherwise.
    epoch: int = 0
    slice: int = -1  # Over all datasets of the job; -1 where samples are of several.
    start: int = -1  # Where the samples stand in the slice's order of that epoch.
    stop: int = -1
    first_step: int = 0  # In one of the steps [first_step, last_step], of that worker's own in lease mode.
    last_step: int = 0
    at: float = 0.0  # Unix seconds of the receipt; 0 where there is none.
    entry: int = -1  # Of the ledger; -1 where there is none.
    exact: bool = True  # False: the samples are of these steps, and which are of the step asked for is not known.
    samples: list[int] = field(default_factory=list)  # Global sample ids, over all slices of the job.
    documents: list[DocumentRange] = field(
        default_factory=list
    )  # Of the samples, one after another; empty without a dataset.
    session: str = ""  # Which process of the worker, where it says so: its steps are numbered by themselves.


def replay(job: Job, epoch: int, slice_index: int, start: int, stop: int) -> tuple[I64, str]:
    """The samples, counted in their slice, of a use, and the receipt of their global ids: `Used.digest`."""
    ids = lease_order(job.seed, epoch, slice_index, int(job.samples[slice_index]), start, stop)
    base = int(job.samples[:slice_index].sum())
    return ids, receipt((ids + base).astype(np.uint64))[0]


def steps_before(uses: NDArray[Any]) -> I64:
    """For each use the last step before it of the same session: 0 where the session began, or began again."""
    order = np.argsort(uses["session"], kind="stable")
    sessions, steps = uses["session"][order], uses["step"][order]
    before = np.concatenate([[0], steps[:-1]])
    before[np.concatenate([[True], sessions[1:] != sessions[:-1]])[: len(before)]] = 0
    before = np.where(before < steps, before, 0)
    found = np.empty(len(uses), np.int64)
    found[order] = before[: len(uses)]
    return found


def batch_sizes(uses: NDArray[Any], before: I64, num_sessions: int) -> I64:
    """The batch size of each session, int64 [S]: what explains how many samples its uses took in how many steps.

    Only a use's last batch may be short. 0 if no single size explains them: a session that began again with another.
    """
    counts, steps, sessions = uses["stop"] - uses["start"], uses["step"] - before, uses["session"]
    least, most = np.zeros(num_sessions, np.int64), np.full(num_sessions, np.iinfo(np.int64).max)
    np.maximum.at(least, sessions, -(-counts // steps))
    many = steps > 1
    np.minimum.at(most, sessions[many], (counts[many] - 1) // (steps[many] - 1))
    found: I64 = np.where(least <= most, least, 0)
    return found


@dataclass(frozen=True)
class Blame:
    """`parts`: who used what in a step; `more`: how many more workers did; `around`: what others used at that time."""

    parts: list[Part]
    more: int = 0
    around: list[Part] = field(default_factory=list)


def blame_step(
    index: LedgerIndex,
    step: int,
    *,
    worker: str = "",
    documents: Mapping[str, Documents] | None = None,
    text: bool = True,
    limit: int = 64,
) -> Blame:
    """Who used what in a step of lease mode; at most `limit` workers. `documents` are of the job's datasets, by id.

    Steps are a worker's own (its peer id, a beginning of it, or name): without one, all workers' are meant.
    """
    uses, numbers = index.uses, _workers(index, worker)
    before = steps_before(uses)
    hit = (before < step) & (uses["step"] >= step)
    if numbers is not None:
        hit &= np.isin(uses["worker"], numbers)
    rows = np.flatnonzero(hit)
    if not len(rows):
        mine = uses["step"] if numbers is None else uses["step"][np.isin(uses["worker"], numbers)]
        raise UsageError(
            f"blame: step {step} is not in {index.path}; {'this worker' if numbers is not None else 'the longest'} "
            f"got to {int(mine.max()) if len(mine) else 0}. Steps count from 1; what was not acknowledged is not there."
        )
    sizes = batch_sizes(uses, before, len(index.sessions))
    parts = [_narrowed(index, int(row), before, sizes, step, documents or {}, text) for row in rows[:limit]]
    if numbers is None:
        return Blame(parts, max(0, len(rows) - limit))
    at = float(uses["at"][rows[0]])
    others = np.flatnonzero(~np.isin(uses["worker"], numbers))
    near = others[np.argsort(np.abs(uses["at"][others] - at), kind="stable")[:AROUND]]
    return Blame(parts, max(0, len(rows) - limit), [_part(index, int(row), before) for row in np.sort(near)])


def _workers(index: LedgerIndex, worker: str) -> list[int] | None:
    """The numbers of the workers meant; None for all."""
    if not worker:
        return None
    names = index.names
    found = [n for n, peer in enumerate(index.workers) if names.get(peer) == worker or peer == worker]
    found = found or [n for n, peer in enumerate(index.workers) if peer.startswith(worker)]
    if len(found) != 1:
        known = ", ".join(f"{names.get(peer, '')} ({peer})" for peer in index.workers[:8])
        raise UsageError(f"blame: expected one worker {worker!r}, got {len(found)}. There are {known}.")
    return found


def _part(index: LedgerIndex, row: int, before: I64) -> Part:
    use = index.uses[row]
    peer = index.workers[int(use["worker"])]
    return Part(
        peer, index.names.get(peer, ""), -1, int(use["epoch"]), int(use["slice"]), int(use["start"]),
        int(use["stop"]), int(before[row]) + 1, int(use["step"]), float(use["at"]), int(use["seq"]),
        session=index.sessions[int(use["session"])].partition(" ")[2],
    )  # fmt: skip


def _narrowed(
    index: LedgerIndex,
    row: int,
    before: I64,
    sizes: I64,
    step: int,
    documents: Mapping[str, Documents],
    text: bool,
) -> Part:
    """The samples of one step among those of a use."""
    whole, size = _part(index, row, before), int(sizes[index.uses["session"][row]])
    start, stop, exact = whole.start, whole.stop, whole.first_step == whole.last_step
    if size and not exact:
        start = min(stop, start + (step - whole.first_step) * size)
        stop, exact = min(stop, start + size), True
    ids, _ = replay(index.job, whole.epoch, whole.slice, start, stop)
    base = int(index.job.samples[: whole.slice].sum())
    steps = (step, step) if exact else (whole.first_step, whole.last_step)
    return replace(
        whole, start=start, stop=stop, exact=exact, first_step=steps[0], last_step=steps[1],
        samples=(ids + base).tolist(), documents=_documents_of(index.job, documents, whole.slice, ids.tolist(), text),
    )  # fmt: skip


def _documents_of(
    job: Job, documents: Mapping[str, Documents], slice_index: int, samples: Sequence[int], text: bool
) -> list[DocumentRange]:
    dataset = job.dataset_of(slice_index)
    known, seq_len = documents.get(job.dataset_ids[dataset]), job.body.get("seq_len")
    if known is None or not seq_len or job.body.get("layout", "tokens") != "tokens":
        return []
    return known.of_samples(slice_index - job.bounds[dataset], samples, int(seq_len), text=text)


def who_saw(index: LedgerIndex, slice_index: int, start: int, stop: int) -> list[Part]:
    """Every use, in all epochs, of a sample that holds any of tokens [start, stop) (or rows) of a slice; by time.

    Slices count over all datasets of the job.
    """
    job, uses = index.job, index.uses
    if not 0 <= slice_index < len(job.samples) or not 0 <= start < stop:
        raise UsageError(f"who: expected a slice of {len(job.samples)} and A:B, got {slice_index} and {start}:{stop}.")
    count = int(job.samples[slice_index])
    seq_len = int(job.body.get("seq_len") or 1) if job.body.get("layout", "tokens") == "tokens" else 1
    samples = np.arange(start // seq_len, min(count, -(-stop // seq_len)), dtype=np.uint64)
    base = int(job.samples[:slice_index].sum())
    rows = np.flatnonzero(uses["slice"] == slice_index)
    before = steps_before(uses)
    sizes = batch_sizes(uses, before, len(index.sessions))
    found: list[Part] = []
    for epoch in np.unique(uses["epoch"][rows]).tolist():
        places = inverse(samples, count, derive_key(job.seed, "lease", epoch, slice_index)).astype(np.int64)
        order = np.argsort(places, kind="stable")
        places, ids = places[order], samples[order]
        for row in rows[uses["epoch"][rows] == epoch].tolist():
            low, high = np.searchsorted(places, [uses["start"][row], uses["stop"][row]])
            if low < high:
                found += _by_step(index, row, before, sizes, places[low:high], ids[low:high].astype(np.int64) + base)
    return sorted(found, key=lambda part: (part.at, part.first_step))


def _by_step(index: LedgerIndex, row: int, before: I64, sizes: I64, places: I64, ids: I64) -> list[Part]:
    """A use's samples at these places, step by step where the batch size is known."""
    whole, size = _part(index, row, before), int(sizes[index.uses["session"][row]])
    if not size:
        return [replace(whole, exact=whole.first_step == whole.last_step, samples=ids.tolist())]
    steps = whole.first_step + (places - whole.start) // size
    return [
        replace(whole, first_step=step, last_step=step, samples=ids[steps == step].tolist())
        for step in np.unique(steps).tolist()
    ]


def blame_order(
    run: Run,
    step: int,
    *,
    world_size: int = 1,
    workers: Sequence[str] = (),
    documents: Documents | None = None,
    seq_len: int | None = None,
    text: bool = True,
) -> list[Part]:
    """What each rank took at a run step of a Loader: no record is needed, the order is a pure function.

    The run is of one dataset, of consecutive tokens or rows; `workers` are by rank, if known. Without documents and
    seq_len of the dataset, slices and samples only.
    """
    taken = run.steps(step, step + 1, 0, 1)
    counts = run.orders[0].samples_per_slice
    base = np.cumsum(counts) - counts
    ids = base[taken.slices] + taken.samples
    place = run.progress(step)
    parts = []
    for rank in range(world_size):
        low, high = part_of(len(ids), rank, world_size)
        pieces = [
            piece
            for index, sample in zip(taken.slices[low:high].tolist(), taken.samples[low:high].tolist())
            for piece in (documents.of_samples(index, [sample], seq_len, text=text) if documents and seq_len else ())
        ]
        name = workers[rank] if rank < len(workers) else ""
        parts.append(
            Part(name, name, rank, place.epoch, first_step=step, last_step=step, samples=ids[low:high].tolist(),
                 documents=pieces)
        )  # fmt: skip
    return parts
