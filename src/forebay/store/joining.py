"""A reader of `forebay://NETWORK/NAME` as a member of its swarm: its server, what it offers, and its fetches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE
from forebay.dataset.reader import listed_files
from forebay.errors import UsageError
from forebay.network.client import parse_address
from forebay.network.dialing import named_host
from forebay.network.limits import Throttle
from forebay.store.origins import read_small
from forebay.store.peers import PeerOrigin
from forebay.store.remote import RemoteDataset
from forebay.store.share import Offer, Shelf, SliceShare
from forebay.store.swarm import SwarmReader, TrackerAt

_MAX_SMALL_BYTES = 1 << 30  # of a dataset, all together: they lie in memory
_FRESH_S = 15.0
_AGAIN_S = 3.0


class SwarmMember:
    """Takes part from construction until `close`.

    Attributes:
        files: The dataset's small files by name, as they were fetched.

    Args:
        dataset: Of a network.
        shelf: Where what is fetched lies once it is verified.
        held: [num_slices] flags of what lies there.
        share: `HOST:PORT` to listen at and be known by; True: any port, at the address of this host from which the
            data node is reached; False: give nothing. Or a server that shares others too: it stays the caller's.
        throttle: Of uploads.

    Raises:
        UsageError: If the dataset is of no network.
        NetworkError: If nobody serves it now, or it cannot listen.
    """

    def __init__(
        self,
        dataset: RemoteDataset,
        shelf: Shelf,
        held: Callable[[], NDArray[np.bool_]],
        *,
        share: bool | str | SliceShare = True,
        throttle: Throttle | None = None,
        downloads: int = 4,
        uploads: int = 4,
        connections: int = 16,
    ) -> None:
        origin = dataset.origin
        if not isinstance(origin, PeerOrigin):
            raise UsageError(f"share: expected a dataset of forebay://NETWORK/NAME, got {origin.url}. Leave it out.")
        names = {MANIFEST_FILE, TABLE_FILE, *listed_files(dataset.manifest)}
        self.files: dict[str, bytes] = {}
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
            origin.client, dataset.id, dataset.table, lambda: _trackers(origin), held,
            share=self.share, downloads=downloads, uploads=uploads, connections=connections,
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
    """A server for what is offered by it later. As SwarmMember.

    Raises:
        NetworkError: If nobody serves the origin's dataset now, or it cannot listen.
    """
    host, port = parse_address(share) if isinstance(share, str) else ("0.0.0.0", 0)
    named = named_host(host, origin.claims(_FRESH_S)[0].address)
    named = "" if named == host else named  # the server names where it listens by itself
    return SliceShare(origin.identity, shelf, {}, host, port, throttle, discovery=origin.discovery, named=named)


def _trackers(origin: PeerOrigin) -> Iterator[TrackerAt]:
    for claim in origin.claims(_AGAIN_S):
        yield TrackerAt(claim.peer_id, claim.address, claim.is_whole)
