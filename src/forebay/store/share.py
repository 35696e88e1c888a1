"""The server in every worker: hands out, by hash, the slices that it holds, to members of its network.

What was lost meanwhile is answered 404; what is evicted while it is sent is sent to the end, as its file is open.
Once a dataset is offered, this is a tracker of its swarm too, serves its manifest and table, and announces it: so the
others go on, and new ones come in, after the data node that they had it from is gone.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.errors import NetworkError
from forebay.network.app import ApiError
from forebay.network.avoidance import member_id
from forebay.network.client import Client
from forebay.network.discovery import Claim, Discovery, record_key
from forebay.network.identity import Identity
from forebay.network.limits import Limits, Throttle
from forebay.network.peer import Peer
from forebay.network.server import Server
from forebay.network.swarm import Holder
from forebay.store.slice_app import SliceFile, make_slice_app
from forebay.store.tracker import Tracker
from forebay.threads import Supervised

log = logging.getLogger("forebay.share")


class Shelf(Protocol):
    """Where verified slices lie: a SliceCache, or another."""

    def get(self, sha256: str) -> Path | None:
        """The file of a slice; None if it is not here now."""


class Folder:
    """Slices that lie under names of their own, by hash."""

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}

    def put(self, sha256: str, path: Path) -> None:
        """A verified slice is here."""
        self._paths[sha256] = path

    def get(self, sha256: str) -> Path | None:
        """See Shelf."""
        path = self._paths.get(sha256)
        return path if path is not None and path.is_file() else None


@dataclass(frozen=True)
class Offer:
    """A dataset that is shared, or a part of it.

    Attributes:
        files: The small files by name: manifest and table at least.
        held: [num_slices] flags of what is here now.
    """

    name: str
    dataset_id: str
    num_slices: int
    files: Mapping[str, bytes]
    held: Callable[[], NDArray[np.bool_]]


class SliceShare:
    """Serves from construction until `close`. A child made by a fork has no part in it, and closes nothing.

    Attributes:
        session: Which process of its node this is, in a swarm.

    Args:
        cache: Where the slices lie. Stays the caller's.
        hashes: Of each slice that may be handed out, its bytes and its dataset's name, by hash; looked at anew at each
            request, so that the caller may add to it. Whose certificate does not cover the name is refused.
        host: Where to listen. `port`: TCP; 0 takes a free one.
        discovery: Where offers are announced; stays the caller's. None: nowhere.
        named: The host to be known by, where it is not the one to listen at.

    Raises:
        NetworkError: If it cannot listen.
    """

    def __init__(
        self,
        identity: Identity,
        cache: Shelf,
        hashes: dict[str, tuple[int, str]],
        host: str,
        port: int,
        throttle: Throttle | None = None,
        *,
        discovery: Discovery | None = None,
        named: str = "",
        ttl_s: float = 60.0,
        max_connections: int = 256,
    ) -> None:
        self.identity = identity
        self.session = secrets.token_hex(8)
        self.cache = cache
        self.hashes = hashes
        self.discovery = discovery
        self.ttl_s = ttl_s
        self._named = named
        self._sent = 0
        self._offers: dict[str, Offer] = {}
        self._client = Client(identity)
        self.tracker = Tracker(self._client)
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._changed = threading.Event()
        app = make_slice_app("Forebay worker", self)
        self._server = Server(
            app, identity, host, port, limits=Limits(connections=max_connections), throttle=throttle,
            on_bytes=self._count, discovery=discovery,
        )  # fmt: skip
        self._server.start()
        self._announcer = Supervised(self._keep_announced, "announce", stopping=self._stopping)
        self._announcer.start()

    @property
    def address(self) -> str:
        """`host:port`, as others are told."""
        return f"{self._named}:{self._server.port}" if self._named else self._server.address

    @property
    def bytes_sent(self) -> int:
        """Of slices and answers, since it was made."""
        return self._sent

    def offer(self, offer: Offer) -> None:
        """Announce a dataset, track its swarm, and serve its small files. Its slices are those of `hashes`."""
        own = Holder(member_id(self.identity.peer_id, self.session), self.address, False)
        self.tracker.add(offer.dataset_id, offer.num_slices, [own], offer.held)
        self._offers[offer.dataset_id] = offer
        self._changed.set()

    def close(self, timeout_s: float = 0.0) -> bool:
        """Take no more requests, let uploads finish for so long, then cut. May be repeated.

        Returns:
            Whether every upload finished.
        """
        if os.getpid() != self._pid:
            return True
        self._stopping.set()
        self._changed.set()
        drained = self._server.drain(timeout_s)
        self._server.close()
        self.tracker.close()
        self._client.close()
        self._announcer.join(1.0)
        return drained

    def __enter__(self) -> SliceShare:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def claims(self, peer: Peer) -> list[dict[str, Any]]:
        """What it has of each offer that a peer's certificate covers, signed, good for `ttl_s` from now."""
        expires_at, own_id = time.time() + self.ttl_s, self.identity.peer_id
        return [
            Claim(
                offer.name, offer.dataset_id, offer.num_slices, own_id, self.address, expires_at,
                held=int(np.count_nonzero(offer.held())),
            ).to_json(self.identity)
            for offer in list(self._offers.values())
            if peer.scope.covers(offer.name)
        ]  # fmt: skip

    def _keep_announced(self) -> None:
        while True:
            self._changed.wait(self.ttl_s / 3)
            self._changed.clear()
            if self._stopping.is_set():
                return
            for offer in list(self._offers.values()) if self.discovery is not None else ():
                key = record_key(self.identity.network_id, "dataset", offer.name)
                try:
                    assert self.discovery is not None
                    self.discovery.announce(key, self._server.port)
                except (NetworkError, OSError) as error:
                    log.warning("announcing %s failed, trying again: %s", offer.name, error)

    def _count(self, peer: Peer, num_bytes: int) -> None:
        self._sent += num_bytes

    def find_slice(self, sha256: str) -> SliceFile | None:
        """See SliceSource."""
        known = self.hashes.get(sha256)
        path = self.cache.get(sha256) if known is not None else None
        return None if known is None or path is None else SliceFile(path, *known)

    def dataset_name(self, dataset_id: str) -> str | None:
        """See SliceSource."""
        offer = self._offers.get(dataset_id)
        return None if offer is None else offer.name

    def find_file(self, dataset_id: str, name: str) -> bytes | Path | None:
        """See SliceSource."""
        return self._offers[dataset_id].files.get(name)

    def check(self, peer: Peer, dataset: str, dataset_id: str, num_bytes: int) -> None:
        """See SliceSource."""
        if not peer.scope.covers(dataset):
            raise ApiError(403, "not_covered", f"the certificate of {peer.peer_id} does not cover {dataset!r}")
