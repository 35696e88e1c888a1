"""A worker's place in a run: its rank and world size come from the coordinator, and stay true while it trains.

membership = Membership("127.0.0.1:8000", "worker-1", settings={"batch_size": 8}, address=meeting.address)
config = membership.agree()                     # what all workers of the run do; then build model and data
generation = membership.join()                  # blocks until enough workers are there
while step < config["num_steps"]:
    ...                                         # samples generation.samples(step, batch_size)
    step += 1
    generation = membership.boundary(step)      # cheap; blocks only while a new generation forms
membership.leave(finished=True)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millrace.errors import LeaseError, NetworkError

if TYPE_CHECKING:
    from millrace.network.identity import Identity


class CoordinatorGoneError(NetworkError):
    """The coordinator did not answer for as long as the worker was told to wait."""


class DuplicateWorkerError(LeaseError):
    """Another live process is in the run under this worker id."""


class MembershipLostError(LeaseError):
    """This process is no member any more: it was taken for dead, or its id was taken over."""


@dataclass(frozen=True)
class Member:
    """One worker of a generation; `address` is what it gave as the place where its peers meet it, "host:port" or ""."""

    worker_id: str
    rank: int
    address: str


@dataclass(frozen=True)
class Generation:
    """A membership that does not change: it holds for the steps from `start_step` to the next generation's.

    Args:
        number: Rises with every change; groups and keys of an old number must not be used again.
        rank, world_size: This worker's place.
        start_step: The step to go on at, the number of steps that the run has finished.
        start_sample: Samples of the global order that those steps used.
        members: In rank order.
        source: The rank whose weights count at `start_step`; the others take them over.
        run_id: The same for all generations of a run.
    """

    number: int
    rank: int
    world_size: int
    start_step: int
    start_sample: int
    members: tuple[Member, ...]
    source: int
    run_id: str

    def first_sample(self, step: int, batch_size: int) -> int:
        """The first global sample of a step: those of the step are the next batch_size * world_size."""
        return self.start_sample + (step - self.start_step) * batch_size * self.world_size

    def samples(self, step: int, batch_size: int) -> range:
        """The global samples of this rank in a step: every world_size-th, from its rank on."""
        first = self.first_sample(step, batch_size)
        return range(first + self.rank, first + batch_size * self.world_size, self.world_size)


class Membership:
    """One process's membership of a run. Call it from one thread; `changing` may be read from any.

    Args:
        coordinator: "host:port" or an http(s):// URL.
        worker_id: The worker's name in the run; generated where None. A restart under the same id gets its rank back.
        address: Where peers meet this worker ("host:port"), handed out to them; "" where they need not.
        settings: What this worker would do (dataset_type, dataset_name, tokenizer_name, batch_size, seq_len,
            num_steps, seed …). The coordinator's own come first; what it does not say, the run's first worker does.
        lockstep: Whether workers step together by a collective; then the source's weights count. Without, each
            catches up to the same step before a generation ends.
        step, samples: Where this worker's checkpoint stands, if it has one: both count only where no worker of
            the run's last generation is left.
        identity: For a coordinator with --network; None speaks plain HTTP.
        patience_s: How long a coordinator that does not answer is waited for.
        on_note: Told in a line what a person may want to know.
    """

    def __init__(
        self,
        coordinator: str,
        worker_id: str | None = None,
        *,
        address: str = "",
        settings: Mapping[str, Any] | None = None,
        lockstep: bool = True,
        step: int = 0,
        samples: int = 0,
        identity: Identity | None = None,
        patience_s: float = 120.0,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        raise NotImplementedError

    worker_id: str
    generation: Generation

    @property
    def changing(self) -> bool:
        """Whether a new generation is wanted: stop at the next boundary, all ranks at the same one."""
        raise NotImplementedError

    def agree(self) -> dict[str, Any]:
        """What the run does: this worker's settings, with the coordinator's in their place where it has any.

        Raises:
            CoordinatorGoneError, RemoteError.
        """
        raise NotImplementedError

    def join(self) -> Generation:
        """Becomes a member; returns when a generation with it begins, which may take until enough workers are there.

        Raises:
            DuplicateWorkerError: If another live process has this worker id.
            CoordinatorGoneError: After `patience_s` without an answer.
        """
        raise NotImplementedError

    def boundary(self, step: int, *, stop: bool | None = None, broken: bool = False) -> Generation:
        """To be called between steps, with the number of steps finished. The generation to go on in.

        Where its number is another, go on at its `start_step` and `start_sample`, with its source's weights.
        Without a change it returns at once, no network.

        Args:
            stop: Whether to stop here for a change. None asks `changing`; in lockstep give what all ranks agreed on
                in the step's collective (Collective.average does), so that all stop at the same step.
            broken: The step under way failed, as a peer is gone: stops, and says so.

        Raises:
            MembershipLostError: If this worker was expelled: its steps since do not count. Call `join` again.
            CoordinatorGoneError: After `patience_s` without an answer, where one is needed.
        """
        raise NotImplementedError

    def leave(self, *, finished: bool = False) -> None:
        """Ends the membership; never raises for a coordinator that is away. May be called twice.

        Args:
            finished: All steps are done: the others need no new generation.
        """
        raise NotImplementedError

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.leave()
