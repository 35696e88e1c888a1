"""Many ranks, one store that answers 503 above a rate: each by itself, and by our plan.

Each by itself asks for what its rank reads, and again a second after a refusal, a few times, as simple loaders do. By
our plan the same ranks are steered by the swarm, in which the store is the origin: it gives each slice once, the rest
comes from each other, and a refusal is waited out by the store's own `Backoff`.
"""

from collections import deque
from dataclasses import replace

import numpy as np

from forebay.order.plan import Order
from forebay.simulate.book import Verdict
from forebay.simulate.bound import Bound
from forebay.simulate.broadcast import World
from forebay.simulate.clock import Clock, Progress, Trace
from forebay.simulate.faults import draw
from forebay.simulate.nodes import Gate, Net, Node
from forebay.simulate.result import Result
from forebay.simulate.settings import Settings

_AT_ONCE = 8
_TRIES = 5
_RETRY_S = 1.0


def run(settings: Settings, progress: Progress | None = None) -> Result:
    """Runs both; the result is our plan's, the other's counts begin with `naive`."""
    order = Order(
        np.full(settings.slices, settings.samples, np.int64), settings.seed, settings.workers * settings.batch
    )
    wishes = [order.future(0, 0, rank, settings.workers)[0] for rank in range(settings.workers)]
    missing, repeated, spread = _check_shares(order, settings.workers)
    naive = _Naive(settings, wishes)
    world = World(settings, draw(replace(settings, churn=0.0), 1.0), wishes, Gate(settings.limit_rps))
    bound = _bound(settings, world, wishes)
    trace = Trace()
    trace.follow(world.clock, max(1.0, bound.seconds / 400), world.look, progress)
    ended = world.clock.run(lambda: world.left == 0, 20 * bound.seconds + 1000.0)
    missing += sum(int(reader.wanted.sum()) for reader in world.readers.values())
    gate = world.net.gate
    assert gate is not None
    counts = {
        "requests": gate.asked, "requests_ratio": gate.asked / settings.slices, "answered_503": gate.refused,
        "share_spread": spread, "naive_failed": naive.failed, "naive_requests": naive.gate.asked,
        "naive_requests_ratio": naive.gate.asked / settings.slices, "naive_503": naive.gate.refused,
        "fetches": world.net.counts["fetches"], "events": world.clock.num_events,
    }  # fmt: skip
    fault = "" if ended else f"after {world.clock.now:,.0f} virtual seconds slices are missing."
    verdict = Verdict(order.num_samples, missing, repeated, 0, 0, ())
    return Result(settings, verdict, world.clock.now, bound, world.net.origin_bytes(), counts, fault, trace)


def _check_shares(order: Order, world_size: int) -> tuple[int, int, int]:
    """Samples of the epoch in no rank's share, in several, and the most that shares of a step differ in length."""
    seen = np.zeros(order.num_samples, np.int64)
    steps, spread = order.steps_per_epoch, 0
    lengths = np.zeros((steps, world_size), np.int64)
    for rank in range(world_size):
        for step, share in enumerate(order.shares(0, 0, steps, rank, world_size)):
            seen[share] += 1
            lengths[step, rank] = len(share)
    spread = int((lengths.max(axis=1) - lengths.min(axis=1)).max())
    return int((seen == 0).sum()), int((seen > 1).sum()), spread


def _bound(settings: Settings, world: World, wishes: list[np.ndarray[tuple[int], np.dtype[np.int64]]]) -> Bound:
    """The store's rate and link, each rank's link down, and all links up together."""
    machines = world.machines
    size = settings.slice_bytes
    origin_up = settings.origin_up * settings.origins
    parts = {
        "requests": settings.slices / settings.limit_rps - 1.0,
        "origin": settings.slices * size / origin_up,
        "narrowest link": max(len(one) * size / machine.down for one, machine in zip(wishes, machines)),
        "all links": sum(map(len, wishes)) * size / (origin_up + sum(machine.up for machine in machines)),
    }
    why = max(parts, key=lambda name: parts[name])
    return Bound(parts[why], why, parts, ((0.0, 0.0), (parts[why], 1.0)))


class _Naive:
    """Each rank by itself; runs when it is made.

    Attributes:
        failed: Ranks that gave up.
    """

    def __init__(self, settings: Settings, wishes: list[np.ndarray[tuple[int], np.dtype[np.int64]]]) -> None:
        self.clock, self.gate = Clock(), Gate(settings.limit_rps)
        faults = draw(replace(settings, churn=0.0), 1.0)
        self.net = Net(settings, self.clock, faults)
        self.failed, self._left = 0, len(wishes)
        for machine, wanted in zip(faults.machines, wishes):
            self._begin(self.net.join(machine), deque(wanted.tolist()))
        self.clock.run(lambda: self._left == 0, 1e7)

    def _begin(self, node: Node, wanted: deque[int]) -> None:
        active, gave_up = 0, False
        size, origin = self.net.settings.slice_bytes, self.net.origins[0]

        def fill() -> None:
            nonlocal active
            while wanted and active < _AT_ONCE and not gave_up:
                active += 1
                wanted.popleft()
                ask(1)
            if not active and not wanted:
                self._left -= 1

        def ask(tries: int) -> None:
            nonlocal gave_up
            if gave_up:
                return
            if self.gate.allows(self.clock.now):
                self.net.links.start(origin.link, node.link, size, arrive)
            elif tries < _TRIES:
                self.clock.after(_RETRY_S, lambda: ask(tries + 1))
            else:
                gave_up = True
                self.failed += 1
                self._left -= 1

        def arrive() -> None:
            nonlocal active
            active -= 1
            if not gave_up:
                fill()

        fill()
