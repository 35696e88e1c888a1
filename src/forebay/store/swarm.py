"""A reader's part in a swarm: says what it wants, fetches what it is told from whom it is told, shares what it has.

Who may give what is the trackers' to say; whether bytes are right is found out here, by their hash.

What the choice costs: a question for each slice or two (some 300 bytes), and 0.2 s between questions when all wait.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.manifest import SliceInfo, SliceTable
from forebay.errors import ForebayError, IntegrityError, NetworkError, ProtocolViolation
from forebay.network.client import Client
from forebay.network.members import format_ranges
from forebay.store.holders import HolderSource
from forebay.store.origins import Origin, Patience, open_origin
from forebay.store.share import SliceShare
from forebay.store.trackers import TrackerAt, Trackers
from forebay.store.transfer import Transfers
from forebay.store.work import SteeredTransfer, TransferCancelledError

MAX_TOLD = 4096  # wanted slices that one question names
_SEEDS = ("http://", "https://", "s3://", "r2://", "gs://", "az://")  # no tracker may name a file of this host
_HAVE_S = 10.0
_MUST_S = 5.0
_BUSY_S = 2.0
_MOST_MUST = 8
_SETTLE_S = 4.0  # a sharer that began to track must be found by the others before it can tell that all have all
log = logging.getLogger("forebay.swarm")

__all__ = ["SteeredTransfer", "SwarmReader", "TrackerAt"]


@dataclass
class _News:
    """What the tracker is to hear, until it has."""

    finished: list[int] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    wants: bool = False  # something new

    def __bool__(self) -> bool:
        return bool(self.finished or self.failed or self.dropped or self.lost or self.wants)


class SwarmReader:
    """Fetches slices of one dataset as a member of its swarm, from construction until `close`.

    Args:
        trackers: Finds them anew: those that are origins first. Called when one is needed.
        held: [num_slices] flags of what this node has and shares.
        share: Its server, if it shares; stays the caller's. None: it only gets.
        downloads: Slices at once. `connections`: requests at once, over all of them.
        uploads: Slices that others may fetch from here at once.
        urgent: Somebody waits for what is wanted: what is not had after 5 s is taken wherever it is.
        patience_s: Nothing came for so long, and nobody was there who might give it: what is wanted fails.
    """

    def __init__(
        self,
        client: Client,
        dataset_id: str,
        table: SliceTable,
        trackers: Callable[[], Iterable[TrackerAt]],
        held: Callable[[], NDArray[np.bool_]],
        *,
        share: SliceShare | None = None,
        downloads: int = 4,
        uploads: int = 4,
        connections: int = 16,
        urgent: bool = False,
        patience_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dataset_id = dataset_id
        self._client, self._table, self._held = client, table, held
        self._share, self._downloads, self._uploads, self._patience_s = share, downloads, uploads, patience_s
        self._urgent, self._clock = urgent, clock
        self._settled = False
        self._changed = threading.Condition()
        self._wanted: dict[int, SteeredTransfer] = {}
        self._running: dict[int, SteeredTransfer] = {}
        self._news = _News()
        self._told_have: NDArray[np.bool_] | None = None
        self._told_at = float("-inf")
        own = None
        if share is not None:
            own = TrackerAt(share.identity.peer_id, share.address, False)
        self._trackers = Trackers(client, dataset_id, trackers, own, clock)
        self._session = share.session if share is not None else secrets.token_hex(8)
        self._seeds: dict[str, Origin] = {}
        self._good_at = clock()
        self._closed = False
        self._counts = {"from_origins": 0, "from_peers": 0, "failed": 0}
        self._transfers = Transfers(
            connections, tries=2, patience_s=5.0, hedge_s=30.0
        )  # one source: no other is faster
        self._thread = threading.Thread(target=self._run, name="swarm", daemon=True)
        self._thread.start()

    def fetch(self, index: int, part: Path) -> SteeredTransfer:
        """Want a slice, into a partial file; what is there already is gone on from. Returns at once."""
        transfer = SteeredTransfer(self._table.row(index), part, self._clock())
        with self._changed:
            if self._closed:
                transfer.finish(TransferCancelledError.of(transfer.info))
                return transfer
            self._wanted[index] = transfer
            self._news.wants = True
            self._changed.notify_all()
        return transfer

    def cancel(self, transfer: SteeredTransfer) -> None:
        """Give a slice up; its part stays for a later run. No harm if it ended."""
        transfer.cancelled = True
        with self._changed:
            waiting = self._wanted.get(transfer.info.index) is transfer
            if waiting:
                del self._wanted[transfer.info.index]
            current = transfer.current
        if current is not None:
            self._transfers.cancel(current)
        elif waiting:
            transfer.finish(TransferCancelledError.of(transfer.info))

    def lost(self, index: int) -> None:
        """A slice is here no longer. The others hear of it within a moment."""
        with self._changed:
            self._news.lost.append(index)
            self._changed.notify_all()

    def ask_soon(self) -> None:
        """Ask the tracker now, whatever it said of when."""
        with self._changed:
            self._news.wants = True
            self._changed.notify_all()

    @property
    def settled(self) -> bool:
        """Whether all who share the dataset had all of it, when the tracker was last asked."""
        return self._settled

    def stats(self) -> dict[str, Any]:
        """Slices by where they came from, what failed, and the transfers' own figures."""
        with self._changed:
            lost = self._trackers.num_lost
            return {**self._counts, "trackers_lost": lost, "transfers": self._transfers.stats()}

    def close(self) -> None:
        """Leave the swarm; what is wanted ends as cancelled. May be repeated."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            left = list(self._wanted.values())
            self._wanted.clear()
            self._changed.notify_all()
        self._transfers.close()
        for transfer in left:
            transfer.finish(TransferCancelledError.of(transfer.info))
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def __enter__(self) -> SwarmReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        wait_s = 0.0
        while True:
            with self._changed:
                if not self._closed:
                    self._changed.wait_for(lambda: self._closed or self._news, wait_s)
                if self._closed:
                    break
                body = self._question()
            wait_s = self._ask(body)
        self._trackers.leave({"session": self._session})

    def _question(self) -> dict[str, Any]:
        """With the lock held; what is in it is no news any more."""
        now, news = self._clock(), self._news
        waiting = list(self._wanted)[:MAX_TOLD]
        late = [index for index in waiting[:_MOST_MUST] if now - self._wanted[index].wanted_at > _MUST_S]
        body: dict[str, Any] = {
            "session": self._session,
            "address": self._share.address if self._share is not None else "",
            "slots": self._uploads,
            "want": format_ranges(np.array(sorted(waiting), np.int64)),
            "num": max(0, self._downloads - len(self._running)),
            "finished": news.finished[:1024],
            "failed": news.failed[:1024],
            "dropped": news.dropped[:1024],
            "lost": news.lost[:1024],
            "must": late if self._urgent else [],
        }
        self._news = _News(news.finished[1024:], news.failed[1024:], news.dropped[1024:], news.lost[1024:])
        return body

    def _ask(self, body: dict[str, Any]) -> float:
        """One question and what follows; returns how long to wait at most before the next, seconds."""
        now = self._clock()
        if self._share is not None and (self._told_have is None or now - self._told_at > _HAVE_S):
            held = self._held()
            if self._told_have is None or not np.array_equal(held, self._told_have):
                body["have"] = format_ranges(np.flatnonzero(held))
                self._told_have = held
            self._told_at = now
        answer = self._trackers.ask(body, self._introduce)
        if answer is None:
            with self._changed:
                self._news.finished = body["finished"] + self._news.finished
                self._news.failed = body["failed"] + self._news.failed
                self._news.dropped = body["dropped"] + self._news.dropped
            self._told_have = None
            self._give_up_if_hopeless()
            return 0.5
        if answer.get("tell_have"):
            self._told_have = None
        wait_s = self._follow(answer)
        self._give_up_if_hopeless()
        if answer.get("tell_have"):
            return 0.0
        return wait_s if body["num"] else max(wait_s, _BUSY_S)

    def _introduce(self, body: dict[str, Any]) -> None:
        if self._share is not None and "have" not in body:
            self._told_have = self._held()
            body["have"] = format_ranges(np.flatnonzero(self._told_have))

    def _follow(self, answer: dict[str, Any]) -> float:
        """Begin what the tracker says."""
        try:
            given = [(int(item["index"]), TrackerAt.parse(item)) for item in answer.get("assignments", ())]
            given += [
                (int(item["index"]), TrackerAt.parse(one))
                for item in answer.get("must", ())
                for one in item["holders"][:1]
            ]
            sharers = [TrackerAt.parse(item) for item in answer.get("sharers", ())]
            wait_s = float(answer.get("wait_s", 1.0))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            log.warning("swarm of %s: a tracker's answer is malformed: %r", self.dataset_id[:12], error)
            return 1.0
        now, tracker = self._clock(), self._trackers.answering
        knows_all = tracker is not None and (tracker.is_origin or now - self._trackers.since >= _SETTLE_S)
        with self._changed:
            self._settled = knows_all and answer.get("settled") is True
        self._trackers.met(sharers)
        for index, holder in given:
            self._begin(index, holder)
        if given or sharers or (tracker is not None and tracker.is_origin):
            self._good_at = now  # somebody is there who may give; alone with itself it waits for nothing
        return min(30.0, max(0.02, wait_s))

    def _begin(self, index: int, holder: TrackerAt) -> None:
        with self._changed:
            transfer = self._wanted.pop(index, None)
            if transfer is None or self._closed:
                return
            self._running[index] = transfer
        wrong: list[str] = []
        try:
            source = self._source(holder, transfer.info)
            transfer.current = self._transfers.start(
                transfer.info, transfer.part, [source], lambda origin, reason: wrong.append(reason)
            )
        except ForebayError as error:
            return self._ended(transfer, holder, error, wrong)
        transfer.current.on_done(lambda done: self._ended(transfer, holder, done.error, wrong))
        if transfer.cancelled:
            self._transfers.cancel(transfer.current)

    def _source(self, holder: TrackerAt, info: SliceInfo) -> Origin:
        if "://" not in holder.address:
            return HolderSource(self._client, holder.peer_id, holder.address, info.sha256, 10.0)
        if not holder.address.startswith(_SEEDS):
            raise ProtocolViolation(f"swarm: expected a web server or bucket as origin, got {holder.address[:80]}")
        if holder.address not in self._seeds:
            self._seeds[holder.address] = open_origin(holder.address, patience=Patience(stall_s=10.0))
        return self._seeds[holder.address]

    def _ended(
        self, transfer: SteeredTransfer, holder: TrackerAt, error: Exception | None, wrong: Sequence[str]
    ) -> None:
        index = transfer.info.index
        transfer.current = None
        is_over = error is None or transfer.cancelled or not isinstance(error, NetworkError | IntegrityError)
        if is_over:
            transfer.finish(error)  # before it is told: by then it can be shared
        with self._changed:
            self._running.pop(index, None)
            self._good_at = self._clock()
            if error is None:
                self._news.finished.append(index)
                self._counts["from_origins" if holder.is_origin else "from_peers"] += 1
            elif is_over:
                self._news.dropped.append(index)
            else:
                is_wrong = bool(wrong) or isinstance(error, (IntegrityError, ProtocolViolation))
                self._news.failed.append({"index": index, "member": holder.member, "wrong": is_wrong})
                self._counts["failed"] += 1
                if not self._closed:
                    self._wanted[index] = transfer
            self._changed.notify_all()
        if error is not None and not is_over:
            log.info("slice %s from %s: %s", transfer.info.name, holder.address, error)
            if self._closed:
                transfer.finish(TransferCancelledError.of(transfer.info))

    def _give_up_if_hopeless(self) -> None:
        with self._changed:
            if self._running or self._clock() - self._good_at < self._patience_s:
                return
            lost = list(self._wanted.values())
            self._wanted.clear()
        for transfer in lost:
            transfer.finish(
                NetworkError(
                    f"slice {transfer.info.name}: nobody who has it of {self.dataset_id[:12]}… was there for "
                    f"{self._patience_s:.0f} s. Start a data node that has it (forebay serve)."
                )
            )
