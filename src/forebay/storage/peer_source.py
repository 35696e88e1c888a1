"""Slices by hash from one peer that holds them, as a source of a Transfer."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from forebay.dataset.manifest import SliceInfo
from forebay.errors import NetworkError, ProtocolViolation
from forebay.network.client import BrokenOffError, Client, RemoteError, WrongPeerError
from forebay.network.peer import Provider, node_of
from forebay.storage.base import Origin, PermanentError, TransientError
from forebay.storage.url_policy import FromUrls, open_untrusted_origin

REQUEST_BYTES = 2 << 20
STALL_S = 10.0
MIN_BYTES_PER_S = 1 << 20  # of a check, which others wait for; who is slower counts as one that does not answer
log = logging.getLogger("forebay.network")
OnFault = Callable[[NetworkError], object]


@dataclass(eq=False)
class ProviderSource(Origin):
    """One slice at one peer, whatever name it is asked for by.

    `peer_id` must stand at `address`, `host:port`. A wait of more than `stall_s`, or less than 4 KiB/s over this long,
    counts as stalled. `on_fault` is told of each request that failed, from the thread that asked. With `once` it is not
    asked again after that: there are others.
    """

    client: Client
    peer_id: str
    address: str
    sha256: str
    stall_s: float
    on_fault: OnFault | None = None
    once: bool = False

    def __post_init__(self) -> None:
        self.url = f"forebay-peer://{self.peer_id}@{self.address}"

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        try:
            yield from read_by_hash(
                self.client, self.address, self.peer_id, self.sha256, start, stop, self.stall_s, self.url
            )
        except NetworkError as error:
            if self.on_fault is not None:
                self.on_fault(error)
            if self.once and isinstance(error, TransientError):
                raise PermanentError(str(error)) from error
            raise


def read_by_hash(
    client: Client, address: str, peer_id: str | None, sha256: str, start: int, stop: int, stall_s: float, url: str
) -> Iterator[memoryview]:
    """Bytes [start, stop) of a slice from a peer, in requests of 2 MiB over a kept connection. Errors as of Origin."""
    buffer = memoryview(bytearray(min(REQUEST_BYTES, stop - start)))
    while start < stop:
        into, fault = buffer[: stop - start], None
        try:
            client.read_range(address, f"/v1/slices/{sha256}", into, start, peer_id, timeout_s=stall_s)
        except BrokenOffError as error:
            into, fault = into[: error.received], error
        except NetworkError as error:
            raise classify_error(url, error) from error
        if len(into):
            yield into
        start += len(into)
        if fault is not None:
            raise classify_error(url, fault) from fault


def classify_error(url: str, error: NetworkError) -> NetworkError:
    """A client's error as one that says whether to ask again."""
    if isinstance(error, (ProtocolViolation, PermanentError, TransientError)):
        return error
    text = f"{url}: {error}"
    if isinstance(error, WrongPeerError):
        return PermanentError(text)
    if isinstance(error, RemoteError) and error.status < 500 and error.status != 429:
        return PermanentError(text)
    if isinstance(error, RemoteError):
        return TransientError(text, wait_s=error.wait_s, throttled=error.status in (429, 503))
    return TransientError(text)


def read_slice(
    client: Client, holder: Provider, info: SliceInfo, start: int, stop: int, from_urls: FromUrls = ""
) -> Iterator[memoryview]:
    """Bytes [start, stop) of a slice, not checked; each piece is valid until the next. Errors as of Origin."""
    if holder.is_url:
        return open_untrusted_origin(holder.address, from_urls).read(info.name, start, stop)
    peer_id = node_of(holder.peer_id)
    return read_by_hash(client, holder.address, peer_id, info.sha256, start, stop, STALL_S, holder.address)


def verify_provider(client: Client, holder: Provider, info: SliceInfo, from_urls: FromUrls = "") -> bool | None:
    """Whether a holder gives a slice with its hash; None if it does not answer now, or may not be asked."""
    digest, deadline = hashlib.sha256(), time.monotonic() + STALL_S + info.bytes / MIN_BYTES_PER_S
    try:
        for piece in read_slice(client, holder, info, 0, info.bytes, from_urls):
            digest.update(piece)
            if time.monotonic() > deadline:
                raise NetworkError(f"{holder.address}: expected {MIN_BYTES_PER_S} bytes a second, got less")
    except (PermanentError, ProtocolViolation) as error:
        log.warning("check of slice %s at %s: %s", info.sha256[:12], holder.address, error)
        return None if holder.is_url and not from_urls else False
    except NetworkError as error:
        log.info("check of slice %s: %s does not answer: %s", info.sha256[:12], holder.address, error)
        return None
    return digest.hexdigest() == info.sha256
