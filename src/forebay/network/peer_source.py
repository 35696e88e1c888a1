"""Sources that the network names: peers that send slices by hash, and URLs that data nodes claim.

A URL is opened only if the reader allowed it or the dataset's publisher signed it, and without credentials, options or
proxies of the reader.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar
from urllib.parse import quote, unquote

from forebay.dataset.chunks import HASH_BYTES, ChunkHasher, num_chunks, root_of
from forebay.dataset.manifest import SliceInfo
from forebay.errors import NetworkError, ProtocolError, WrongBytesError, printable_url
from forebay.network import log
from forebay.network.client import Client, WrongPeerError
from forebay.network.peer import Provider, node_of
from forebay.storage.base import Origin, PermanentError, Timeouts, TransientError
from forebay.storage.hosts import check_url
from forebay.storage.http import WebOrigin

REQUEST_BYTES = 2 << 20
SLICE_CHANGED = "slice_changed"  # a peer that finds other bytes in its own file says so, in place of sending them
STALL_S = 10.0
T = TypeVar("T")
MIN_BYTES_PER_S = 1 << 20  # of a check, which others wait for
FromUrls = Literal["", "public", "any"]
"""Which URLs of peers a reader opens: none; https and public buckets at public addresses; or also http and addresses
inside its own network."""


@dataclass(eq=False)
class PeerSource(Origin):
    """A peer that sends slices; a body comes in requests of 2 MiB over one connection.

    Args:
        peer_id: Expected at `address`, `host:port`; None: any.
        sha256_of: Returns the hash of a slice by its name.
        stall_s: A wait of so long, or less than 4 KiB/s during it, is a fault.
        dataset_id: Whose small files `get` returns.
    """

    client: Client
    peer_id: str | None
    address: str
    sha256_of: Callable[[str], str]
    stall_s: float = STALL_S
    dataset_id: str = ""

    def __post_init__(self) -> None:
        self.url = f"forebay-peer://{self.peer_id}@{self.address}"

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        path = f"/v1/slices/{self.sha256_of(name)}" if name.endswith(".safetensors") else self._file_path(name)
        buffer = memoryview(bytearray(min(REQUEST_BYTES, stop - start)))
        while start < stop:
            chunk = buffer[: stop - start]
            fault = None
            try:
                self.client.read_range(self.address, path, chunk, start, self.peer_id, timeout_s=self.stall_s)
            except NetworkError as error:
                chunk = chunk[: getattr(error, "received", 0)]
                fault = error
            if len(chunk):
                yield chunk
            start += len(chunk)
            if fault is not None:
                raise _classify_error(self.url, fault)

    def get(self, name: str, max_bytes: int) -> bytes:
        return self._ask(self.client.get_bytes, self._file_path(name), max_bytes)

    def size(self, name: str) -> int:
        byte = memoryview(bytearray(1))
        try:
            return self._ask(self.client.read_range, self._file_path(name), byte, 0)
        except PermanentError as error:
            if error.status != 416:
                raise
            return 0  # An empty file has no first byte.

    def _ask(self, request: Callable[..., T], *arguments: Any) -> T:
        try:
            return request(self.address, *arguments, self.peer_id, self.stall_s)
        except NetworkError as error:
            raise _classify_error(self.url, error) from error

    def leaves(self, name: str, info: SliceInfo) -> bytes:
        path = f"/v1/slices/{self.sha256_of(name)}/chunks?chunk_bytes={info.chunk_bytes}"
        return self._ask(self.client.get_bytes, path, num_chunks(info.bytes, info.chunk_bytes) * HASH_BYTES)

    def _file_path(self, name: str) -> str:
        return f"/v1/datasets/{self.dataset_id}/{quote(name)}"


def _classify_error(source: str, error: NetworkError) -> NetworkError:
    """Return an error of the client, or a TransientError or PermanentError that it causes."""
    if isinstance(error, (ProtocolError, PermanentError, TransientError)):
        return error
    text = f"{source}: {error}"
    status = getattr(error, "status", 500)
    is_busy = status in (429, 503)
    converted: NetworkError = TransientError(text, wait_s=getattr(error, "wait_s", 0.0), throttled=is_busy)
    if getattr(error, "code", "") == SLICE_CHANGED:
        converted = WrongBytesError(text)
    elif isinstance(error, WrongPeerError):
        converted = PermanentError(text)
    elif status < 500 and not is_busy:
        converted = PermanentError(text, status=status)
    converted.__cause__ = error
    return converted


def read_slice(
    client: Client, provider: Provider, info: SliceInfo, start: int, stop: int, from_urls: FromUrls = ""
) -> Iterator[memoryview]:
    """Yield bytes [start, stop) of a slice from a provider, not verified. Errors as of Origin."""
    source: Origin = PeerSource(client, node_of(provider.peer_id), provider.address, lambda name: info.sha256)
    if provider.is_url:
        source = open_untrusted_origin(provider.address, from_urls)
    return source.read(info.name, start, stop)


def verify_provider(client: Client, provider: Provider, info: SliceInfo, from_urls: FromUrls = "") -> bool | None:
    """Whether a provider sends a slice with the right hash; None if it is unreachable or may not be asked."""
    hasher = ChunkHasher(info.chunk_bytes)
    deadline = time.monotonic() + STALL_S + info.bytes / MIN_BYTES_PER_S
    try:
        for chunk in read_slice(client, provider, info, 0, info.bytes, from_urls):
            hasher.update(chunk)
            if time.monotonic() > deadline:
                raise NetworkError(f"{provider.address}: expected {MIN_BYTES_PER_S} bytes a second, got less")
    except (PermanentError, ProtocolError) as error:
        log.warning("check of slice %s at %s: %s", info.sha256[:12], provider.address, error)
        return None if provider.is_url and not from_urls else False
    except NetworkError as error:
        log.info("check of slice %s: %s is unreachable: %s", info.sha256[:12], provider.address, error)
        return None
    return root_of(hasher.leaves()) == info.sha256


def open_untrusted_origin(url: str, from_urls: FromUrls, *, timeouts: Timeouts | None = None) -> Origin:
    """Return the web server or public bucket at a URL from the network, not connected yet.

    Addresses outside the public internet are refused when it connects, also after a redirect; `any` allows them. A
    bucket is read over https without a signature: `s3://` at AWS, `gs://` at Google.

    Raises:
        PermanentError: If `from_urls` does not allow the URL.
    """
    parts = check_url(url)
    if not from_urls:
        raise PermanentError(
            f"{printable_url(url)}: expected permission to open a URL that a peer named, got none. To allow it, give "
            "--from-urls public (https and public buckets) or --from-urls any (also http and private addresses)."
        )
    if parts.scheme == "http" and from_urls != "any":
        raise PermanentError(f"{printable_url(url)}: expected https, got http. Allow it with --from-urls any.")
    host = parts.netloc
    path = quote(unquote(parts.path))
    match parts.scheme:
        case "s3":
            url = f"https://{host}.s3.amazonaws.com{path}"
        case "gs":
            url = f"https://storage.googleapis.com/{host}{path}"
        case "az":
            raise PermanentError(
                f"{printable_url(url)}: expected a URL with an account, which az:// has not. Serve its https URL."
            )
    origin = WebOrigin(url, timeouts=timeouts, untrusted="any" if from_urls == "any" else "public")
    origin.url = parts.geturl()  # the name of the source in the network
    return origin


@dataclass(eq=False)
class UnusableOrigin(Origin):
    """A source that cannot be opened; each request raises the reason."""

    url: str
    reason: NetworkError

    def read(self, *_: Any, **__: Any) -> NoReturn:
        raise PermanentError(str(self.reason)) from self.reason

    get = size = leaves = read
