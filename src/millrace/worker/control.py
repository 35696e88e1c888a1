"""A worker's line to its scheduler: finds it, pins it, and keeps asking through an outage."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from millrace.errors import NetworkError, ProtocolViolation
from millrace.network.client import Client, RemoteError
from millrace.network.discovery import Discovery, record_key
from millrace.network.identity import Identity

# Once told to stop, this long for each thing still to say to the scheduler.
STOP_PATIENCE_S = 3.0


class SchedulerGone(NetworkError):  # noqa: N818  # it says what happened
    """The scheduler did not answer for as long as the worker was told to wait."""


class Control:
    """Calls a scheduler's doors; safe from several threads.

    The first scheduler that answers for the name is pinned by its peer id: after a restart, at whatever
    address, it must be the same one. Without a fixed address it is found in the DHT.
    """

    def __init__(
        self,
        identity: Identity,
        client: Client,
        name: str,
        discovery: Discovery | None,
        address: str | None,
        patience_s: float,
        stop: threading.Event,
    ) -> None:
        self._identity = identity
        self._client = client
        self._name = name
        self._discovery = discovery
        self._fixed = address
        self._patience_s = patience_s
        self._stop = stop
        self._lock = threading.Lock()
        self._address = address
        self._peer_id: str | None = None
        self._job_id: str | None = None

    def job(self) -> dict[str, Any]:
        """What the scheduler is scheduling; finds it first if need be."""
        return self.call("GET", "/v1/job", None)

    def call(
        self, method: str, path: str, body: dict[str, Any] | None, patience_s: float | None = None
    ) -> dict[str, Any]:
        """One exchange, repeated with back-off while the scheduler is away.

        Raises:
            RemoteError: What the scheduler refuses (lease_lost and the like); never for its being away.
            SchedulerGone: After `patience_s`, or at once when the worker is told to stop.
        """
        patience_s = self._patience_s if patience_s is None else patience_s
        deadline = time.monotonic() + patience_s
        began_stopping = time.monotonic()
        wait_s, last = 0.05, "not found in the DHT"
        while True:
            address = self._find()
            if address is not None:
                try:
                    answer, _ = self._client.request_json(
                        address, method, path, body, expect_peer=self._peer_id, timeout_s=10
                    )
                    if not isinstance(answer, dict):
                        raise ProtocolViolation(f"scheduler {address}{path}: expected an object, got {answer!r:.80}")
                    return answer
                except RemoteError as error:
                    if error.status != 503:
                        raise
                    last = str(error)
                except NetworkError as error:
                    last = str(error)
                    self._forget(address)
            if time.monotonic() + wait_s > deadline:
                break
            if self._stop.is_set():
                # Told to stop: settle up if the scheduler is there, but do not wait long for it.
                time.sleep(wait_s)
                deadline = min(deadline, began_stopping + STOP_PATIENCE_S)
            elif self._stop.wait(wait_s * random.uniform(0.5, 1.0)):
                began_stopping = time.monotonic()
            wait_s = min(2.0, wait_s * 2)
        raise SchedulerGone(
            f"scheduler of {self._name!r}: no answer for {self._patience_s:g} s ({method} {path}); last: {last}. "
            "Is it running, and in this network?"
        )

    def _forget(self, address: str) -> None:
        with self._lock:
            if self._address == address and self._discovery is not None:
                self._address = None

    def _find(self) -> str | None:
        """The address known, else the first that the DHT names and that answers as the scheduler of this name."""
        with self._lock:
            if self._address is not None and self._peer_id is not None:
                return self._address
            candidates = [self._fixed] if self._fixed else []
            if self._discovery is not None:
                key = record_key(self._identity.network_id, "scheduler", self._name)
                try:
                    candidates += [f"{host}:{port}" for host, port in self._discovery.find(key, 2.0)]
                except NetworkError:
                    candidates += []  # the DHT is away too: the caller's patience decides
            for address in dict.fromkeys(candidates):
                if self._is_ours(address):
                    self._address = address
                    return address
            return None

    def _is_ours(self, address: str) -> bool:
        try:
            answer, peer = self._client.request_json(
                address, "GET", "/v1/job", None, expect_peer=self._peer_id, timeout_s=3
            )
        except NetworkError:
            return False
        if not isinstance(answer, dict) or answer.get("name") != self._name:
            return False
        if self._job_id not in (None, answer.get("job_id")):
            return False
        self._peer_id, self._job_id = peer.peer_id, str(answer.get("job_id"))
        return True
