"""Slices by hash from one peer that holds them, as a source of a Transfer."""

from collections.abc import Callable, Iterator, Sequence

from forebay.errors import NetworkError, ProtocolViolation
from forebay.network.client import BrokenOffError, Client, RemoteError, WrongPeerError
from forebay.store.origins import Origin, PassingError, RefusedError

REQUEST_BYTES = 2 << 20
OnFault = Callable[[NetworkError], object]


class HolderSource:
    """One slice at one peer, whatever name it is asked for by. See Origin.

    Args:
        address: `host:port`, where `peer_id` must stand.
        stall_s: For each wait; slower than 4 KiB/s over this long counts as stalled.
        on_fault: Told of each request that failed, from the thread that asked.
        once: It is not asked again after one that failed: there are others.
    """

    def __init__(
        self,
        client: Client,
        peer_id: str,
        address: str,
        sha256: str,
        stall_s: float,
        on_fault: OnFault | None = None,
        once: bool = False,
    ) -> None:
        self.url = f"forebay-peer://{peer_id}@{address}"
        self.peer_id = peer_id
        self._client = client
        self._address = address
        self._sha256 = sha256
        self._stall_s = stall_s
        self._on_fault = on_fault
        self._once = once

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """See Origin."""
        try:
            yield from read_by_hash(
                self._client, self._address, self.peer_id, self._sha256, start, stop, self._stall_s, self.url
            )
        except NetworkError as error:
            if self._on_fault is not None:
                self._on_fault(error)
            if self._once and isinstance(error, PassingError):
                raise RefusedError(str(error)) from error
            raise

    def get(self, name: str, max_bytes: int) -> bytes:
        """See Origin: there are slices here and nothing else."""
        raise RefusedError(f"{self.url}: expected a slice to be asked for, got {name}")

    def sources(self) -> Sequence[Origin]:
        """See Origin."""
        return [self]


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
            raise told(url, error) from error
        if len(into):
            yield into
        start += len(into)
        if fault is not None:
            raise told(url, fault) from fault


def told(url: str, error: NetworkError) -> NetworkError:
    """A client's error as one that says whether to ask again."""
    if isinstance(error, (ProtocolViolation, RefusedError, PassingError)):
        return error
    text = f"{url}: {error}"
    if isinstance(error, WrongPeerError):
        return RefusedError(text)
    if isinstance(error, RemoteError) and error.status < 500 and error.status != 429:
        return RefusedError(text)
    if isinstance(error, RemoteError):
        return PassingError(text, wait_s=error.wait_s, throttled=error.status in (429, 503))
    return PassingError(text)
