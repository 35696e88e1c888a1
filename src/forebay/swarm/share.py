"""Servers that hand out slices, by hash, to members of their network: data nodes, and workers that share their cache.

What a server offers it announces; it serves manifest and table, and is a tracker of the dataset's swarm. A worker that
shares does so too: so the others go on, and new ones come in, after the data node that they had it from is gone. What a
worker lost meanwhile is answered 404; what is evicted while it is sent is sent to the end, as its file is open.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from fastapi import FastAPI, Request, Response
from numpy.typing import NDArray
from prometheus_client.core import Metric

from forebay.errors import NetworkError, ProtocolViolation
from forebay.network.app import (
    BINARY,
    ApiError,
    JsonResponse,
    describe_error,
    file_response,
    make_app,
    peer_of,
    source_of,
)
from forebay.network.client import Client
from forebay.network.discovery import Claim, Discovery, record_key
from forebay.network.limits import Limits, Throttle
from forebay.network.messages import ClaimsReply, SwarmReply, SwarmRequest
from forebay.network.peer import Peer, Provider, member_id
from forebay.network.pki.identity import Identity
from forebay.network.server import Server
from forebay.swarm.tracker import Tracker
from forebay.threads import Supervised

log = logging.getLogger("forebay.share")


@dataclass(frozen=True)
class SliceFile:
    """A file that holds a slice; `num_bytes` as the dataset's table says."""

    path: Path
    num_bytes: int
    dataset: str
    dataset_id: str = ""


@dataclass(frozen=True)
class SharedDataset:
    """A dataset that is shared, or a part of it."""

    name: str
    dataset_id: str
    num_slices: int
    files: Mapping[str, bytes | Path]  # by name, small ones or where they lie: manifest and table at least
    held: Callable[[], NDArray[np.bool_]] | None = None  # [num_slices] flags; None: all, unless at `url`
    url: str = ""


class SliceServer(ABC):
    """What those who hand out slices have in common. A subclass says what and to whom.

    Args:
        host: Where to listen. `port`: TCP; 0 takes a free one.
        discovery: Where offers are announced; stays the caller's. None: nowhere.
        ttl_s: How long a claim holds; it is announced anew every third of that.
        named: The host to be known by, where it is not the one to listen at.
    """

    def __init__(
        self,
        title: str,
        identity: Identity,
        host: str,
        port: int,
        *,
        discovery: Discovery | None,
        ttl_s: float,
        limits: Limits | None = None,
        throttle: Throttle | None = None,
        named: str = "",
    ) -> None:
        self.identity = identity
        self.discovery = discovery
        self.ttl_s = ttl_s
        self._named = named
        self._offers: dict[str, SharedDataset] = {}
        self._announcements, self._announce_error = 0, ""
        self._client = Client(identity)
        self.tracker = Tracker(self._client)
        self._stopping, self._changed = threading.Event(), threading.Event()
        with _building:
            self._app = _make_app(title, self)
        self._server = Server(
            self._app, identity, host, port, limits=limits, throttle=throttle, on_bytes=self._count, discovery=discovery
        )
        self._announcer = Supervised(self._keep_announced, "announce", stopping=self._stopping)

    @property
    def port(self) -> int:
        """The TCP port."""
        return self._server.port

    @property
    def address(self) -> str:
        """`host:port`, as others are told."""
        return f"{self._named}:{self.port}" if self._named else self._server.address

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Take no more requests, let downloads end for `timeout_s`, then cut; whether all ended. May be repeated."""
        self._stopping.set()
        self._changed.set()
        drained = self._server.drain(timeout_s)
        self._server.close()
        self.tracker.close()
        self._client.close()
        self._announcer.join(1.0)
        return drained

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def claims(self, peer: Peer, name: str | None = None) -> list[dict[str, Any]]:
        """What it has of each offer, or of those of one name, that a peer's certificate covers, signed, for `ttl_s`."""
        expires_at, own_id = time.time() + self.ttl_s, self.identity.peer_id
        claims = []
        for one in list(self._offers.values()):
            if name in (None, one.name) and peer.scope.covers(one.name):
                held = int(np.count_nonzero(one.held())) if one.held is not None else 0 if one.url else None
                claim = Claim(one.name, one.dataset_id, one.num_slices, own_id, self.address, expires_at, held, one.url)
                claims.append(claim.to_json(self.identity))
        return claims

    def dataset_name(self, dataset_id: str) -> str:
        """The name of a dataset; ApiError if it is not served here."""
        if (offer := self._offers.get(dataset_id)) is None:
            raise ApiError(404, "unknown_dataset", "this node serves no dataset of this id")
        return offer.name

    def find_file(self, dataset_id: str, name: str) -> bytes | Path | None:
        """A small file of a dataset: its bytes or where it lies."""
        found = self._offers[dataset_id].files.get(name)
        return None if isinstance(found, Path) and not found.is_file() else found

    @abstractmethod
    def find_slice(self, sha256: str) -> SliceFile | None:
        """The file of a slice; None if it has none of this hash now."""

    def check(self, peer: Peer, dataset: str, dataset_id: str, num_bytes: int) -> None:
        """Raises ApiError if a peer may not have so many bytes of a dataset; counts them if it may."""
        if not peer.scope.covers(dataset):
            raise ApiError(403, "not_covered", f"the certificate of {peer.peer_id} does not cover {dataset!r}")

    def metrics(self) -> Iterable[Metric]:
        """Its own, beside those that every server has."""
        return ()

    @abstractmethod
    def _count(self, peer: Peer, num_bytes: int) -> None:
        """So many bytes of slices and files were sent to a peer."""

    def _keep_announced(self) -> None:
        while True:
            self._changed.wait(self.ttl_s / 3)
            self._changed.clear()
            if self._stopping.is_set():
                return
            self._announce()

    def _announce(self) -> None:
        if self.discovery is None:
            return
        failure = ""
        for name in dict.fromkeys(offer.name for offer in list(self._offers.values())):
            try:
                self.discovery.announce(record_key(self.identity.network_id, "dataset", name), self.port)
            except (NetworkError, OSError) as error:
                failure = f"{name}: {error}"
                log.warning("announcing %s failed, trying again in %g s: %s", name, self.ttl_s / 3, error)
        self._announcements, self._announce_error = self._announcements + 1, failure


class SliceIndex(Protocol):
    """Where verified slices lie: a SliceCache, or a dict of files by hash."""

    def get(self, sha256: str, /) -> Path | None:
        """The file of a slice; None if it is not here now."""


class SliceShare(SliceServer):
    """The server in every worker, from construction until `close`. A child made by a fork has no part in it, and closes
    nothing.

    `cache`, where the slices lie, stays the caller's. `hashes` has, of each slice that may be handed out, its bytes and
    its dataset's name; it is looked at anew at each request, so that the caller may add to it. Whose certificate does
    not cover the name is refused.
    """

    def __init__(
        self,
        identity: Identity,
        cache: SliceIndex,
        hashes: dict[str, tuple[int, str]],
        host: str,
        port: int,
        throttle: Throttle | None = None,
        *,
        discovery: Discovery | None = None,
        named: str = "",
        ttl_s: float = 60.0,
    ) -> None:
        super().__init__(
            "Forebay worker", identity, host, port, discovery=discovery, ttl_s=ttl_s, throttle=throttle, named=named
        )
        self.session = secrets.token_hex(8)  # which process of its node this is, in a swarm
        self.cache = cache
        self.hashes = hashes
        self.bytes_sent = 0  # of slices and answers
        self._pid = os.getpid()
        self._server.start()
        self._announcer.start()

    def offer(self, offer: SharedDataset) -> None:
        """Announce a dataset, track its swarm, and serve its small files. Its slices are those of `hashes`."""
        own = Provider(member_id(self.identity.peer_id, self.session), self.address, False)
        self.tracker.add(offer.dataset_id, offer.num_slices, [own], offer.held)
        self._offers[offer.dataset_id] = offer
        self._changed.set()

    def close(self, timeout_s: float = 0.0) -> bool:
        """As `stop`; nothing in a fork."""
        return self.stop(timeout_s) if os.getpid() == self._pid else True

    def __exit__(self, *exc: object) -> None:
        self.close()

    def find_slice(self, sha256: str) -> SliceFile | None:
        known = self.hashes.get(sha256)
        path = self.cache.get(sha256) if known is not None else None
        return SliceFile(path, *known) if known is not None and path is not None and path.is_file() else None

    def _count(self, peer: Peer, num_bytes: int) -> None:
        self.bytes_sent += num_bytes


# FastAPI silences warnings while it adds a route, and `warnings.catch_warnings` is not for several threads.
_building = threading.Lock()


def _make_app(title: str, source: SliceServer) -> FastAPI:
    """The HTTP API of a server."""
    app = make_app(title, source.metrics)
    ranged: dict[int | str, dict[str, Any]] = {
        200: {"content": {BINARY: {}}, "description": "All of it."},
        206: {"content": {BINARY: {}}, "description": "The range of the header Range: bytes=START-[END]."},
        416: describe_error("The range is malformed or not in the file."),
    }

    @app.get("/v1/claims", response_model=ClaimsReply, summary="Signed claims of what this node has.")
    async def read_claims(request: Request, name: str | None = None) -> Response:
        return JsonResponse({"claims": source.claims(peer_of(request), name)})

    @app.get("/v1/slices/{sha256}", response_class=Response, responses=ranged, summary="A slice, or a range of it.")
    async def read_slice(request: Request, sha256: str) -> Response:
        found = source.find_slice(sha256)
        if found is None:
            raise ApiError(404, "unknown_slice", "this node has no slice of this hash now")
        response = file_response(request, found.path, found.num_bytes)
        source.check(peer_of(request), found.dataset, found.dataset_id, response.stop - response.start)
        return response

    @app.get(
        "/v1/datasets/{dataset_id}/{name}", response_class=Response, responses=ranged,
        summary="A small file of a dataset: manifest.json, slices.parquet, tokenizer.json …",
    )  # fmt: skip
    async def read_file(request: Request, dataset_id: str, name: str) -> Response:
        source.check(peer_of(request), source.dataset_name(dataset_id), dataset_id, 0)
        found = source.find_file(dataset_id, name)
        if found is None:
            raise ApiError(404, "unknown_file", f"dataset {dataset_id} has no {name[:80]!r} here")
        return file_response(request, found, len(found) if isinstance(found, bytes) else found.stat().st_size)

    @app.post(
        "/v1/swarm/{dataset_id}", response_model=SwarmReply,
        summary="What a reader has and wants; what it should fetch from whom.",
    )  # fmt: skip
    async def steer(request: Request, dataset_id: str, message: SwarmRequest) -> Response:
        peer = peer_of(request)
        source.check(peer, source.dataset_name(dataset_id), dataset_id, 0)
        if not source.tracker.knows(dataset_id):
            raise ApiError(404, "unknown_swarm", "this node tracks no swarm of this dataset")
        try:
            return JsonResponse(source.tracker.answer(peer, dataset_id, message, source_of(request)))
        except ProtocolViolation as error:
            raise ApiError(400, "bad_request", str(error)) from error

    return app
