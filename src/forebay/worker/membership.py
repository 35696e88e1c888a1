"""A worker's membership of a run: the coordinator gives it a rank and world size, which hold while it trains.

membership = Membership("127.0.0.1:8000", "worker-1", settings={"batch_size": 8})
config = membership.agree()                     # the settings of all workers; then build model and data
generation = membership.join()                  # blocks until enough workers have joined
while step < config["num_steps"]:
    ...                                         # samples generation.samples(step, batch_size)
    step += 1
    generation = membership.boundary(step)      # cheap; blocks only while a new generation is formed
membership.leave(finished=True)
"""

import base64
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from forebay.base import Closing, Json
from forebay.coordinator.messages import ANSWER_S
from forebay.errors import NetworkError, UsageError
from forebay.network.client import Client
from forebay.storage.hosts import parse_address
from forebay.storage.retry import log_while_waiting
from forebay.threads import SupervisedThread
from forebay.worker.membership_state import (
    Generation,
    MembershipLostError,
    MembershipState,
    Operation,
    Pause,
    Request,
    T,
)

if TYPE_CHECKING:
    from forebay.network.pki.identity import Identity

log = logging.getLogger("forebay.worker")


class Membership(MembershipState, Closing):
    """One process's membership of a run. Call it from one thread; `changing` may be read from any.

    Args:
        coordinator: "host:port" or an http(s):// URL.
        worker_id: The worker's name in the run; generated where None. A restart under the same id gets its rank back.
        settings: Proposed settings (dataset_type, dataset_name, tokenizer_name, batch_size, seq_len, num_steps,
            seed …). The coordinator's own come first; those that it leaves open are the run's first worker's.
        lockstep: Whether workers step together by a collective operation, with the weights of the source. Without, each
            catches up to the same step before a generation ends.
        step, samples: Of this worker's checkpoint, if it has one: they count only where no worker of the run's last
            generation is left.
        identity: For a coordinator with --identity; None speaks plain HTTP.
        patience_s: How long to wait for a coordinator that does not answer.
        on_note: Called with a line for the user.
    """

    def __init__(
        self, coordinator: str, worker_id: str | None = None, *,
        settings: Mapping[str, Any] | None = None, lockstep: bool = True, step: int = 0, samples: int = 0,
        identity: "Identity | None" = None, patience_s: float = 120.0, on_note: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            worker_id or f"{socket.gethostname()}-{secrets.token_hex(4)}", _address(coordinator, identity),
            settings=settings or {}, lockstep=lockstep, step=step, samples=samples, patience_s=patience_s,
            on_note=on_note or (lambda text: None), clock=time.monotonic, new_session=lambda: secrets.token_hex(16),
            random=Random(),
        )  # fmt: skip
        if identity is not None:
            identity.check_role("worker", "worker")
        self._client = Client(identity)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._heartbeats: SupervisedThread | None = None

    def agree(self) -> Json:
        """The settings of the run: this worker's, overridden by the coordinator's.

        CoordinatorUnreachableError after `patience_s` without an answer.
        """
        return self._await(self.agreeing())

    def join(self) -> Generation:
        """Join the run; returns when a generation with this worker starts, once enough workers have joined.

        Raises:
            DuplicateWorkerError: If another live process has this worker id.
            CoordinatorUnreachableError: After `patience_s` without an answer.
        """
        if self._heartbeats is not None:
            self._heartbeats.stop()  # they end with their session
        generation = self._await(self.joining())
        beats = SupervisedThread(lambda: self._drive(self.heartbeats()), "membership heartbeats")
        self._heartbeats = beats.start()
        return generation

    def boundary(self, step: int, *, stop: bool | None = None, broken: bool = False, holds: bool = True) -> Generation:
        """Call this between steps, with the number of finished steps. Returns the generation to continue in.

        If its number is new, continue at its `start_step` and `start_sample`, with its source's weights. Without a
        change this returns at once, with no network access.

        Args:
            stop: Whether to stop here for a change. None uses `changing`; in lockstep give the value that all ranks
                agreed on in the step's collective (Collective.average does), so that all stop at the same step.
            broken: The current step failed, as a peer is unreachable: stop, and report it.
            holds: False where this worker could not take over the weights of `step`, and still has its earlier ones.

        Raises:
            MembershipLostError: If this worker was expelled: its steps since do not count. Call `join` again.
            CoordinatorUnreachableError: After `patience_s` without an answer, where one is needed.
        """
        return self._await(self.crossing(step, stop=stop, broken=broken, holds=holds))

    def meet(self, rank: int, key: str, value: bytes | None, wait_s: float = 0.0) -> bytes | None:
        """Set a value for the ranks of this generation; with None wait for it up to `wait_s`. From any thread.

        Args:
            rank: The rank that sets the key. Each has keys of its own, which no other can set.

        NetworkError if the coordinator does not answer, the key is another rank's, or the generation has changed.
        """
        body = {**self._me(), "generation": self.generation.number, "rank": rank, "key": key, "wait_s": wait_s}
        if value is not None:
            body["value"] = base64.b64encode(value).decode()
        answer = self._send(Request("/v1/members/meet", body, wait_s), wait_s + ANSWER_S).get("value")
        return None if answer is None else base64.b64decode(str(answer), validate=True)

    def leave(self, *, finished: bool = False) -> None:
        """End the membership; does not raise if the coordinator is unreachable. May be repeated, from any thread.

        Args:
            finished: All steps are done: the others need no new generation. The request is repeated for `patience_s`,
                as the coordinator would wait for this worker after its restart.
        """
        if self._closing.is_set():
            return
        if not finished:
            self._closing.set()
        if self.session:
            try:
                self._await(self.leaving(finished=finished))
            except (NetworkError, MembershipLostError) as error:
                self.on_note(f"could not tell the coordinator that this worker leaves: {error}")
        self.closed = True
        self._closing.set()
        if self._heartbeats is not None:
            self._heartbeats.stop()
            self._heartbeats.join(2.0)
        self._client.close()

    def _await(self, operation: Operation[T]) -> T:
        with log_while_waiting(log, lambda: self.awaited):
            return self._drive(operation)

    def _drive(self, operation: Operation[T]) -> T:
        resume: Callable[[], Request | Pause] = partial(next, operation)
        while True:
            with self._lock:
                try:
                    effect = resume()
                except StopIteration as end:
                    result: T = end.value
                    return result
            try:
                if isinstance(effect, Pause):
                    resume = partial(operation.send, self._closing.wait(effect.seconds))
                else:
                    resume = partial(operation.send, self._send(effect, effect.wait_s + ANSWER_S))
            except NetworkError as error:
                resume = partial(operation.throw, error)

    def _send(self, request: Request, timeout_s: float) -> Json:
        body = dict(request.body)
        return self._client.request_json(
            self.coordinator, "POST", request.path, body, timeout_s=timeout_s, role="scheduler"
        )[0]  # fmt: skip

    def close(self) -> None:
        """Leave, not finished."""
        self.leave()


def _address(coordinator: str, identity: "Identity | None") -> str:
    scheme, mark, rest = coordinator.partition("://")
    expected = "http" if identity is None else "https"
    if mark and scheme.lower() != expected:
        how = "it needs this node's directory: --identity" if identity is None else "with a network it is https"
        raise UsageError(f"coordinator: expected {expected}://HOST:PORT, got {coordinator!r}: {how}.")
    address = (rest if mark else coordinator).rstrip("/")
    parse_address(address)
    return address
