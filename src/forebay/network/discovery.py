"""Discovery of providers: DHT keys, signed claims, and the search from a dataset's name to its providers.

The DHT is open UDP and may contain false addresses; it only says which addresses to query. A provider's claims come
over mutual TLS, signed by the key of its certificate. Dead, lying and expired providers are dropped here.

An announcement costs an attacker one packet, so a search may find a thousand false addresses: one that accepts no
connection costs a thread 1.5 seconds, one that accepts and then stalls 5 seconds.
"""

import hashlib
import json
import queue
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from pydantic import TypeAdapter

from forebay.base import Json
from forebay.errors import MALFORMED, NetworkError, ProtocolError
from forebay.network import log
from forebay.network.client import Client
from forebay.network.messages import REFUSED, Count, Sha256
from forebay.network.peer import Peer, network_prefix
from forebay.network.pki.identity import Identity, verify
from forebay.storage.base import PermanentError
from forebay.storage.hosts import HostPort, check_url, join_address

MAX_CLAIMS = 512
MAX_CLAIMS_BYTES = 64 << 10
MAX_CLAIM_S = 86_400.0  # longer claims are dropped: they would outlive their node
MAX_ADDRESSES = 4096  # queried in one search
ASK_TIMEOUT_S = 5.0
MAX_ASKING = 256  # threads of a search
MAX_UNTRIED = 32  # addresses that are asked without a first connection
CONNECT_S = 1.5
ANSWER_AFTER_GOOD_S = 1.5
T = TypeVar("T")


class Discovery(Protocol):
    """A store of addresses under keys of 20 bytes, such as a DHT. Thread-safe.

    `fault`: why others are not found now, as `WHAT: why; what to do`; "" if there is nothing wrong.
    """

    fault: str

    def announce(self, key: bytes, port: int) -> None:
        """Announce this host and a TCP port under a key, until the record expires or the process ends."""
        return

    def find(self, key: bytes, timeout_s: float) -> list[HostPort]:
        """Addresses announced under a key, without duplicates; empty after `timeout_s`."""

    def close(self) -> None:
        """Leave. May be repeated."""
        return


def record_key(network_id: str, kind: str, name: str) -> bytes:
    """The DHT key (20 bytes) of a name in one network.

    Kinds are dataset, scheduler, revocations, which have an empty name, and family: all datasets that extend one, by
    whose id they are found.
    """
    return hashlib.sha1(f"forebay/2\n{network_id}\n{kind}\n{name}".encode(), usedforsecurity=False).digest()


@dataclass(frozen=True)
class Claim:
    """A provider's statement that it serves a dataset, valid until `expires_at` (Unix seconds)."""

    name: str
    dataset_id: Sha256
    num_slices: Count
    peer_id: str
    address: str
    expires_at: float
    num_stored: Count | None = None  # slices that it has itself; None: all
    url: str = ""  # a web server or bucket with all slices for which the provider vouches

    @property
    def is_whole(self) -> bool:
        """Whether all slices are available from it or its `url`."""
        return self.num_stored is None or self.url != ""

    def signed_bytes(self) -> bytes:
        """Canonical bytes that the signature covers."""
        return b"forebay/2 claim\n" + json.dumps(self._fields(), sort_keys=True, separators=(",", ":")).encode()

    def to_json(self, identity: Identity) -> Json:
        """The claim with its provider's signature, as sent by `GET /v1/claims`."""
        return {**self._fields(), "signature": identity.sign(self.signed_bytes()).hex()}

    def _fields(self) -> Json:
        return {name: value for name, value in asdict(self).items() if value is not None and value != ""}


_CLAIM = TypeAdapter(Claim)


def parse_claim(obj: Any, peer: Peer) -> Claim:
    """Parse a claim and verify that this peer signed it. Raises ProtocolError."""
    try:
        claim = _CLAIM.validate_python(obj)
        signature = bytes.fromhex(obj["signature"])
    except MALFORMED as error:
        raise ProtocolError(f"claim of {peer.peer_id}: malformed: {' '.join(str(error).split())[:400]}") from error
    if claim.peer_id != peer.peer_id:
        raise ProtocolError(f"claim: expected one of {peer.peer_id}, which answered, got one of {claim.peer_id}")
    if claim.url:
        check_url(claim.url)
    verify(peer.public_key, claim.signed_bytes(), signature)
    return claim


def read_claims(
    client: Client, address: str, name: str, timeout_s: float = ASK_TIMEOUT_S, *, dataset_id: str = ""
) -> list[Claim]:
    """Valid claims on a dataset's name, or on its id, by the peer at an address; `address` of each is the queried one.

    Malformed and forged claims are logged and left out.
    """
    path = f"/v1/claims?name={quote(name, safe='')}" + (f"&id={dataset_id}" if dataset_id else "")
    body, peer = client.request_json(address, "GET", path, timeout_s=timeout_s, max_bytes=MAX_CLAIMS_BYTES, role="data")
    items = body.get("claims")
    if not isinstance(items, list) or len(items) > MAX_CLAIMS:
        raise ProtocolError(f"claims of {peer.peer_id} at {address}: expected a list of at most {MAX_CLAIMS}")
    now = time.time()
    claims = []
    for item in items:
        try:
            claim = parse_claim(item, peer)
        except ProtocolError as error:
            log.info("claim left out: peer_id=%s address=%s reason=%s", peer.peer_id, address, error)
            continue
        is_asked = claim.name == name or claim.dataset_id == dataset_id
        if is_asked and peer.scope.covers(claim.name) and now < claim.expires_at <= now + MAX_CLAIM_S:
            claims.append(replace(claim, address=address))
    return claims


def find_providers(
    discovery: Discovery, client: Client, network_id: str, name: str, timeout_s: float = 10.0, dataset_id: str = "",
    family: str = "",
) -> list[Claim]:  # fmt: skip
    """Claims on a dataset's name, or on its id, one per peer and dataset id, in order of peer id.

    Where none of that name has the id, nodes of the `family` are asked, the id of the first dataset that it extends:
    their datasets, of whatever name, may have all of its slices.

    All announced addresses are queried concurrently (see `ask_many`); those without a valid answer are logged and left
    out. Returns soon after the first valid answer. The DHT is queried for `timeout_s`, repeatedly while it gives only
    false addresses; the last answers may take 5 seconds more. PermanentError if no node has answered, and one
    says that this node is revoked.
    """
    revoked = list[str]()

    def ask(host_port: HostPort) -> list[Claim] | None:
        address = join_address(*host_port)
        try:
            return read_claims(client, address, name, dataset_id=dataset_id) or None
        except NetworkError as error:
            is_news = client.identity is not None and client.identity.contacts.forget(address)
            (log.info if is_news else log.debug)("providers of %s: %s left out: %s", name, address, error)
            if getattr(error, "code", "") in REFUSED:
                revoked.append(str(error))
            return None

    keys = [record_key(network_id, "dataset", name)]
    if family:
        keys.append(record_key(network_id, "family", family))
    asked = set[HostPort]()
    claims = list[Claim]()
    for key in keys:
        deadline = time.monotonic() + timeout_s / len(keys)
        while not any(dataset_id in ("", claim.dataset_id) for claim in claims):
            addresses = discovery.find(key, max(0.0, deadline - time.monotonic()))
            fresh = [address for address in addresses if address not in asked][: MAX_ADDRESSES - len(asked)]
            if not fresh:
                break
            asked.update(fresh)
            try:
                for answer in ask_many(fresh, ask, max(deadline, time.monotonic()) + ASK_TIMEOUT_S):
                    claims += answer
            except (OSError, RuntimeError) as error:  # no file descriptor or thread is available
                raise NetworkError(f"providers of {name}: cannot query {len(fresh)} addresses: {error}") from error
    if revoked and not claims:
        raise PermanentError(revoked[0])
    unique = {(claim.peer_id, claim.dataset_id): claim for claim in reversed(claims)}
    return [unique[key] for key in sorted(unique)]


def spread(addresses: Sequence[HostPort]) -> list[HostPort]:
    """The addresses without duplicates, round-robin over networks (/24, /48) and over the hosts of each.

    So no host and no network crowds out the others.
    """
    by_network: dict[str, dict[str, list[HostPort]]] = {}
    for address in dict.fromkeys(addresses):
        hosts = by_network.setdefault(network_prefix(address[0], 24, 48), {})
        hosts.setdefault(address[0], []).append(address)
    return _take_turns([_take_turns(hosts.values()) for hosts in by_network.values()])


def _take_turns(lists: Iterable[list[HostPort]]) -> list[HostPort]:
    return [address for turn in zip_longest(*lists) for address in turn if address is not None]


def ask_many(addresses: Sequence[HostPort], ask: Callable[[HostPort], T | None], deadline: float) -> list[T]:
    """Results of `ask` that are not None, in order of arrival; `ask` runs in threads and must have a time-out.

    Of many addresses only those are asked that accept a connection. Returns at `deadline` (of time.monotonic), when all
    addresses have answered, or soon after the first result.
    """

    def connect_and_ask(address: HostPort) -> T | None:
        if len(addresses) > MAX_UNTRIED:
            try:
                socket.create_connection(address, CONNECT_S).close()
            except (OSError, OverflowError):  # refused, too late, not a valid address, or no file descriptor
                return None
        return ask(address)

    results: list[T] = []
    finished = queue.SimpleQueue[Future[T | None]]()
    pool = ThreadPoolExecutor(min(MAX_ASKING, len(addresses) or 1), thread_name_prefix="ask")
    try:
        for address in spread(addresses):
            pool.submit(connect_and_ask, address).add_done_callback(finished.put)
        for _ in set(addresses):
            done = finished.get(timeout=max(0.0, deadline - time.monotonic()))
            if (error := done.exception()) is not None:  # whatever a peer sends ends no search
                log.warning("search: an address is left out: %s: %s", type(error).__name__, error)
            elif (result := done.result()) is not None:
                if not results:
                    deadline = min(deadline, time.monotonic() + ANSWER_AFTER_GOOD_S)
                results.append(result)
    except queue.Empty:
        pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return results
