"""Client side of a swarm: asks a tracker which slices to download from which peer, downloads them, serves what it has.

`reader_state` decides what to send and what follows from a reply; this module has the thread, the requests and the
transfers. Cost: a request per slice or two (about 300 bytes), and one every 0.2 s while all wait.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.arrays import BOOL
from forebay.closing import Closing
from forebay.dataset.chunks import CHUNKS_FILE, HASH_BYTES, first_chunks
from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, SliceInfo, SliceTable
from forebay.dataset.reader import listed_files
from forebay.errors import ForebayError, NetworkError, ProtocolError, UsageError
from forebay.fetch.engine import RunFetcher, TransferCancelledError
from forebay.fetch.transfers import ChunkTransfer, FileTransfer, Group, Transfer
from forebay.network.addresses import parse_address
from forebay.network.client import Client
from forebay.network.peer import Provider, node_of
from forebay.network.reachability import advertised_host
from forebay.storage.base import Origin, read_small
from forebay.storage.origins import RemoteDataset
from forebay.storage.peer_dataset import PeerOrigin
from forebay.storage.peer_source import PeerSource
from forebay.swarm.reader_state import Body, SwarmReaderState, TrackerClient
from forebay.swarm.share import SharedDataset, SliceIndex, SliceShare
from forebay.threads import SupervisedThread

log = logging.getLogger("forebay.swarm")
_MAX_SMALL_BYTES = 1 << 30  # of a dataset's small files together, which are kept in memory
_MAX_SHARE_AGE_S, _MAX_TRACKER_AGE_S = 15.0, 3.0  # of the claims of data nodes


class SwarmTransfer(Transfer):
    """A slice from a swarm: waits for a provider, then comes by `current`; by another one if that fails."""

    def __init__(self, info: SliceInfo, target: Path | Group, reader: "SwarmReader") -> None:
        super().__init__(info, target if isinstance(target, Path) else target[0].path)
        self.target = target
        self.current: ChunkTransfer | None = None
        self.is_cancelled = False
        self._reader = reader

    @property
    def received(self) -> int:
        current = self.current
        return self.info.bytes if self.wait(0) and self.error is None else current.received if current else 0

    def cancel(self) -> None:
        self._reader.cancel(self)


@dataclass(eq=False)
class SwarmReader:
    """Downloads slices of one dataset as a member of its swarm, from construction until `close`.

    Args:
        trackers: Looks up trackers, origins first; called when one is needed.
        own_flags: Returns [num_slices] flags of what this node has and serves.
        share: Its server, which the caller closes; None: it only downloads.
        downloads: Slices at once. `connections`: requests at once, for all slices.
        open_url: Opens a URL that a tracker names; raises NetworkError if it may not be read.
        timeout_s: Requested slices fail after so long without data and without an available provider.
    """

    client: Client
    dataset_id: str
    table: SliceTable
    trackers: Callable[[], Iterable[Provider]]
    own_flags: Callable[[], BOOL]
    share: SliceShare | None = None
    downloads: int = 4
    connections: int = 16
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
        self._waiting: dict[int, SwarmTransfer] = {}  # by index, until they end
        self._closed = False
        own = Provider(share.identity.peer_id, address, False) if share is not None else None
        self._tracker = TrackerClient(self.client, self.dataset_id, self.trackers, own)
        self._fetcher = RunFetcher(self.connections, tries=2, timeout_s=5.0)
        self._thread = SupervisedThread(self._run, "swarm").start()

    def fetch(self, index: int, target: Path | Group) -> SwarmTransfer:
        """Request a slice into a file, which is resumed, or claimed chunks of one into a cache. Returns at once."""
        transfer = SwarmTransfer(self.table.row(index), target, self)
        with self._changed:
            if not self._closed:
                self._waiting[index] = transfer
                self._state.want(index, time.monotonic())
                self._changed.notify_all()
                return transfer
        transfer.finish(TransferCancelledError(transfer.info.name))
        return transfer

    def cancel(self, transfer: SwarmTransfer) -> None:
        """Cancel a transfer; the partial file is kept. No effect after its end."""
        transfer.is_cancelled = True
        index = transfer.info.index
        with self._changed:
            is_waiting = self._waiting.get(index) is transfer and self._state.withdraw(index)
            if is_waiting:
                del self._waiting[index]
            current = transfer.current
        if current is not None:
            current.cancel()
        elif is_waiting:
            transfer.finish(TransferCancelledError(transfer.info.name))

    def stats(self) -> dict[str, Any]:
        """Return slices by origin, failures, and the figures of the transfers."""
        with self._changed:
            return {**self._state.counts, "transfers": self._fetcher.stats()}

    def close(self) -> None:
        """Leave the swarm and cancel all transfers. May be called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._thread.stop()
            waiting = [self._waiting.pop(index) for index in self._state.missing]
            self._state.missing.clear()
            self._changed.notify_all()
        self._fetcher.close()
        for transfer in waiting:
            transfer.finish(TransferCancelledError(transfer.info.name))
        self._thread.join(2.0)

    def _run(self) -> None:
        wait_s = 0.0
        while not self._closed:
            self._fail_timed_out()  # first, so that transfers end even if the requests below fail
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._state.is_request_due, wait_s)
            if not self._closed:
                wait_s = self._request()
        self._tracker.leave({"session": self._session})

    def _request(self) -> float:
        """Send one request and start the assigned downloads; return the maximum wait until the next, in seconds."""
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
            self._start(self._waiting[index], provider)
        return wait_s

    def _introduce(self, body: Body) -> None:
        if "have" not in body and body["address"]:
            flags = self.own_flags()
            with self._changed:
                self._state.introduce(body, flags)

    def _start(self, transfer: SwarmTransfer, provider: Provider) -> None:
        faults = list[str]()  # wrong bytes, or breaches of the protocol
        info, target = transfer.info, transfer.target
        try:
            source = self._source(provider, info)
            settings: dict[str, Any] = {
                "read_leaves": lambda: self._read_leaves(source, info.index),
                "on_wrong": lambda origin, reason: faults.append(reason),
            }
            if isinstance(target, Path):
                current: ChunkTransfer = FileTransfer(self._fetcher, info, target, [source], **settings)
            else:
                current = ChunkTransfer(self._fetcher, target[0], info, [source], chunks=target[1], **settings)
            transfer.current = current.start()
        except Exception as error:
            if isinstance(error, ProtocolError):  # a URL that no data node claims
                self._tracker.drop_current()
            elif not isinstance(error, ForebayError):  # such as no thread or descriptor: tried again
                log.exception("slice %s from %s: cannot start", transfer.info.name, provider.address)
                error = NetworkError(f"slice {transfer.info.name}: {error}")
            return self._handle_end(transfer, provider, error, bool(faults))
        current.on_done(lambda done: self._handle_end(transfer, provider, done.error, bool(faults)))
        if transfer.is_cancelled:
            current.cancel()

    def _read_leaves(self, source: Origin, index: int) -> bytes:
        """The hashes of a slice's chunks, from the file that a web server or bucket has of all."""
        start, stop = (first_chunks(self.table.bytes, self.table.chunk_bytes)[index : index + 2] * HASH_BYTES).tolist()
        return b"".join(map(bytes, source.read(CHUNKS_FILE, start, stop)))

    def _source(self, provider: Provider, info: SliceInfo) -> Origin:
        if not provider.is_url:
            return PeerSource(self.client, node_of(provider.peer_id), provider.address, lambda name: info.sha256)
        if self.open_url is None:
            raise ProtocolError(f"swarm: expected a peer, got the URL {provider.address}")
        return self.open_url(provider.address)

    def _handle_end(self, transfer: SwarmTransfer, provider: Provider, error: Exception | None, wrong: bool) -> None:
        index, is_cancelled = transfer.info.index, transfer.is_cancelled or self._closed
        transfer.current = None
        if is_cancelled or SwarmReaderState.is_final(error):
            # Before the tracker hears of it, so that the slice can be served by then.
            transfer.finish(TransferCancelledError(transfer.info.name) if error is not None and is_cancelled else error)
        else:
            log.info("slice %s from %s: %s", transfer.info.name, provider.address, error)
        with self._changed:
            now = time.monotonic()
            is_over = self._state.ended(index, provider, error, now, wrong=wrong, cancelled=is_cancelled)
            if is_over and self._waiting.get(index) is transfer:
                del self._waiting[index]
            self._changed.notify_all()

    def _fail_timed_out(self) -> None:
        with self._changed:
            ended = [(self._waiting.pop(index), error) for index, error in self._state.give_up(time.monotonic())]
        for transfer, error in ended:
            transfer.finish(
                error
                or NetworkError(
                    f"slice {transfer.info.name}: no provider of {self.dataset_id[:12]}… was available for "
                    f"{self.timeout_s:.0f} s. Start a data node that has it (forebay serve)."
                )
            )


class SwarmMember(Closing):
    """Takes part in the swarm of a network's dataset from construction until `close`.

    Args:
        index: The verified slices.
        own_flags: Returns [num_slices] flags of the slices in `index`.
        share: `HOST:PORT` to listen at and be known by; True: any port, at this host's address that the data node
            reaches; False: serve nothing; or a server for several datasets, which the caller closes.
    """

    def __init__(
        self, dataset: RemoteDataset, index: SliceIndex, own_flags: Callable[[], BOOL], *,
        share: bool | str | SliceShare, upload_bytes_per_s: float | None = None, downloads: int = 4,
        connections: int = 16,
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
            share=self.share, downloads=downloads, connections=connections, open_url=origin.open_url,
        )  # fmt: skip

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
