"""A worker's line to its scheduler: finds it, pins it, and keeps asking through an outage.

Whoever answers as the scheduler must be certified as one, wherever its address came from.
"""

import logging
import threading
import time
import urllib.parse
from dataclasses import dataclass
from typing import Any

from forebay.errors import NetworkError, ProtocolViolation
from forebay.network.addresses import join_address, parse_address
from forebay.network.client import Client, RemoteError
from forebay.network.discovery import Discovery, record_key
from forebay.network.messages import STALE_ATTEMPT
from forebay.network.pki.identity import Identity
from forebay.network.retry import backoff_s, waiting

log = logging.getLogger("forebay.worker")
# Once told to stop, this long for each thing still to say to the scheduler.
STOP_PATIENCE_S = 3.0
# An answer takes milliseconds; a scheduler that is stopped, or cut off, is asked anew after this.
ANSWER_S = 10.0
FIRST_WAIT_S, MOST_WAIT_S = 0.05, 1.0
MOST_ASKED_S = 10.0  # a busy scheduler may ask for a longer wait, up to this
MAX_JOB_BYTES = 1 << 20
_DOOR, _ROLE = "/v2/exchange", "scheduler"


class SchedulerUnreachableError(NetworkError):
    """The scheduler did not answer for as long as the worker was told to wait."""


@dataclass(eq=False)
class SchedulerClient:
    """Calls a scheduler's doors; safe from several threads.

    The first scheduler that answers for the name is pinned by its peer id: after a restart, at whatever address, it
    must be the same one. Without a fixed address it is found in the DHT. The name is the job's; "" takes whatever job
    the scheduler gives, and needs an address. Exchanges are numbered from the one after `attempt`, so that one which
    was given up and comes late is not heard once a later one was.
    """

    identity: Identity
    client: Client
    name: str
    discovery: Discovery | None
    fixed_address: str | None
    patience_s: float
    stop: threading.Event
    attempt: int = 0

    def __post_init__(self) -> None:
        if self.fixed_address is not None:
            parse_address(self.fixed_address)
        self._lock = threading.Lock()
        self._address = self.fixed_address
        self._peer_id: str | None = None
        self._job_id: str | None = None
        self._reason = "not asked yet"

    def exchange(self, body: dict[str, Any], patience_s: float | None = None) -> dict[str, Any]:
        """One exchange, repeated with back-off while the scheduler is away; a longer wait is logged with its cause.

        RemoteError if the scheduler refuses it; SchedulerGone after `patience_s`, or at once when told to stop.
        """
        with waiting(log, lambda: f"the scheduler of {self._what}: {self._reason}"):
            return self._exchange(body, patience_s)

    @property
    def _what(self) -> str:
        return repr(self.name) if self.name else "any job"

    def _exchange(self, body: dict[str, Any], patience_s: float | None) -> dict[str, Any]:
        patience_s = self.patience_s if patience_s is None else patience_s
        deadline = time.monotonic() + patience_s
        began_stopping = time.monotonic()
        tried = 0
        while True:
            tried, asked_s = tried + 1, 0.0
            address = self._find()
            if address is not None:
                try:
                    self.attempt += 1
                    self._reason = f"{address} is asked and has not answered yet"
                    body = {**body, "attempt": self.attempt}
                    answer, _ = self.client.request_json(
                        address, "POST", _DOOR, body, expect_peer=self._peer_id, timeout_s=ANSWER_S, role=_ROLE
                    )
                    if not isinstance(answer, dict):
                        raise ProtocolViolation(f"scheduler {address}: expected an object, got {answer!r:.80}")
                    return answer
                except RemoteError as error:
                    # A stale attempt: a copy of it was heard, and its answer lost. The next one is not.
                    if error.status < 500 and error.status != 429 and error.code != STALE_ATTEMPT:
                        raise
                    self._reason, asked_s = str(error), error.wait_s
                except NetworkError as error:
                    self._reason = str(error)
                    self._forget(address)
            wait_s = backoff_s(tried, FIRST_WAIT_S, MOST_WAIT_S, min(asked_s, MOST_ASKED_S))
            if time.monotonic() + wait_s > deadline:
                break
            if self.stop.is_set():
                # Told to stop: settle up if the scheduler is there, but do not wait long for it.
                time.sleep(wait_s)
                deadline = min(deadline, began_stopping + STOP_PATIENCE_S)
            elif self.stop.wait(wait_s):
                began_stopping = time.monotonic()
        raise SchedulerUnreachableError(
            f"scheduler of {self._what}: expected an answer within {patience_s:g} s, got none: {self._reason}. "
            "Check the name, and that the scheduler runs (forebay schedule) in this network."
        )

    def known(self) -> list[str]:
        """Where the scheduler stands, as far as it is known."""
        address = self._address
        return [] if address is None else [address]

    def _forget(self, address: str) -> None:
        with self._lock:
            if self._address == address and self.discovery is not None:
                self._address = None

    def _find(self) -> str | None:
        """The address known, else the first that the DHT names and that answers as the scheduler of this name."""
        with self._lock:
            if self._address is not None and self._peer_id is not None:
                return self._address
            candidates = [self.fixed_address] if self.fixed_address else []
            if self.discovery is not None:
                key = record_key(self.identity.network_id, "scheduler", self.name)
                try:
                    candidates += [join_address(*where) for where in self.discovery.find(key, 2.0)]
                    self._reason = "the DHT was asked and names none"
                except NetworkError as error:  # the caller's patience decides
                    self._reason = f"the DHT cannot be asked: {error}"
            for address in dict.fromkeys(candidates):
                if self._is_ours(address):
                    self._address = address
                    return address
            return None

    def _is_ours(self, address: str) -> bool:
        """Whether the scheduler of this name stands there: the one that was pinned, or else a certified one."""
        self._reason = f"{address} is asked and has not answered yet"
        path = f"/v1/job?name={urllib.parse.quote(self.name, safe='')}" if self.name else "/v1/jobs"
        try:
            # Whoever gives out leases must be certified to: one that is not may stand in the DHT, but is not asked.
            answer, peer = self.client.request_json(
                address, "GET", path, None, self._peer_id, 3.0, MAX_JOB_BYTES, role=_ROLE
            )
        except NetworkError as error:
            self._reason = str(error)
            return False
        if not isinstance(answer, dict) or (self.name and answer.get("name") != self.name):
            self._reason = f"{address} answers for another job"
            return False
        if self.name and self._job_id not in (None, answer.get("job_id")):
            self._reason = f"{address} has begun another job of this name"
            return False
        self._peer_id, self._job_id = peer.peer_id, str(answer.get("job_id"))
        return True
