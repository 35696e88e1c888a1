"""A dataset that peers of a network announce by name: found by discovery, read by hash over mutual TLS.

Each peer is a source of its own, so that the fastest is asked first, and a liar is known by its id.
"""

import hashlib
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, get_args
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from forebay.dataset.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, TABLE_FILE, Manifest, SliceTable
from forebay.errors import DatasetError, NetworkError, ProtocolError, UsageError, full_url, package_for, printable_url
from forebay.machine import home_directory
from forebay.network.client import Client
from forebay.network.discovery import Claim, Discovery, find_providers
from forebay.network.peer_source import (
    REQUEST_BYTES,
    FromUrls,
    PeerSource,
    UnusableOrigin,
    open_untrusted_origin,
)
from forebay.network.pki.identity import Identity
from forebay.network.publications import select_published
from forebay.order.growth import ancestors
from forebay.storage.base import Origin, PermanentError, Timeouts, TransientError, log, read_small, read_whole

_FIND_S = 10.0
_MAX_AGE_S = 15.0
_MAX_TABLE_BYTES = 1 << 30
_T = TypeVar("_T")


class NoPeersError(TransientError):
    """The peers that answered serve no such dataset."""


@dataclass(eq=False)
class PeerOrigin(Origin):
    """A dataset of a network, by name, behind all peers that serve it.

    Args:
        id: None: the id that all peers of this name claim.
        discovery: None: the network's DHT, joined at the first look-up. Else the caller closes it.
        publishers: Peer ids; if given, only datasets signed by one of them count.
        from_urls: Which URLs of peers are read.
        client: Of the identity.
    """

    identity: Identity
    name: str
    client: Client
    id: str | None = None
    discovery: Discovery | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    publishers: Collection[str] = ()
    from_urls: FromUrls = ""

    def __post_init__(self) -> None:
        self.url = f"forebay://{quote(self.identity.network_name, safe='')}/{quote(self.name)}"
        if self.id is not None and not re.fullmatch("[0-9a-f]{64}", self.id):
            raise UsageError(f"{self.url}: expected an id of 64 hex digits, got {self.id!r}. See `forebay find`.")
        if self.from_urls not in get_args(FromUrls):
            raise UsageError(f"from_urls: expected '', 'public' or 'any', got {self.from_urls!r}.")
        self._lock = threading.Lock()
        self._table_sha256 = self.family = ""  # the family: the first of the datasets that it extends
        self._opened: dict[str, Origin] = {}  # by URL
        self._sources: list[Origin] = []
        self._sources_of: list[Claim] = []
        self._claims: list[Claim] = []
        self._claims_at = 0.0
        self.others: list[str] = []  # ids of other datasets of this name
        self.sha256_of = lru_cache(maxsize=4096)(self._look_up_sha256)

    def sources(self) -> Sequence[Origin]:
        """Return the peers that serve it, looked up every 15 s at most. See Origin."""
        claims = self.claims(_MAX_AGE_S)
        with self._lock:
            if self._sources_of is not claims:
                # Peers with all slices come first; web servers and buckets that peers name, last.
                peers = sorted(claims, key=lambda claim: not claim.is_whole)
                self._opened = {url: self._open_url(url) for url in sorted({claim.url for claim in claims} - {""})}
                self._sources = [
                    PeerSource(
                        self.client,
                        claim.peer_id,
                        claim.address,
                        self.sha256_of,
                        self.timeouts.stall_s,
                        claim.dataset_id,
                    )
                    for claim in peers
                ]
                self._sources += self._opened.values()
                self._sources_of = claims
            return list(self._sources)

    def claims(self, max_age_s: float, timeout_s: float = _FIND_S) -> list[Claim]:
        """Return who serves it or a part of it, as of `max_age_s` ago at most; NoPeersError if no peer does."""
        with self._lock:
            if time.monotonic() - self._claims_at >= max_age_s or not self._claims:
                self._claims = self._find_claims(timeout_s)
                self._claims_at = time.monotonic()
            return self._claims

    def open_url(self, url: str) -> Origin:
        """Return the origin at a URL that a tracker named; ProtocolError if no data node claims the URL."""
        with self._lock:
            if url not in {claim.url for claim in self._claims}:
                raise ProtocolError(f"swarm: expected a URL that a data node claims, got {url[:200]!r}")
            opened = self._open_url(url)
        if isinstance(opened, UnusableOrigin):
            raise PermanentError(str(opened.reason))
        return opened

    def _open_url(self, url: str) -> Origin:
        """Open a URL, or return an UnusableOrigin. With the lock held."""
        if url not in self._opened:
            try:
                opened = open_untrusted_origin(url, self.from_urls, timeouts=Timeouts(stall_s=10.0))
            except NetworkError as error:
                log.info("%s: a URL that peers name is not read: %s", self.url, error)
                opened = UnusableOrigin(url, error)
            self._opened[url] = opened
        return self._opened[url]

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """Read from the first peer that has the slice. See Origin; a transfer requests from each peer itself."""
        for first in range(start, stop, REQUEST_BYTES):
            last = min(first + REQUEST_BYTES, stop)
            yield memoryview(self._ask(lambda source: read_whole(source, name, first, last), name))  # noqa: B023

    def get(self, name: str, max_bytes: int) -> bytes:
        """Return a small file of the dataset; manifest and table are verified. See Origin."""

        def get_valid(source: Origin) -> bytes:
            data = source.get(name, max_bytes)
            if self.id is not None and not self._is_valid(name, data):
                raise ProtocolError(f"{source.url}: its {name} is not that of the dataset {self.id}")
            return data

        return self._ask(get_valid, name)

    def size(self, name: str) -> int:
        return self._ask(lambda source: source.size(name), name)

    def _ask(self, request: Callable[[Origin], _T], name: str) -> _T:
        """The first response of a source; else the last transient error, or the last one."""
        faults: list[NetworkError] = []
        for source in self.sources():
            try:
                return request(source)
            except NetworkError as error:
                faults.append(error)
        transient = [fault for fault in faults if isinstance(fault, TransientError)]
        raise (transient or faults or [TransientError(f"{self.url}: no peer has {name}")])[-1]

    def _is_valid(self, name: str, data: bytes) -> bool:
        """Whether a file belongs to the dataset: the manifest by its id, the table by the manifest."""
        if name == MANIFEST_FILE:
            try:
                manifest = Manifest.from_json(data)
            except DatasetError:
                return False
            if manifest.id == self.id:
                self._table_sha256 = manifest.table_sha256
                self.family = next(iter(ancestors(manifest.lineage)), "")
            return manifest.id == self.id
        return name != TABLE_FILE or self._table_sha256 in ("", hashlib.sha256(data).hexdigest())

    def _look_up_sha256(self, name: str) -> str:
        """Return the hash of a slice from the table, which is read unless its dataset is open."""
        if self.table is None:
            read_small(self, MANIFEST_FILE, MAX_MANIFEST_BYTES)  # has the hash of the table
            self.table = SliceTable.from_parquet(read_small(self, TABLE_FILE, _MAX_TABLE_BYTES))
        table = self.table
        index: int = pc.index(table.names, pa.scalar(name)).as_py()
        if index < 0:
            raise PermanentError(f"{self.url}: has no slice {name}")
        return table.row(index).sha256

    def _find_claims(self, timeout_s: float) -> list[Claim]:
        """Look up who serves it. With the lock held."""
        if self.discovery is None:
            self.discovery = join_dht(self.identity)
            weakref.finalize(self, self.discovery.close)
        try:
            claims = find_providers(
                self.discovery, self.client, self.identity.network_id, self.name, timeout_s, self.id or "",
                self.family or self.id or "",
            )  # fmt: skip
            claims, unsigned = select_published(self.client, claims, () if self._claims else self.publishers, self.id)
        except PermanentError:
            raise
        except (NetworkError, OSError) as error:
            raise TransientError(f"{self.url}: cannot look for peers: {error}") from error
        ids = sorted({claim.dataset_id for claim in claims})
        if self.id is None and len(ids) > 1:
            raise UsageError(
                f"{self.url}: expected one dataset of this name, got {len(ids)}: {', '.join(ids)}. "
                "Choose one by its id: ?id= or --id."
            )
        self.id = self.id or (ids[0] if ids else None)
        self.others = [id for id in ids if id != self.id]
        claims = [claim for claim in claims if claim.dataset_id == self.id]
        if not claims:
            other = f"; those of this name serve {', '.join(ids)}" if ids else ""
            other += "".join(f"; not counted: {reason}" for reason in unsigned)
            raise NoPeersError(f"{self.url}: no peer serves {self.id or 'a dataset of this name'} now{other}")
        return claims


def open_peers(
    url: str, *, identity: str | Path | Identity | None = None, dataset_id: str | None = None,
    discovery: Discovery | None = None, timeouts: Timeouts | None = None, from_urls: FromUrls = "",
) -> PeerOrigin:  # fmt: skip
    """Return the origin at `forebay://NETWORK/NAME`.

    `?publisher=PEER_ID`: only datasets that this peer signed; `?id=DATASET_ID`: this version.

    Args:
        identity: A member, or its directory; by default `$FOREBAY_HOME/NETWORK`.
        dataset_id: Only peers that claim this id.
        discovery: How to find peers; by default the network's DHT. The caller closes it.
        from_urls: Which URLs of peers are read too: none, `public` or `any`.
    """
    parts = urlsplit(full_url(url))
    network = unquote(parts.netloc)
    name = unquote(parts.path.strip("/"))
    if not network or not name or "/" in name:
        raise UsageError(
            f"open an origin: expected forebay://NETWORK/NAME, got {printable_url(url)!r}. Write these two."
        )
    query = parse_qs(parts.query)
    ids = set(query.get("id", ())) | ({dataset_id} if dataset_id else set())
    if query.keys() - {"publisher", "id"} or len(ids) > 1:
        raise UsageError(
            f"{printable_url(url)}: expected no more than ?publisher=PEER_ID and one ?id=DATASET_ID, got {[*query]}."
        )
    is_default = identity is None
    if identity is None:
        identity = Path(os.environ.get("FOREBAY_HOME") or home_directory() / ".forebay") / quote(network, safe="")
    identity = identity if isinstance(identity, Identity) else Identity.load(identity)
    identity.check_admitted()
    if identity.network_name != network and not is_default:
        raise UsageError(
            f"{printable_url(url)}: expected an identity in the network {network!r}, got one in "
            f"{identity.network_name!r}. "
            f"Write forebay://{identity.network_name}/{name}, or give the node's directory of that network."
        )
    return PeerOrigin(
        identity, name, Client(identity), next(iter(ids), None), discovery, timeouts or Timeouts(),
        publishers=query.get("publisher", []), from_urls=from_urls,
    )  # fmt: skip


def join_dht(identity: Identity) -> Discovery:
    """Join the DHT of an identity's network. Raises UsageError if it names no node of it."""
    with package_for("forebay://: the search for peers"):
        from forebay.network.dht import LibtorrentDht, wait_for_bootstrap
    if not identity.bootstrap:
        raise UsageError(
            f"forebay://: no DHT node is known for {identity.node_dir}: its network was made without --bootstrap. "
            "Give a discovery of your own, or join a network that names one."
        )
    wait_for_bootstrap(identity.bootstrap, _FIND_S)
    return LibtorrentDht("", 0, identity.bootstrap)
