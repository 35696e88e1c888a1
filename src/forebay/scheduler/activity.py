"""Events and usage of a running job, for its log and status: usage and waits of workers, uses, and coverage.

Nothing of it is persisted or decides anything. Memory: some 4 KB a worker that was seen.
"""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from forebay.base import Json
from forebay.lease.messages import WorkerStats
from forebay.network.peer import Peer
from forebay.scheduler import events
from forebay.scheduler.events import Event
from forebay.scheduler.leases import LeaseTable

RATE_SPAN_S = 30.0  # a worker's rate is its mean over this time
MAX_RECENT = 64  # uses of a worker from which its rate is computed
SHARE_SPAN_S = 10.0  # the shares of its time are over this time, and up to twice as much
MIN_SPAN_S = 5.0  # a shorter time says nothing: it is mostly the start, or the first slice after an outage
STATS_TTL_S = 60.0  # then what a process reported of itself is dropped
MAX_PROCESSES = 64  # processes of a worker whose reports are stored
MAX_EVENTS = 200
MAX_USES = 20
MAX_CELLS = 2048
log = logging.getLogger("forebay.scheduler")

_RETURNED = {
    "expired": "sent nothing for too long", "stalled": "acknowledged nothing for too long",
    "failed": "could not read a slice", "unheld": "ended without returning its lease", "revoked": "is revoked",
}  # fmt: skip


Report: TypeAlias = tuple[float, WorkerStats]
"""When it came, and what it says."""


class ProcessStats(NamedTuple):
    """The reports of one process: the last, and two earlier ones to compare it with."""

    base: Report
    middle: Report
    last: Report

    @property
    def elapsed_s(self) -> float:
        return self.last[0] - self.base[0]

    def shares(self) -> dict[str, float]:
        """The share of the time that each cause of waiting took; none before MIN_SPAN_S have passed."""
        if self.elapsed_s < MIN_SPAN_S:
            return {}
        waits = defaultdict[str, float](float)  # With that in progress, which may end as one of another cause.
        for sign, (_, stats) in ((1, self.last), (-1, self.base)):
            for cause, s in (*stats.waits_s.items(), (stats.waiting_for, stats.waiting_s)):
                waits[cause] += sign * s
        longer = {cause: s for cause, s in waits.items() if s > 0}
        share = max(0.0, min(1.0, sum(waits.values()) / self.elapsed_s))
        return {cause: round(share * s / sum(longer.values()), 4) for cause, s in longer.items()}


@dataclass(slots=True)
class WorkerUsage:
    """What a worker used since this scheduler started, and what its processes report of themselves."""

    name: str
    seen_at: float
    samples: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=deque)  # (time, tokens), MAX_RECENT at most
    recent_tokens: int = 0  # the tokens of `recent` together
    processes: dict[str, ProcessStats] = field(default_factory=dict)  # by session

    def add(self, samples: int, tokens: int, now: float) -> None:
        self.samples += samples
        self.recent.append((now, tokens))
        self.recent_tokens += tokens
        if len(self.recent) > 2 * MAX_RECENT:
            self.rate(now)  # Drops the oldest.

    def rate(self, now: float) -> float:
        """Tokens a second over the last RATE_SPAN_S."""
        recent = self.recent
        while recent and (recent[0][0] <= now - RATE_SPAN_S or len(recent) > MAX_RECENT):
            self.recent_tokens -= recent.popleft()[1]
        if len(recent) < 2:
            return 0.0
        return (self.recent_tokens - recent[0][1]) / max(0.1, now - recent[0][0])

    def add_stats(self, session: str, stats: WorkerStats, now: float) -> None:
        self.processes = {key: p for key, p in self.processes.items() if now - p.last[0] < STATS_TTL_S}
        if session not in self.processes and len(self.processes) >= MAX_PROCESSES:
            return
        report = now, stats
        base, middle, last = self.processes.get(session) or (report,) * 3
        if stats.busy_s < last[1].busy_s:  # It started again.
            base = middle = report
        elif now - middle[0] >= SHARE_SPAN_S:
            base, middle = middle, report
        self.processes[session] = ProcessStats(base, middle, report)

    def describe(self, now: float) -> Json:
        """The worker's part of the status; shares are means over its processes, bytes and batches are sums."""
        processes = [p for p in self.processes.values() if now - p.last[0] < STATS_TTL_S]
        latest = [p.last[1] for p in processes]
        waits: dict[str, float] = {}
        for process in processes:
            for cause, share in process.shares().items():
                waits[cause] = waits.get(cause, 0.0) + share / len(processes)
        measured = [process for process in processes if process.last[1].ideal_s]
        # Processes of one node may share a cache, and report the same one.
        caches = {(stats.cache_bytes, stats.cached_bytes) for stats in latest}
        return {
            "name": self.name, "samples": self.samples, "last_seen_s": round(now - self.seen_at, 3),
            "tokens_per_s": round(self.rate(now), 1), "processes": len(processes), "wait_shares": waits,
            "mfu": sum(
                (p.last[1].ideal_s - p.base[1].ideal_s) / max(p.elapsed_s, 1e-3) for p in measured
            ) / len(measured) if measured else None,
            "cached_bytes": sum(cached for _, cached in caches), "cache_bytes": sum(size for size, _ in caches),
            **{
                name: sum(getattr(stats, name) for stats in latest)
                for name in ("batches", "origin_bytes", "peer_bytes", "shared_bytes")
            },
        }  # fmt: skip


class Activity:
    """The workers of a job, and what happened last. Not safe for threads."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerUsage] = {}
        self.revoked: set[str] = set()  # peer ids
        self._events = deque[Json](maxlen=MAX_EVENTS)
        self._uses = deque[Json](maxlen=MAX_USES)

    def notice(self, peer: Peer, now: float) -> WorkerUsage:
        """The usage of a worker that sent a request; the name of another has its peer id behind it."""
        usage = self.workers.get(peer.peer_id)
        if usage is None:
            is_taken = any(other.name == peer.name for other in self.workers.values())
            name = f"{peer.name} ({peer.peer_id})" if is_taken else peer.name
            usage = self.workers[peer.peer_id] = WorkerUsage(name, now)
            self._add("info", f"{self._name(peer.peer_id)} joined")
        usage.seen_at = now
        self.revoked.discard(peer.peer_id)
        return usage

    def mark_revoked(self, peer_id: str) -> None:
        """A worker was revoked since its last request."""
        if peer_id not in self.revoked:
            self.revoked.add(peer_id)
            self._add("warning", f"{self._name(peer_id)} is revoked")

    def record(self, new: Iterable[Event], table: LeaseTable) -> None:
        """Record events of the core that a person may want to know of."""
        returned: dict[str, list[int]] = {}
        for event in new:
            match event:
                case events.UsesRecorded(worker, uses):
                    self._uses.append(
                        {
                            "at": round(time.time(), 3), "worker": self._name(worker), "epoch": uses[-1].epoch,
                            "step": uses[-1].step, "slices": sorted({used.slice for used in uses})[:8],
                            "samples": sum(used.stop - used.start for used in uses),
                        }
                    )  # fmt: skip
                case events.LeaseReturned(lease_id, reason) if reason in _RETURNED:
                    ended = table.ended.get(lease_id)
                    if ended is not None:
                        text = f"{self._name(ended.worker)} {_RETURNED[reason]}"
                        returned.setdefault(text, []).append(ended.slice_index)
                case events.SliceFailed(index, worker, reason):
                    self._add("warning", f"{self._name(worker)} cannot read slice {index}: {reason}")
                case events.SliceSetAside(_, index, start, stop, reason):
                    self._add("error", f"slice {index} is set aside, {stop - start:,} samples: {reason}")
                case events.SliceReadmitted(index):
                    self._add("info", f"slice {index} is leased again")
                case events.EpochEnded(epoch, samples):
                    end = "; the job is done" if table.done else ""
                    self._add("info", f"epoch {epoch + 1} ended: {samples:,} samples used{end}")
                case events.SliceCleared(index):
                    self._add("info", f"slice {index} can be read here: what workers reported of it does not count")
                case events.JobPaused(paused):
                    self._add("warning", "the job is paused" if paused else "the job continues")
                case events.ProviderReported(peer_id, index, reporter, reason):
                    self._add(
                        "warning", f"{self._name(reporter)} reports {self._name(peer_id)} for slice {index}: {reason}"
                    )
        for text, (first, *others) in returned.items():
            self._add("warning", f"{text}: {f'{len(others) + 1} slices are' if others else f'slice {first} is'} free")

    def describe(self) -> Json:
        """The last events and uses, latest first."""
        return {"events": list(reversed(self._events)), "uses": list(reversed(self._uses))}

    def _add(self, level: str, text: str) -> None:
        getattr(log, level)("%s", text)
        self._events.append({"at": round(time.time(), 3), "level": level, "text": text[:500]})

    def _name(self, peer_id: str) -> str:
        usage = self.workers.get(peer_id)
        return usage.name or peer_id if usage is not None else peer_id


def coverage(table: LeaseTable, aside: Mapping[int, object]) -> Json:
    """The slices of the epoch as a picture of at most MAX_CELLS cells, each of `slices_per_cell`.

    `used` has a hex digit a cell: 0 for nothing, f for all samples, between for a part. `state` has a letter a cell:
    `L` some of it is leased, `A` a slice was set aside, `.` neither.
    """
    per_cell = -(-len(table.samples) // MAX_CELLS)
    starts = np.arange(0, len(table.samples), per_cell)
    total = np.add.reduceat(table.samples, starts)
    used = total if table.done else np.add.reduceat(table.used_of, starts)
    level = np.where(used >= total, 15, np.where(used > 0, 1 + 13 * used // np.maximum(total, 1), 0))
    state = np.full(len(starts), ord("."), np.uint8)
    state[np.array([lease.slice_index for lease in table.leases.values()], np.int64) // per_cell] = ord("L")
    state[np.array(list(aside), np.int64) // per_cell] = ord("A")
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    return {
        "slices_per_cell": per_cell, "used": digits[level].tobytes().decode(), "state": state.tobytes().decode(),
    }  # fmt: skip
