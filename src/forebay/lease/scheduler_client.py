"""A worker's connection to its scheduler: finds it, pins it by its peer id, and retries through an outage.

A scheduler must have a certificate with the role scheduler, wherever its address came from.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.base import Json
from forebay.errors import NetworkError
from forebay.network.client import Client, RemoteError
from forebay.network.discovery import Discovery, record_key
from forebay.network.messages import REFUSED, STALE_ATTEMPT
from forebay.network.pki.identity import Identity
from forebay.storage.hosts import join_address, parse_address
from forebay.storage.retry import backoff_s, log_while_waiting

log = logging.getLogger("forebay.worker")
STOPPING_S = 3.0  # after a stop each last request is retried for so long
ANSWER_S = 10.0  # an answer takes milliseconds; a stopped or unreachable scheduler gets another request after this
FIRST_WAIT_S = 0.05
MAX_WAIT_S = 1.0
MAX_RETRY_AFTER_S = 10.0  # a busy scheduler may ask for a longer wait, up to this
MAX_JOB_BYTES = 1 << 20
_PATH = "/v2/exchange"
_ROLE = "scheduler"


class SchedulerUnreachableError(NetworkError):
    """The scheduler did not answer within the worker's patience."""


@dataclass(eq=False)
class SchedulerClient:
    """Sends requests to a scheduler; safe from several threads.

    The first scheduler that answers for the name is pinned by its peer id: after a restart, at whatever address, it
    must be the same one. Without a fixed address it is found in the DHT.

    Args:
        name: The job's; "" takes any, and needs an address.
        attempt: Number of the last attempt of an earlier run; a delayed older attempt is then refused.
    """

    identity: Identity
    client: Client
    name: str
    discovery: Discovery | None
    fixed_address: str | None
    patience_s: float
    stop: threading.Event = field(default_factory=threading.Event)
    attempt: int = 0

    def __post_init__(self) -> None:
        self.identity.check_role("worker", "worker", *filter(None, [self.name]))
        if self.fixed_address is not None:
            parse_address(self.fixed_address)
        self._lock = threading.Lock()
        self._address = self.fixed_address
        self._peer_id: str | None = None
        self._job_id: str | None = None
        self.job: Json = {}
        self._reason = "no request was sent yet"
        self._subject = f"the scheduler of {self.name!r}" if self.name else "the scheduler"

    def exchange(self, body: Json, patience_s: float | None = None) -> Json:
        """One exchange, repeated with back-off while the scheduler is unreachable; a long wait is logged with a cause.

        RemoteError if the scheduler refuses it; SchedulerUnreachableError after `patience_s`, or soon after a stop.
        """
        return self._repeat(lambda address: self._post(address, body), patience_s)

    def read_job(self) -> Json:
        """The job's description, as of `GET /v1/job`; the scheduler is pinned. Raises as `exchange`."""
        # If it is not known yet, finding it reads its job.
        return self._repeat(self._read if self._peer_id is not None else lambda address: self.job)

    def addresses(self) -> list[str]:
        """The scheduler's address, if it is known."""
        address = self._address
        return [] if address is None else [address]

    def describe_wait(self) -> str:
        """Return why the scheduler does not answer, for a log line."""
        return f"{self._subject}: {self._reason}"

    def _post(self, address: str, body: Json) -> Json:
        self.attempt += 1
        self._reason = f"{address} has not answered yet"
        body = {**body, "attempt": self.attempt}
        answer, _ = self.client.request_json(
            address, "POST", _PATH, body, expect_peer=self._peer_id, timeout_s=ANSWER_S, role=_ROLE
        )
        return answer

    def _repeat(self, request: Callable[[str], Json], patience_s: float | None = None) -> Json:
        patience_s = self.patience_s if patience_s is None else patience_s
        stopped_at = time.monotonic()
        deadline = stopped_at + patience_s
        tried = 0
        with log_while_waiting(log, self.describe_wait):
            while True:
                tried = tried + 1
                retry_after_s = 0.0
                address = self._find()
                if address is not None:
                    try:
                        return request(address)
                    except RemoteError as error:
                        # A stale attempt: a copy of it was answered, and the answer lost. The next attempt is newer.
                        if error.status < 500 and error.status != 429 and error.code != STALE_ATTEMPT:
                            raise
                        self._reason = str(error)
                        retry_after_s = error.wait_s
                    except NetworkError as error:
                        self._reason = str(error)
                        with self._lock:
                            if self._address == address and self.discovery is not None:
                                self._address = None
                wait_s = backoff_s(tried, FIRST_WAIT_S, MAX_WAIT_S, min(retry_after_s, MAX_RETRY_AFTER_S))
                if time.monotonic() + wait_s > deadline:
                    break
                if self.stop.is_set():
                    # Acknowledge and release what is left if the scheduler is reachable, but do not wait long for it.
                    time.sleep(wait_s)
                    deadline = min(deadline, stopped_at + STOPPING_S)
                elif self.stop.wait(wait_s):
                    stopped_at = time.monotonic()
        reason = self._reason + ("" if self._reason.endswith(("?", ".")) else ".")
        raise SchedulerUnreachableError(
            f"{self._subject.removeprefix('the ')}: expected an answer within {patience_s:g} s, got none: "
            f"{reason} Check the name, and that the scheduler runs (forebay scheduler) in this network."
        )

    def _find(self) -> str | None:
        with self._lock:
            if self._address is not None and self._peer_id is not None:
                return self._address
            candidates = [self.fixed_address] if self.fixed_address else []
            if self.discovery is not None:
                key = record_key(self.identity.network_id, "scheduler", self.name)
                candidates += [join_address(*address) for address in self.discovery.find(key, 2.0)]
                self._reason = self.discovery.fault or "the DHT names none"
            for address in dict.fromkeys(candidates):
                try:
                    self._read(address)
                except NetworkError as error:
                    if getattr(error, "code", "") in REFUSED:
                        raise
                    self._reason = str(error)
                else:
                    self._address = address
                    return address
            return None

    def _read(self, address: str) -> Json:
        """The job of the scheduler at an address. NetworkError if it is not the pinned one, or a certified one."""
        self._reason = f"{address} has not answered yet"
        # The DHT may name peers that are not certified as schedulers; they get no request.
        answer, peer = self.client.request_json(
            address, "GET", "/v1/job", None, self._peer_id, 3.0, MAX_JOB_BYTES, role=_ROLE
        )
        if self.name and answer.get("name") != self.name:
            raise NetworkError(f"{address} answers for another job")
        if self._job_id not in (None, answer.get("job_id")):
            raise NetworkError(f"{address} has started another job")
        self._peer_id, self._job_id, self.job = peer.peer_id, str(answer.get("job_id")), answer
        return answer
