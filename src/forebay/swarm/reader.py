"""Client side of a swarm: asks a tracker which slices to download from which peer, and serves what is here.

`reader_state` decides what to send and what follows from a reply; this module has the thread and the requests.
`forebay.fetch` downloads. Cost: a request per slice or two (about 300 bytes), and one every 0.2 s while all wait.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from forebay.arrays import BOOL
from forebay.closing import Closing
from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, SliceTable
from forebay.dataset.reader import listed_files
from forebay.errors import IntegrityError, NetworkError, ProtocolError, UsageError
from forebay.fetch.engine import NoProviderError, TransferCancelledError
from forebay.network.client import Client
from forebay.network.peer import Provider, node_of
from forebay.network.peer_dataset import PeerOrigin
from forebay.network.peer_source import PeerSource
from forebay.network.reachability import advertised_host
from forebay.storage.base import Origin, PermanentError, read_small
from forebay.storage.hosts import parse_address
from forebay.storage.origins import RemoteDataset
from forebay.swarm.reader_state import Body, SwarmReaderState, TrackerClient
from forebay.swarm.share import SharedDataset, SliceIndex, SliceShare
from forebay.threads import SupervisedThread

log = logging.getLogger("forebay.swarm")
_MAX_SMALL_BYTES = 1 << 30  # of a dataset's small files together, which are kept in memory
_MAX_FAULTS = 2  # of a provider, in a row, before another one is asked for
_MAX_SHARE_AGE_S, _MAX_TRACKER_AGE_S = 15.0, 3.0  # of the claims of data nodes


@dataclass(eq=False)
class SliceProvider:
    """Who sends a slice to this member, as a tracker says: for the runs of its chunks."""

    reader: "SwarmReader"
    index: int

    def __post_init__(self) -> None:
        self.url = f"the swarm of {self.reader.dataset_id[:12]}…"

    def sources(self) -> list[Origin]:
        return [self.reader.source(self.index)]

    def report(self, source: Origin, error: NetworkError) -> bool:
        return self.reader.failed(self.index, source, error)


@dataclass(eq=False)
class SwarmReader:
    """Asks trackers, as a member of a dataset's swarm, who sends which slice; from construction until `close`.

    Args:
        trackers: Looks up trackers, origins first; called when one is needed.
        own_flags: Returns [num_slices] flags of what this node has and serves.
        on_change: Called when a provider was named, or a slice given up.
        share: Its server, which the caller closes; None: it only downloads.
        downloads: Slices at once.
        open_url: Opens a URL that a tracker names; raises NetworkError if it may not be read.
        timeout_s: Requested slices fail after so long without data and without an available provider.
    """

    client: Client
    dataset_id: str
    table: SliceTable
    trackers: Callable[[], Iterable[Provider]]
    own_flags: Callable[[], BOOL]
    on_change: Callable[[], object]
    share: SliceShare | None = None
    downloads: int = 4
    open_url: Callable[[str], Origin] | None = None
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        share = self.share
        self._session = share.session if share is not None else secrets.token_hex(8)
        address = share.address if share is not None else ""
        self._state = SwarmReaderState(
            time.monotonic(), session=self._session, address=address, downloads=self.downloads,
            patience_s=self.timeout_s,
        )  # fmt: skip
        self._changed = threading.Condition()  # guards the state and the fields below
        self._sources: dict[int, tuple[Provider, Origin, list[NetworkError]]] = {}  # with their faults
        self._requested: set[int] = set()
        self._given_up: dict[int, PermanentError] = {}  # until they are released
        self._closed = False
        own = Provider(share.identity.peer_id, address, False) if share is not None else None
        self._tracker = TrackerClient(self.client, self.dataset_id, self.trackers, own)
        self._thread = SupervisedThread(self._run, "swarm").start()

    def source(self, index: int) -> Origin:
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
                return self._sources[index][1]
            if index not in self._requested:
                self._requested.add(index)
                self._state.want(index, time.monotonic())
                self._changed.notify_all()
        raise NoProviderError(f"{name}: no tracker has named a provider yet")

    def failed(self, index: int, source: Origin, error: NetworkError) -> bool:
        """A request to the provider of a slice failed; return whether another one is asked for."""
        wrong = isinstance(error, (IntegrityError, ProtocolError))
        with self._changed:
            provider, own, faults = self._sources.get(index, (None, None, []))
            faults.append(error)
            if own is not source or provider is None:
                return True
            if not wrong and not isinstance(error, PermanentError) and len(faults) < _MAX_FAULTS:
                return False
            del self._sources[index]
            log.info("slice %s from %s: %s", self.table.row(index).name, provider.address, error)
            self._state.ended(index, provider, error, time.monotonic(), wrong=wrong)
            self._changed.notify_all()
        return True

    def release(self, index: int, is_complete: bool) -> None:
        """Nothing more is read of a slice now; `is_complete`: it is here, verified."""
        with self._changed:
            self._requested.discard(index)
            self._given_up.pop(index, None)
            self._state.withdraw(index)
            provider, *_ = self._sources.pop(index, (None,))
            if provider is not None:
                error = None if is_complete else TransferCancelledError(self.table.row(index).name)
                self._state.ended(index, provider, error, time.monotonic(), cancelled=True)
                self._changed.notify_all()

    def stats(self) -> dict[str, int]:
        """Return slices by origin, and failures."""
        with self._changed:
            return dict(self._state.counts)

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
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._state.is_request_due, wait_s)
            if not self._closed:
                wait_s = self._request()
        self._tracker.leave({"session": self._session})

    def _request(self) -> float:
        """Send one request and note the named providers; return the maximum wait until the next, in seconds."""
        flags = self.own_flags() if self._state.is_have_due(time.monotonic()) else None
        with self._changed:
            body = self._state.request(time.monotonic(), flags)
        try:
            reply = self._tracker.request(body, self._introduce)
        except BaseException:
            with self._changed:
                self._state.unanswered(body)
            raise
        try:
            with self._changed:
                if reply is None:
                    return self._state.unanswered(body)
                assigned, sharers, wait_s = self._state.receive(reply, time.monotonic(), self._tracker.current)
        except ProtocolError as error:
            log.warning("swarm of %s: a tracker's reply is malformed: %s", self.dataset_id[:12], error)
            self._tracker.drop_current()
            return 0.05
        self._tracker.add_sharers(sharers)
        for index, provider in assigned:
            self._assign(index, provider)
        if assigned:
            self.on_change()
        return wait_s

    def _introduce(self, body: Body) -> None:
        if "have" not in body and body["address"]:
            flags = self.own_flags()
            with self._changed:
                self._state.introduce(body, flags)

    def _assign(self, index: int, provider: Provider) -> None:
        info = self.table.row(index)
        try:
            source: Origin = PeerSource(
                self.client, node_of(provider.peer_id), provider.address, lambda name: info.sha256
            )
            if provider.is_url:
                if self.open_url is None:
                    raise ProtocolError(f"swarm: expected a peer, got the URL {provider.address}")
                source = self.open_url(provider.address)
        except NetworkError as error:
            if isinstance(error, ProtocolError):  # a URL that no data node claims
                self._tracker.drop_current()
            with self._changed:
                self._state.ended(index, provider, error, time.monotonic())
            return
        with self._changed:
            if index in self._requested:
                self._sources[index] = provider, source, []
            else:
                self._state.ended(index, provider, TransferCancelledError(info.name), time.monotonic(), cancelled=True)

    def _give_up(self) -> None:
        with self._changed:
            for index, error in self._state.give_up(time.monotonic()):
                self._given_up[index] = error or PermanentError(
                    f"slice {self.table.row(index).name}: no provider of {self.dataset_id[:12]}… was available for "
                    f"{self.timeout_s:.0f} s. Start a data node that has it (forebay serve)."
                )
            has_given_up = bool(self._given_up)
        if has_given_up:
            self.on_change()


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
        on_change: Callable[[], object], *, share: bool | str | SliceShare, upload_bytes_per_s: float | None = None,
        downloads: int = 4,
    ) -> None:  # fmt: skip
        origin = dataset.origin
        if not isinstance(origin, PeerOrigin):
            raise UsageError(f"share: expected a dataset of forebay://NETWORK/NAME, got {origin.url}. Leave it out.")
        self.files: dict[str, bytes | Path] = {}  # the small files of the dataset, downloaded while a peer has them
        remaining_bytes = _MAX_SMALL_BYTES
        for name in sorted({MANIFEST_FILE, TABLE_FILE, *listed_files(dataset.manifest)}):
            if "/" not in name:
                self.files[name] = data = read_small(origin, name, remaining_bytes)
                remaining_bytes -= len(data)
        self.share: SliceShare | None = None
        self._owns_share = not isinstance(share, SliceShare)
        if share:
            if not isinstance(share, SliceShare):
                share = open_share(origin, index, share, upload_bytes_per_s)
            self.share = share
            hashes = [row.tobytes().hex() for row in dataset.table.sha256]
            sizes = dataset.table.bytes.tolist()
            self.share.slices.update({sha256: (size, dataset.name) for sha256, size in zip(hashes, sizes)})
            self.share.add(SharedDataset(origin.name, dataset.id, dataset.num_slices, self.files, own_flags))

        self.reader = SwarmReader(
            origin.client, dataset.id, dataset.table,
            lambda: [Provider(c.peer_id, c.address, c.is_whole) for c in origin.claims(_MAX_TRACKER_AGE_S)], own_flags,
            on_change, share=self.share, downloads=downloads, open_url=origin.open_url,
        )  # fmt: skip

    def origin(self, index: int) -> SliceProvider:
        """Return who sends a slice, for the runs of its chunks; `reader.release` it afterwards."""
        return SliceProvider(self.reader, index)

    def close(self, timeout_s: float = 0.0) -> None:
        """Stop downloading; let uploads finish for `timeout_s`, then close. May be called twice."""
        self.reader.close()
        if self.share is not None and self._owns_share:
            self.share.close(timeout_s)


def open_share(
    origin: PeerOrigin, index: SliceIndex, share: bool | str, upload_bytes_per_s: float | None = None
) -> SliceShare:
    """Start a server for datasets that are added later. See SwarmMember."""
    host, port = parse_address(share) if isinstance(share, str) else ("0.0.0.0", 0)
    advertised = advertised_host(host, origin.claims(_MAX_SHARE_AGE_S)[0].address)
    return SliceShare(
        origin.identity, index, {}, host, port, upload_bytes_per_s, discovery=origin.discovery,
        advertised_host="" if advertised == host else advertised,
    )  # fmt: skip
