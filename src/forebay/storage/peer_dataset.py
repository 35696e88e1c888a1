"""A dataset that peers of a network announce by name: found by discovery, read by hash over mutual TLS.

Each peer is a source of its own, so that the fastest is asked first and a liar is known by its id. A body comes in
requests of 2 MiB over a kept connection, as the client below fills a buffer and gives nothing back before.
"""

import hashlib
import logging
import os
import threading
import time
import urllib.parse
import weakref
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, Manifest, SliceTable
from forebay.errors import NetworkError, ProtocolViolation, UsageError, install_command
from forebay.network.client import Client
from forebay.network.discovery import Claim, Discovery, find_providers
from forebay.network.pki.identity import Identity
from forebay.network.publications import published
from forebay.storage.base import Origin, PermanentError, Timeouts, TransientError
from forebay.storage.peer_source import classify_error, read_by_hash
from forebay.storage.remote_dataset import read_remote
from forebay.storage.url_policy import FromUrls, UnusableOrigin, check_from_urls, open_untrusted_origin

log = logging.getLogger("forebay.storage")
_FIND_S = 10.0
_FRESH_S = 15.0


class PeerOrigin(Origin):
    """A dataset of a network, by name, behind all peers that serve it.

    `discovery` None is the network's own DHT, joined at the first look-up; `expected_id` None whatever id all who
    announce the name agree on. With `publishers` (peer ids) only what one of them signed counts. `from_urls` says which
    URLs that peers claim to stand for are read (see store.foreign).
    """

    signed_urls: Collection[str] = ()
    """Origins outside the network that a publisher signed for this dataset."""

    def __init__(
        self,
        identity: Identity,
        name: str,
        *,
        expected_id: str | None = None,
        discovery: Discovery | None = None,
        timeouts: Timeouts | None = None,
        publishers: Collection[str] = (),
        from_urls: FromUrls = "",
    ) -> None:
        self.url = f"forebay://{urllib.parse.quote(identity.network_name, safe='')}/{urllib.parse.quote(name)}"
        self.name = name
        self.id = expected_id
        self.publishers = publishers
        check_from_urls(from_urls)
        self._from_urls = from_urls
        self._opened: dict[str, Origin] = {}
        self.identity = identity
        self.timeouts = timeouts or Timeouts()
        self.client = Client(identity)
        self.discovery = discovery  # None before the first look-up, unless it was given
        self._lock = threading.Lock()
        self._table: SliceTable | None = None
        self._table_sha256 = ""
        self._found: list[Origin] = []
        self._found_of: list[Claim] = []
        self._claimed: list[Claim] = []
        self._claimed_at = float("-inf")
        self.sha256_of = lru_cache(maxsize=4096)(self._look_up)

    def sources(self) -> Sequence[Origin]:
        """The peers that serve it now, looked up at most every 15 s. See Origin."""
        claims = self.claims(_FRESH_S)
        with self._lock:
            if self._found_of is not claims:
                # Who has all goes first; a web server or bucket that peers stand for, last.
                whole = sorted(claims, key=lambda claim: not claim.is_whole)
                self._found = [PeerSource(self, claim) for claim in whole]
                urls = sorted({claim.url for claim in claims} - {""})
                self._opened = {url: self._open_url(url) for url in urls}
                self._found += self._opened.values()
                self._found_of = claims
            return list(self._found)

    def claims(self, max_age_s: float) -> list[Claim]:
        """Who serves it now, or a part of it, as it was found so long ago at most; TransientError if nobody does."""
        with self._lock:
            if time.monotonic() - self._claimed_at >= max_age_s or not self._claimed:
                self._claimed = self._claims()
                self._claimed_at = time.monotonic()
            return self._claimed

    def open_url(self, url: str) -> Origin:
        """The origin behind a URL that a tracker named; ProtocolViolation if no data node claims to stand for it."""
        with self._lock:
            if url not in {claim.url for claim in self._claimed}:
                raise ProtocolViolation(f"swarm: expected a URL that a data node claims, got {url[:200]!r}")
            opened = self._open_url(url)
        if isinstance(opened, UnusableOrigin):
            raise PermanentError(str(opened.reason))
        return opened

    def _open_url(self, url: str) -> Origin:
        """With the lock held; an origin that refuses, if it may not be opened."""
        if url not in self._opened:
            try:
                timeouts = Timeouts(stall_s=10.0)
                opened = open_untrusted_origin(url, self._from_urls, signed=self.signed_urls, timeouts=timeouts)
            except NetworkError as error:
                log.info("%s: a URL that peers stand for is not read: %s", self.url, error)
                opened = UnusableOrigin(url, error)
            self._opened[url] = opened
        return self._opened[url]

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """From the first peer that has it. See Origin; a Transfer asks the peers one by one."""
        faults: list[NetworkError] = []
        for source in self.sources():
            try:
                for data in source.read(name, start, stop):
                    start += len(data)
                    yield data
                return
            except NetworkError as error:
                faults.append(error)
        raise _worst(faults, f"{self.url}: no peer has {name}")

    def get(self, name: str, max_bytes: int) -> bytes:
        """A companion of the dataset; manifest and table are verified. See Origin."""
        faults: list[NetworkError] = []
        for source in self.sources():
            try:
                data = source.get(name, max_bytes)
                if self.id is not None and not self.fits(name, data, self.id):
                    raise ProtocolViolation(f"{source.url}: its {name} is not that of the dataset {self.id}")
                return data
            except NetworkError as error:
                faults.append(error)
        raise _worst(faults, f"{self.url}: no peer serves it now")

    def fits(self, name: str, data: bytes, dataset_id: str) -> bool:
        """Whether a companion is the dataset's: of the manifest by the id, of the table by the manifest."""
        found = hashlib.sha256(data).hexdigest()
        if name == MANIFEST_FILE and found == dataset_id:
            self._table_sha256 = Manifest.from_json(data).table_sha256
        return found == {MANIFEST_FILE: dataset_id, TABLE_FILE: self._table_sha256 or found}.get(name, found)

    def _look_up(self, name: str) -> str:
        """The hash of a slice by its name in the table, which is read when first needed."""
        with self._lock:
            table = self._table
        if table is None:
            table = read_remote(self, self.id).table
            with self._lock:
                self._table = table
        index: int = pc.index(table.names, pa.scalar(name)).as_py()
        if index < 0:
            raise PermanentError(f"{self.url}: has no slice {name}")
        return table.row(index).sha256

    def _claims(self) -> list[Claim]:
        """Who serves it. With the lock held."""
        if self.discovery is None:
            self.discovery = _join(self.identity)
            weakref.finalize(self, self.discovery.close)
        try:
            found = find_providers(self.discovery, self.client, self.identity.network_id, self.name, _FIND_S)
            found, _, unsigned = published(self.client, found, self.publishers, self.id)
        except (NetworkError, OSError) as error:
            raise TransientError(f"{self.url}: cannot look for peers: {error}") from error
        ids = sorted({claim.dataset_id for claim in found})
        if self.id is None and len(ids) > 1:
            raise UsageError(
                f"{self.url}: expected one dataset of this name, got {len(ids)}: {', '.join(ids)}. They are never "
                "mixed. Say which: forebay://NETWORK/NAME?id=DATASET_ID."
            )
        self.id = self.id or (ids[0] if ids else None)
        claims = [claim for claim in found if claim.dataset_id == self.id]
        if not claims:
            other = f"; those of this name serve {', '.join(ids)}" if ids else ""
            other += "".join(f"; not counted: {why}" for why in unsigned)
            raise TransientError(f"{self.url}: no peer serves {self.id or 'a dataset of this name'} now{other}")
        return claims


class PeerSource(Origin):
    """One peer that serves a dataset."""

    def __init__(self, origin: PeerOrigin, claim: Claim) -> None:
        self.url = f"{origin.url}#{claim.peer_id}@{claim.address}"
        self.claim = claim
        self._origin = origin

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        origin, claim = self._origin, self.claim
        sha256, stall_s = origin.sha256_of(name), origin.timeouts.stall_s
        yield from read_by_hash(origin.client, claim.address, claim.peer_id, sha256, start, stop, stall_s, self.url)

    def get(self, name: str, max_bytes: int) -> bytes:
        claim = self.claim
        try:
            return self._origin.client.get_bytes(
                claim.address,
                f"/v1/datasets/{claim.dataset_id}/{urllib.parse.quote(name)}",
                max_bytes,
                claim.peer_id,
                self._origin.timeouts.stall_s,
            )
        except NetworkError as error:
            raise classify_error(self.url, error) from error


def _worst(faults: list[NetworkError], none: str) -> NetworkError:
    """What to raise for the faults of all sources: one that may pass, if there is one, so that they are asked again."""
    passing = [fault for fault in faults if isinstance(fault, TransientError)]
    return (passing or faults or [TransientError(none)])[-1]


def open_peers(
    url: str,
    identity: str | Path | Identity | None,
    dataset_id: str | None,
    discovery: Discovery | None,
    timeouts: Timeouts,
    from_urls: FromUrls = "",
) -> PeerOrigin:
    """The origin behind `forebay://NETWORK/NAME`; `identity` as of `open_origin`.

    With `?publisher=PEER_ID` only what that peer signed counts; with `?id=DATASET_ID` it is that version.
    """
    parts = urllib.parse.urlsplit(url)
    network, name = urllib.parse.unquote(parts.netloc), urllib.parse.unquote(parts.path.strip("/"))
    if not network or not name:
        raise UsageError(f"open an origin: expected forebay://NETWORK/NAME, got {url!r}. Name both.")
    queries = urllib.parse.parse_qs(parts.query)
    asked = set(queries.get("id", ())) | ({dataset_id} if dataset_id else set())
    if queries.keys() - {"publisher", "id"} or len(asked) > 1:
        raise UsageError(f"{url}: expected no more than ?publisher=PEER_ID and one ?id=DATASET_ID, got ?{parts.query}")
    publishers, is_default = queries.get("publisher", []), identity is None
    if identity is None:
        home = Path(os.environ.get("FOREBAY_HOME") or Path.home() / ".forebay")
        identity = Identity.load(home / urllib.parse.quote(network, safe=""))
    identity = identity if isinstance(identity, Identity) else Identity.load(identity)
    if identity.network_name != network and not is_default:
        raise UsageError(
            f"{url}: expected an identity in the network {network!r}, got one in {identity.network_name!r}. "
            f"Write forebay://{identity.network_name}/{name}, or give the node's directory of that network."
        )
    return PeerOrigin(
        identity,
        name,
        expected_id=next(iter(asked), None),
        discovery=discovery,
        timeouts=timeouts,
        publishers=publishers,
        from_urls=from_urls,
    )


def _join(identity: Identity) -> Discovery:
    try:
        from forebay.network.dht import LibtorrentDht, wait_for_bootstrap
    except ImportError as error:
        raise UsageError(
            f"forebay://: finding peers needs the package libtorrent. Install it with: {install_command('network')}"
        ) from error
    if not identity.bootstrap:
        raise UsageError(
            f"forebay://: no DHT node is known for {identity.node_dir}: its network was made without --bootstrap. "
            "Give a discovery of your own, or join a network that names one."
        )
    wait_for_bootstrap(identity.bootstrap, _FIND_S)
    return LibtorrentDht("", 0, identity.bootstrap)
