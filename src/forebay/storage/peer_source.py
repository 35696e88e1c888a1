"""Read slices by hash from one peer: as a source of a transfer, or to check what a provider serves."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from forebay.dataset.manifest import SliceInfo
from forebay.errors import NetworkError, ProtocolError
from forebay.network.client import Client, RemoteError, TruncatedBodyError, WrongPeerError
from forebay.network.peer import Provider, node_of
from forebay.storage.base import Origin, PermanentError, TransientError
from forebay.storage.url_policy import FromUrls, open_untrusted_origin

REQUEST_BYTES = 2 << 20
STALL_S = 10.0
MIN_BYTES_PER_S = 1 << 20  # of a check, which others wait for
log = logging.getLogger("forebay.network")
OnFault = Callable[[NetworkError], object]


@dataclass(eq=False)
class ProviderSource(Origin):
    """One slice at one peer; the name of the slice is ignored.

    Args:
        peer_id: Expected at `address`, `host:port`.
        stall_s: A wait of so long, or less than 4 KiB/s during it, is a fault.
        on_fault: Called with each failed request, from the requesting thread.
        once: Do not try again after a transient fault, as there are other sources.
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
    """Yield bytes [start, stop) of a slice, in requests of 2 MiB over one connection. Errors as of Origin."""
    buffer = memoryview(bytearray(min(REQUEST_BYTES, stop - start)))
    while start < stop:
        chunk, fault = buffer[: stop - start], None
        try:
            client.read_range(address, f"/v1/slices/{sha256}", chunk, start, peer_id, timeout_s=stall_s)
        except TruncatedBodyError as error:
            chunk, fault = chunk[: error.received], error
        except NetworkError as error:
            raise classify_error(url, error) from error
        if len(chunk):
            yield chunk
        start += len(chunk)
        if fault is not None:
            raise classify_error(url, fault) from fault


def classify_error(url: str, error: NetworkError) -> NetworkError:
    """Return an error of the client as TransientError or PermanentError; a ProtocolError is returned as it is."""
    if isinstance(error, (ProtocolError, PermanentError, TransientError)):
        return error
    text = f"{url}: {error}"
    if not isinstance(error, RemoteError):
        return PermanentError(text) if isinstance(error, WrongPeerError) else TransientError(text)
    if error.status < 500 and error.status != 429:
        return PermanentError(text)
    return TransientError(text, wait_s=error.wait_s, throttled=error.status in (429, 503))


def read_slice(
    client: Client, provider: Provider, info: SliceInfo, start: int, stop: int, from_urls: FromUrls = ""
) -> Iterator[memoryview]:
    """Yield bytes [start, stop) of a slice from a provider, not verified. Errors as of Origin."""
    if provider.is_url:
        return open_untrusted_origin(provider.address, from_urls).read(info.name, start, stop)
    peer_id, address = node_of(provider.peer_id), provider.address
    return read_by_hash(client, address, peer_id, info.sha256, start, stop, STALL_S, address)


def verify_provider(client: Client, provider: Provider, info: SliceInfo, from_urls: FromUrls = "") -> bool | None:
    """Whether a provider sends a slice with the right hash; None if it is unreachable or may not be asked."""
    digest, deadline = hashlib.sha256(), time.monotonic() + STALL_S + info.bytes / MIN_BYTES_PER_S
    try:
        for chunk in read_slice(client, provider, info, 0, info.bytes, from_urls):
            digest.update(chunk)
            if time.monotonic() > deadline:
                raise NetworkError(f"{provider.address}: expected {MIN_BYTES_PER_S} bytes a second, got less")
    except (PermanentError, ProtocolError) as error:
        log.warning("check of slice %s at %s: %s", info.sha256[:12], provider.address, error)
        return None if provider.is_url and not from_urls else False
    except NetworkError as error:
        log.info("check of slice %s: %s is unreachable: %s", info.sha256[:12], provider.address, error)
        return None
    return digest.hexdigest() == info.sha256
