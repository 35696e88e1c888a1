"""Discovery without a network, for tests."""

import threading
from collections.abc import Iterable

from forebay.storage.hosts import HostPort


class LocalDiscovery:
    """Discovery without a network: one table, shared by all that hold this object, or addresses known before."""

    fault = ""

    def __init__(self, host: str = "127.0.0.1", addresses: Iterable[HostPort] = ()) -> None:
        self._host = host
        self._addresses = list(addresses)
        self._table = {}
        self._lock = threading.Lock()

    def announce(self, key: bytes, port: int) -> None:
        """See Discovery."""
        with self._lock:
            current = self._table.setdefault(key, [])
            if (self._host, port) not in current:
                current.append((self._host, port))

    def find(self, key: bytes, timeout_s: float) -> list[HostPort]:
        """See Discovery. Answers at once."""
        with self._lock:
            return list(dict.fromkeys(self._table.get(key, []) + self._addresses))

    def close(self) -> None:
        """See Discovery. There is nothing to close."""
