"""Client side of a swarm: asks a tracker which slices to download from which peer, and serves what is here.

`forebay.fetch` downloads and verifies the bytes, and reports slow providers. A tracker is measured by the bytes that
verify: the next one is asked after ten seconds in which too few did, and if that goes on for longer than a slice should
take, the data nodes are asked without a tracker for some minutes.

Cost: a request per slice or two (about 300 bytes), and one every 0.2 s while all wait.
"""

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from forebay.arrays import BOOL, I64
from forebay.base import Closing, Json
from forebay.dataset.manifest import SliceTable
from forebay.errors import IntegrityError, NetworkError, ProtocolError, UsageError
from forebay.fetch.runs import NoProviderError, TransferCancelledError
from forebay.network.messages import MAX_SWARM_ITEMS, ProviderReply, SwarmReply
from forebay.network.peer import Provider, node_of
from forebay.network.peer_dataset import PeerOrigin
from forebay.network.peer_source import PeerSource
from forebay.storage.base import Origin, PermanentError
from forebay.storage.hosts import check_url, parse_peer_address
from forebay.storage.origins import RemoteDataset
from forebay.swarm.members import format_ranges
from forebay.swarm.share import SharedDataset, SliceIndex, SliceShare, SmallFiles
from forebay.swarm.trackers import TrackerClient
from forebay.threads import SupervisedThread

log = logging.getLogger("forebay.swarm")
MAX_WANTED = 4096
"""Missing slices in one request."""
BUSY_S = 2.0
_HAVE_S = 10.0
IDLE_S = 10.0
MIN_BYTES_PER_S = 32 << 10
"""A tracker is left if fewer bytes verified for so long."""
_MIN_PATIENCE_S, _SLICE_BYTES_PER_S = 30.0, 512 << 10  # until the data nodes are asked; of a slice that is waited for
_DIRECT_S = 300.0
_UNANSWERED_S = 0.5
_REFUSED_S = 10.0
_MAX_SHARE_AGE_S, _MAX_TRACKER_AGE_S = 15.0, 3.0  # of the claims of data nodes


@dataclass(eq=False)
class SliceProvider:
    """Who sends a slice to this member, as a tracker says: for the runs of its chunks."""

    reader: "SwarmReader"
    index: int
    is_steered = is_renamed = True
    is_direct = False

    def __post_init__(self) -> None:
        self.url = f"the swarm of {self.reader.dataset_id[:12]}…"

    def sources(self) -> Sequence[Origin]:
        sources, was_direct = self.reader.sources(self.index), self.is_direct
        self.is_direct = self.reader.is_direct(self.index)
        self.is_renamed = not (was_direct and self.is_direct)  # A data node that refused twice will not send it.
        return sources

    def report(self, source: Origin, error: NetworkError) -> bool:
        return self.reader.failed(self.index, source, error)

    def verified(self, num_bytes: int) -> None:
        self.reader.num_verified += num_bytes


@dataclass(eq=False)
class SwarmReader:
    """Asks trackers, as a member of a dataset's swarm, who sends which slice; from construction until `close`.

    One request at a time tells the tracker what happened since the last one.

    Args:
        origin: The data nodes. They are trackers, open the URLs that a tracker names, and are asked without one.
        own_flags: Returns [num_slices] flags of what this node has and serves.
        on_change: Called when a provider was named, or a slice given up.
        share: Its server, which the caller closes; None: it only downloads.
        downloads: Slices at once.
        timeout_s: Requested slices fail after so long without data and without an available provider.
    """

    origin: PeerOrigin
    dataset_id: str
    table: SliceTable
    own_flags: Callable[[], BOOL]
    on_change: Callable[[], object]
    share: SliceShare | None = None
    downloads: int = 4
    timeout_s: float = 120.0
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        share = self.share
        self._session = share.session if share is not None else secrets.token_hex(8)
        self._address = share.address if share is not None else ""
        self._changed = threading.Condition()  # guards all below
        self._waiting: set[int] = set()  # requested slices that nobody sends now
        self._sources: dict[int, tuple[Provider, Origin]] = {}
        self._given_up: dict[int, PermanentError] = {}  # until they are released
        self._refused: dict[int, float] = {}  # since when those that a tracker names do not send a slice
        self._direct: set[int] = set()  # slices for which the data nodes are asked, whatever a tracker names
        self._counts = {"from_origins": 0, "from_peers": 0, "failed": 0}
        self._updates: dict[str, list[Any]] = {"finished": [], "failed": [], "dropped": []}  # for the next request
        self._reported: BOOL | None = None  # the slices that the tracker knows of
        self._reported_at = self._direct_until = float("-inf")
        self.num_verified = 0  # bytes, since `_checked_at`
        self._checked_at = self._good_at = self.now()
        self._patience_s = max(_MIN_PATIENCE_S, self.table.bytes.max(initial=0) / _SLICE_BYTES_PER_S)
        self._is_due = self._closed = False
        own = Provider(share.identity.peer_id, self._address, False) if share is not None else None
        self._tracker = TrackerClient(
            self.origin.client, self.dataset_id,
            lambda: [Provider(c.peer_id, c.address, c.is_whole) for c in self.origin.claims(_MAX_TRACKER_AGE_S)], own,
        )  # fmt: skip
        self._thread = SupervisedThread(self._run, "swarm").start()

    def sources(self, index: int) -> Sequence[Origin]:
        """Return who sends a slice now; the tracker is told of the request.

        Raises:
            NoProviderError: If no provider was named yet.
            PermanentError: If none was for too long.
        """
        name = self.table.row(index).name
        with self._changed:
            if self._closed:
                raise TransferCancelledError(name)
            if index in self._given_up:
                raise self._given_up[index]
            if index in self._sources:
                return [self._sources[index][1]]
            if not self.is_direct(index):
                if index not in self._waiting:
                    self._waiting.add(index)
                    self._notify()
                raise NoProviderError(f"{name}: no tracker has named a provider yet")
            self._waiting.discard(index)
        return self.origin.sources()

    def is_direct(self, index: int) -> bool:
        """Return whether the data nodes are asked for a slice, without a tracker."""
        return self.now() < self._direct_until or index in self._direct

    def _notify(self) -> None:
        """Have a request sent now. With the lock held."""
        self._is_due = True
        self._changed.notify_all()

    def failed(self, index: int, source: Origin, error: NetworkError) -> bool:
        """A request to the provider of a slice failed; another one is asked for."""
        with self._changed:
            provider, own = self._sources.get(index, (None, None))
            if own is source and provider is not None:
                del self._sources[index]
                log.info("slice %s from %s: %s", self.table.row(index).name, provider.address, error)
                self._report_failure(index, provider, error)
        return True

    def _report_failure(self, index: int, provider: Provider, error: NetworkError) -> None:
        self._updates["failed"].append(
            {"index": index, "member": provider.peer_id, "wrong": isinstance(error, (IntegrityError, ProtocolError))}
        )
        self._counts["failed"] += 1
        if isinstance(error, PermanentError):
            self._refused.setdefault(index, self.now())
        self._waiting.add(index)
        self._notify()

    def release(self, index: int, is_complete: bool) -> None:
        """Nothing more is read of a slice now; `is_complete`: it is here, verified."""
        with self._changed:
            self._waiting.discard(index)
            self._given_up.pop(index, None)
            self._refused.pop(index, None)
            self._direct.discard(index)
            provider, _ = self._sources.pop(index, (None, None))
            if provider is not None:
                self._updates["finished" if is_complete else "dropped"].append(index)
                if is_complete:
                    self._counts["from_origins" if provider.is_origin else "from_peers"] += 1
                self._notify()

    def stats(self) -> dict[str, int]:
        """Return slices by origin, and failures."""
        with self._changed:
            return dict(self._counts)

    def close(self) -> None:
        """Leave the swarm. May be called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._thread.stop()
            self._changed.notify_all()
        self.on_change()
        self._thread.join(2.0)

    def _run(self) -> None:
        wait_s = 0.0
        while not self._closed:
            self._give_up()  # first, so that requests end even if those below fail
            self._check_tracker()
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._is_due, min(wait_s, IDLE_S / 4))
            if not self._closed:
                wait_s = self._request()
        self._tracker.leave({"session": self._session})

    def _request(self) -> float:
        """Send one request and note the named providers; return the maximum wait until the next, in seconds."""
        now = self.now()
        is_told = not self._address or (self._reported is not None and now - self._reported_at <= _HAVE_S)
        flags = None if is_told else self.own_flags()
        with self._changed:
            num = max(0, self.downloads - len(self._sources))
            requested = np.array(sorted(itertools.islice(self._waiting, MAX_WANTED)), np.int64)
            body: Json = {
                "session": self._session, "address": self._address, "want": format_ranges(requested), "num": num,
                **{name: items[:MAX_SWARM_ITEMS] for name, items in self._updates.items()},
            }  # fmt: skip
            self._updates = {name: items[MAX_SWARM_ITEMS:] for name, items in self._updates.items()}
            self._is_due = any(self._updates.values())
            if flags is not None:
                if self._reported is None or not np.array_equal(flags, self._reported):
                    self._introduce(body, flags)
                self._reported_at = now
        reply: Json | None = None
        try:
            reply = self._tracker.request(body, lambda body: self._introduce(body, self.own_flags()))
        finally:
            if reply is None:  # the next request says it again
                with self._changed:
                    self._updates = {name: body[name] + items for name, items in self._updates.items()}
                    self._reported = None
        if reply is None:
            return _UNANSWERED_S
        try:
            wait_s = self._receive(reply, requested)
        except ProtocolError as error:
            log.warning("swarm of %s: a tracker's reply is malformed: %s", self.dataset_id[:12], error)
            self._tracker.drop_current()
            return 0.05
        return wait_s if num > 0 else max(wait_s, BUSY_S)

    def _introduce(self, body: Json, flags: BOOL) -> None:
        """Tell a tracker that may not know it what this reader has."""
        if "have" not in body and self._address:
            body["have"] = format_ranges(np.flatnonzero(flags))
            self._reported = flags

    def _receive(self, reply: Json, requested: I64) -> float:
        """Note the providers of a reply; return how long to wait.

        ProtocolError if it is malformed; then none is noted.
        """
        try:
            message = SwarmReply.model_validate(reply)
        except ValidationError as error:
            raise ProtocolError(
                f"swarm: expected a SwarmReply, got {str(reply)[:200]}: {error.errors()[:1]}"
            ) from error
        named = {item.index: _provider_of(item) for item in message.assignments}
        sharers = [_provider_of(sharer) for sharer in message.sharers]
        opened = [(index, other, self._open(index, other)) for index, other in named.items() if index in requested]
        self._tracker.add_sharers(sharers)
        with self._changed:
            for index, provider, source in opened:
                if index not in self._waiting:
                    self._updates["dropped"].append(index)
                elif isinstance(source, NetworkError):
                    self._report_failure(index, provider, source)
                else:
                    self._waiting.discard(index)
                    self._sources[index] = provider, source
            if message.tell_have:
                self._reported = None
        if opened:
            self.on_change()
        return 0.0 if message.tell_have else min(10.0, max(0.02, message.wait_s))

    def _open(self, index: int, provider: Provider) -> Origin | NetworkError:
        sha256 = self.table.row(index).sha256
        if not provider.is_url:
            return PeerSource(self.origin.client, node_of(provider.peer_id), provider.address, lambda name: sha256)
        try:
            return self.origin.open_url(provider.address)
        except NetworkError as error:
            if isinstance(error, ProtocolError):  # a URL that no data node claims
                self._tracker.drop_current()
            return error

    def _check_tracker(self) -> None:
        """Leave a tracker of whose answers too little came; ask the data nodes themselves if that goes on."""
        with self._changed:
            now = self.now()
            is_wanted = bool(self._waiting or self._sources)
            elapsed_s = now - self._checked_at
            num_verified = self.num_verified
            if is_wanted and elapsed_s < IDLE_S:
                return
            self._checked_at = now
            self.num_verified = 0
            if not is_wanted or num_verified >= MIN_BYTES_PER_S * elapsed_s:
                self._good_at = now
                return
            self._reported = None
            is_direct = now - self._good_at >= self._patience_s
            if is_direct:
                self._direct_until = now + _DIRECT_S
        self._tracker.leave_current()
        log.info(
            "swarm of %s: %d bytes in %.0f s: asking another tracker", self.dataset_id[:12], num_verified, elapsed_s
        )
        if is_direct:
            log.warning("swarm of %s: too little comes of it; asking the data nodes themselves", self.dataset_id[:12])
            self.on_change()

    def _give_up(self) -> None:
        """Ask the data nodes for what providers refused for ten seconds; fail the requests that no peer can serve."""
        with self._changed:
            now = self.now()
            is_late = not self._sources and now - self._good_at >= self.timeout_s + self._patience_s
            refused = {index for index in self._waiting if now - self._refused.get(index, now) > _REFUSED_S}
            for index in list(self._waiting) if is_late else refused:
                self._waiting.discard(index)
                self._updates["dropped"].append(index)
                self._direct.add(index)
                if is_late:
                    self._given_up[index] = PermanentError(
                        f"slice {self.table.row(index).name}: no provider of {self.dataset_id[:12]}… was available for "
                        f"{self.timeout_s:.0f} s. Start a data node that has it (forebay serve)."
                    )
            has_changed = bool(self._given_up or refused)
        if has_changed:
            self.on_change()


def _provider_of(reply: ProviderReply) -> Provider:
    """The provider that a reply names; ProtocolError if its address is neither `host:port` nor a URL."""
    (check_url if "://" in reply.address else parse_peer_address)(reply.address)
    return Provider(reply.member[:2048], reply.address, reply.is_origin)


class SwarmMember(Closing):
    """Takes part in the swarm of a network's dataset from construction until `close`.

    Args:
        index: The verified slices.
        own_flags: Returns [num_slices] flags of the slices in `index`.
        on_change: As of SwarmReader.
        share: `HOST:PORT` to listen at and be known by; True: any port, at this host's address that the data node
            reaches; False: serve nothing; or a server for several datasets, which the caller closes.
    """

    def __init__(
        self, dataset: RemoteDataset, index: SliceIndex, own_flags: Callable[[], BOOL],
        on_change: Callable[[], object], *, share: bool | str | SliceShare, downloads: int = 4,
    ) -> None:  # fmt: skip
        origin = dataset.origin
        if not isinstance(origin, PeerOrigin):
            raise UsageError(f"share: expected a dataset of forebay://NETWORK/NAME, got {origin.url}. Leave it out.")
        self.files = SmallFiles(dataset)  # copied while a peer has them
        self.share: SliceShare | None = None
        self._owns_share = not isinstance(share, SliceShare)
        if share:
            if not isinstance(share, SliceShare):
                share = open_share(origin, index, share)
            self.share = share
            table = dataset.table
            for sha256, size in zip(table.sha256, table.bytes.tolist()):
                self.share.slices[sha256.tobytes().hex()] = size, dataset.name, table.chunk_bytes
            self.share.add(SharedDataset(origin.name, dataset.id, dataset.num_slices, self.files, own_flags))

        self.reader = SwarmReader(
            origin, dataset.id, dataset.table, own_flags, on_change, share=self.share, downloads=downloads
        )

    def origin(self, index: int) -> SliceProvider:
        """Return who sends a slice, for the runs of its chunks; `reader.release` it afterwards."""
        return SliceProvider(self.reader, index)

    def close(self, timeout_s: float = 0.0) -> None:
        """Stop downloading; let uploads finish for `timeout_s`, then close. May be called twice."""
        self.reader.close()
        if self.share is not None and self._owns_share:
            self.share.close(timeout_s)


def open_share(origin: PeerOrigin, index: SliceIndex, share: bool | str) -> SliceShare:
    """Start a server for datasets that are added later. See SwarmMember."""
    return SliceShare(
        origin.identity, index, {}, share if isinstance(share, str) else ":0",
        discovery=origin.discovery, towards=origin.claims(_MAX_SHARE_AGE_S)[0].address,
    )  # fmt: skip
