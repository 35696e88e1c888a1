"""A reader's part in a swarm: says what it wants, fetches what it is told from whom it is told, shares what it has.

What to say and what follows from a reply is decided by `swarm_state`; here are its thread, its requests and its
transfers. What the choice costs: a request for each slice or two (some 300 bytes), and 0.2 s between requests when all
wait.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, SliceInfo, SliceTable
from forebay.dataset.reader import listed_files
from forebay.errors import ForebayError, NetworkError, ProtocolViolation, UsageError
from forebay.network.client import Client, parse_address
from forebay.network.limits import Throttle
from forebay.network.peer import Provider, node_of
from forebay.network.reachability import named_host
from forebay.storage.base import Origin, read_small
from forebay.storage.peer_dataset import PeerOrigin
from forebay.storage.peer_source import ProviderSource
from forebay.storage.remote_dataset import RemoteDataset
from forebay.storage.transfer_state import SteeredTransfer, TransferCancelledError
from forebay.storage.transfers import Transfers
from forebay.swarm.reader_state import Body, Flags, SwarmReaderState
from forebay.swarm.share import Offer, Shelf, SliceShare
from forebay.swarm.tracker_client import Trackers
from forebay.threads import Supervised

log = logging.getLogger("forebay.swarm")
_MAX_SMALL_BYTES = 1 << 30  # of a dataset, all together: they lie in memory
_FRESH_S = 15.0
_AGAIN_S = 3.0


class SwarmReader:
    """Fetches slices of one dataset as a member of its swarm, from construction until `close`.

    Args:
        trackers: Finds them anew: those that are origins first. Called when one is needed.
        held: [num_slices] flags of what this node has and shares.
        share: Its server, if it shares; stays the caller's. None: it only gets.
        downloads: Slices at once. `connections`: requests at once, over all of them.
        open_url: The origin behind a URL that a tracker names, if it may be read; raises NetworkError if not.
        patience_s: Nothing came for so long, and nobody was there who might give it: what is wanted fails.
    """

    def __init__(
        self,
        client: Client,
        dataset_id: str,
        table: SliceTable,
        trackers: Callable[[], Iterable[Provider]],
        held: Callable[[], Flags],
        *,
        share: SliceShare | None = None,
        downloads: int = 4,
        connections: int = 16,
        open_url: Callable[[str], Origin] | None = None,
        patience_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dataset_id = dataset_id
        self._client, self._table, self._held, self._open_url = client, table, held, open_url
        self._patience_s, self._clock = patience_s, clock
        self._session = share.session if share is not None else secrets.token_hex(8)
        address = share.address if share is not None else ""
        self._state = SwarmReaderState(
            clock(), session=self._session, address=address, downloads=downloads,
            patience_s=patience_s,
        )  # fmt: skip
        self._changed = threading.Condition()  # and the lock of the state and of what is below
        self._transfers_by_index: dict[int, SteeredTransfer] = {}
        self._closed = False
        own = Provider(share.identity.peer_id, address, False) if share is not None else None
        self._trackers = Trackers(client, dataset_id, trackers, own, clock)
        # One source for each: no other is faster.
        self._transfers = Transfers(connections, tries=2, patience_s=5.0, hedge_s=30.0)
        self._thread = Supervised(self._run, "swarm").start()

    def fetch(self, index: int, part: Path) -> SteeredTransfer:
        """Want a slice, into a partial file; what is there already is gone on from. Returns at once."""
        transfer = SteeredTransfer(self._table.row(index), part)
        with self._changed:
            if self._closed:
                transfer.finish(TransferCancelledError.of(transfer.info))
                return transfer
            self._transfers_by_index[index] = transfer
            self._state.want(index, self._clock())
            self._changed.notify_all()
        return transfer

    def cancel(self, transfer: SteeredTransfer) -> None:
        """Give a slice up; its part stays for a later run. No harm if it ended."""
        transfer.cancelled = True
        index = transfer.info.index
        with self._changed:
            is_waiting = self._transfers_by_index.get(index) is transfer and self._state.withdraw(index)
            if is_waiting:
                del self._transfers_by_index[index]
            current = transfer.current
        if current is not None:
            self._transfers.cancel(current)
        elif is_waiting:
            transfer.finish(TransferCancelledError.of(transfer.info))

    def lost(self, index: int) -> None:
        """A slice is here no longer. The others hear of it within a moment."""
        with self._changed:
            self._state.lose(index)
            self._changed.notify_all()

    def ask_soon(self) -> None:
        """Ask the tracker now, whatever it said of when."""
        with self._changed:
            self._state.ask_soon()
            self._changed.notify_all()

    @property
    def settled(self) -> bool:
        """Whether all who share the dataset had all of it, when the tracker was last asked."""
        return self._state.settled

    def stats(self) -> dict[str, Any]:
        """Slices by where they came from, what failed, and the transfers' own figures."""
        with self._changed:
            lost = self._trackers.num_lost
            return {**self._state.counts, "trackers_lost": lost, "transfers": self._transfers.stats()}

    def close(self) -> None:
        """Leave the swarm; what is wanted ends as cancelled. May be repeated."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._thread.stop()
            waiting = [self._transfers_by_index.pop(index) for index in self._state.missing]
            self._state.missing.clear()
            self._changed.notify_all()
        self._transfers.close()
        for transfer in waiting:
            transfer.finish(TransferCancelledError.of(transfer.info))
        self._thread.join(2.0)

    def _run(self) -> None:
        wait_s = 0.0
        while not self._closed:
            self._give_up()  # first: whatever fails below, nobody waits for ever
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._state.is_request_due, wait_s)
            if not self._closed:
                wait_s = self._ask()
        self._trackers.leave({"session": self._session})

    def _ask(self) -> float:
        """One request and what follows from its reply; returns how long to wait at most before the next, seconds."""
        held = self._held() if self._state.is_have_due(self._clock()) else None
        with self._changed:
            for index, transfer in self._transfers_by_index.items():
                if transfer.needed:
                    self._state.need(index, self._clock())
            body = self._state.request(self._clock(), held)
        try:
            reply = self._trackers.ask(body, self._introduce)
        except BaseException:
            with self._changed:
                self._state.unanswered(body)
            raise
        tracker, tracked_s = self._trackers.answering, self._clock() - self._trackers.since
        try:
            with self._changed:
                if reply is None:
                    return self._state.unanswered(body)
                assigned, sharers, wait_s = self._state.receive(reply, self._clock(), tracker, tracked_s)
        except ProtocolViolation as error:
            log.warning("swarm of %s: a tracker's answer is malformed: %s", self.dataset_id[:12], error)
            self._trackers.drop()
            return 0.05
        self._trackers.met(sharers)
        for index, holder in assigned:
            self._begin(index, holder)
        return wait_s

    def _introduce(self, body: Body) -> None:
        if "have" not in body and body["address"]:
            held = self._held()
            with self._changed:
                self._state.introduce(body, held)

    def _begin(self, index: int, holder: Provider) -> None:
        transfer, wrong = self._transfers_by_index[index], list[str]()
        try:
            source = self._source(holder, transfer.info)
            transfer.current = self._transfers.start(
                transfer.info, transfer.part, [source], lambda origin, reason: wrong.append(reason)
            )
        except Exception as error:
            if isinstance(error, ProtocolViolation):  # a URL that no data node claims
                self._trackers.drop()
            elif not isinstance(error, ForebayError):  # such as no thread or descriptor left: tried again
                log.exception("slice %s from %s: cannot begin", transfer.info.name, holder.address)
                error = NetworkError(f"slice {transfer.info.name}: {error}")
            return self._ended(transfer, holder, error, bool(wrong))
        transfer.current.on_done(lambda done: self._ended(transfer, holder, done.error, bool(wrong)))
        if transfer.cancelled:
            self._transfers.cancel(transfer.current)

    def _source(self, holder: Provider, info: SliceInfo) -> Origin:
        if not holder.is_url:
            return ProviderSource(self._client, node_of(holder.peer_id), holder.address, info.sha256, 10.0)
        if self._open_url is None:
            raise ProtocolViolation(f"swarm: expected a peer, got the URL {holder.address}")
        return self._open_url(holder.address)

    def _ended(self, transfer: SteeredTransfer, holder: Provider, error: Exception | None, wrong: bool) -> None:
        index, is_cancelled = transfer.info.index, transfer.cancelled or self._closed
        transfer.current = None
        if is_cancelled or SwarmReaderState.is_final(error):
            # Before the tracker is told: by then it can be shared.
            transfer.finish(TransferCancelledError.of(transfer.info) if error is not None and is_cancelled else error)
        else:
            log.info("slice %s from %s: %s", transfer.info.name, holder.address, error)
        with self._changed:
            now = self._clock()
            is_over = self._state.ended(index, holder, error, now, wrong=wrong, cancelled=is_cancelled)
            if is_over and self._transfers_by_index.get(index) is transfer:
                del self._transfers_by_index[index]
            self._changed.notify_all()

    def _give_up(self) -> None:
        with self._changed:
            ended = [(self._transfers_by_index.pop(i), error) for i, error in self._state.give_up(self._clock())]
        for transfer, error in ended:
            transfer.finish(
                error
                or NetworkError(
                    f"slice {transfer.info.name}: nobody who has it of {self.dataset_id[:12]}… was there for "
                    f"{self._patience_s:.0f} s. Start a data node that has it (forebay serve)."
                )
            )


class SwarmMember:
    """Takes part in the swarm of a network's dataset from construction until `close`.

    Args:
        shelf: Where what is fetched lies once it is verified.
        held: [num_slices] flags of what lies there.
        share: `HOST:PORT` to listen at and be known by; True: any port, at the address of this host from which the
            data node is reached; False: give nothing. Or a server that shares others too: it stays the caller's.
    """

    def __init__(
        self,
        dataset: RemoteDataset,
        shelf: Shelf,
        held: Callable[[], Flags],
        *,
        share: bool | str | SliceShare = True,
        throttle: Throttle | None = None,
        downloads: int = 4,
        connections: int = 16,
    ) -> None:
        origin = dataset.origin
        if not isinstance(origin, PeerOrigin):
            raise UsageError(f"share: expected a dataset of forebay://NETWORK/NAME, got {origin.url}. Leave it out.")
        names = {MANIFEST_FILE, TABLE_FILE, *listed_files(dataset.manifest)}
        self.files: dict[str, bytes] = {}  # the dataset's small ones by name
        room = _MAX_SMALL_BYTES
        for name in sorted(names):
            if "/" not in name:  # had now, while somebody has them
                self.files[name] = read_small(origin, name, room)
                room -= len(self.files[name])
        self.share: SliceShare | None = None
        self._owns_share = not isinstance(share, SliceShare)
        if share:
            self.share = share if isinstance(share, SliceShare) else open_share(origin, shelf, share, throttle)
            hashes = [row.tobytes().hex() for row in dataset.table.sha256]
            sizes = dataset.table.bytes.tolist()
            self.share.hashes.update({sha256: (size, dataset.name) for sha256, size in zip(hashes, sizes)})
            self.share.offer(Offer(origin.name, dataset.id, dataset.num_slices, self.files, held))
        self.reader = SwarmReader(
            origin.client, dataset.id, dataset.table,
            lambda: [Provider(claim.peer_id, claim.address, claim.is_whole) for claim in origin.claims(_AGAIN_S)], held,
            share=self.share, downloads=downloads, connections=connections,
            open_url=origin.open_url,
        )  # fmt: skip

    def close(self, timeout_s: float = 0.0) -> None:
        """Fetch no more; let uploads finish for so long, then cut. May be repeated."""
        self.reader.close()
        if self.share is not None and self._owns_share:
            self.share.close(timeout_s)

    def __enter__(self) -> SwarmMember:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_share(origin: PeerOrigin, shelf: Shelf, share: bool | str, throttle: Throttle | None = None) -> SliceShare:
    """A server for what is offered by it later. As SwarmMember."""
    host, port = parse_address(share) if isinstance(share, str) else ("0.0.0.0", 0)
    named = named_host(host, origin.claims(_FRESH_S)[0].address)
    named = "" if named == host else named  # the server names where it listens by itself
    return SliceShare(origin.identity, shelf, {}, host, port, throttle, discovery=origin.discovery, named=named)
