"""Workers' lease states and the `SchedulerCore` in virtual time: requests are lost, come twice and late."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from forebay.lease.messages import ExchangeRequest, ExchangeResult
from forebay.network.peer import Provider
from forebay.scheduler.core import SchedulerCore
from forebay.scheduler.leases import JobSpec
from support.lease_worker import BATCH, DATASET, RECEIPT_S, Worker


class World:
    def __init__(self, seed: int, sizes: list[int], epochs: int, renewal: float = 0.0):
        self.renewal = renewal  # The chance that another attempt is a new request, and not the same again.
        self.chance = random.Random(seed)
        self.now = 0.0
        spec = JobSpec("job", DATASET, np.array(sizes, np.int64), epochs=epochs, lease_s=30.0, steal_s=0.1)
        self.core = SchedulerCore(spec)
        self.expire()
        self.late = []
        self.recorded = Counter()
        self.cuts = 0

    def expire(self):
        """Announce the origin and forget silent workers, as a scheduler does every second or so."""
        self.core.add_origins([Provider("origin", "a:1", True)], self.now)
        self.core.expire(self.now)

    def carry(self, worker: Worker):
        """One attempt: it may be lost on its way or on the way back, and may come again, late."""
        request = worker.next_request()
        if self.chance.random() < 0.2:
            self.late.append((worker.name, request))
        if self.chance.random() < 0.15:
            return
        reply = self.exchange(worker.name, request)
        if reply is not None and self.chance.random() >= 0.15:
            worker.receive(reply)

    def exchange(self, name: str, request: ExchangeRequest) -> ExchangeResult | None:
        try:
            reply, events = self.core.exchange(name, request, self.now)
        except Exception as error:
            if "is not newer than" in str(error):
                return None
            raise
        for event in events:
            self.cuts += type(event).__name__ == "LeaseCut"
            for use in getattr(event, "uses", ()):
                self.recorded.update((use.epoch, use.slice, sample) for sample in range(use.start, use.stop))
        return reply


@pytest.mark.parametrize("seed", range(20))
def test_no_sample_is_used_twice_though_leases_are_cut_and_exchanges_lost(seed):
    """Workers that live and speak waste nothing, lose nothing that they began, and use no sample of another's."""
    chance = random.Random(seed)
    sizes = [chance.randint(0, 40) for _ in range(chance.randint(1, 12))] + [7]
    world = World(seed, sizes, epochs=2, renewal=seed % 2)
    workers = [Worker(f"w{i}", world, chance.choice([0.01, 0.05, 0.5])) for i in range(chance.randint(2, 5))]
    for _ in range(20_000):
        worker = chance.choice(workers)
        if worker.leases.closed:
            workers_left = [w for w in workers if not w.leases.closed]
            if not workers_left:
                break
            continue
        match chance.randrange(6):
            case 0 | 1:
                world.carry(worker)
            case 2 if world.late:
                name, request = world.late.pop(chance.randrange(len(world.late)))
                world.exchange(name, request)
            case _:
                worker.work()
        world.now += 0.001
        if chance.random() < 0.01:
            world.expire()
        if chance.random() < 0.02:  # It waits for another job, or does so no more.
            worker.leases.yield_leases(chance.random() < 0.3)
    assert all(worker.leases.done for worker in workers)
    every = Counter((e, i, s) for e in range(2) for i, size in enumerate(sizes) for s in range(size))
    assert world.recorded == every
    assert sum((Counter(worker.used) for worker in workers), Counter()) == every
    for worker in workers:
        worker.leases.clear()
        assert worker.leases.num_wasted == 0 and worker.leases.num_lost == 0
        assert worker.released == worker.fetched


@pytest.mark.parametrize("sizes", [[10_000], [7] * 1000])
@pytest.mark.parametrize("step_s", [0.01, 0.15, 0.7, 3.0])
def test_lost_leases_waste_at_most_one_receipt_s_and_two_steps(step_s, sizes):
    """From any moment requests get no reply; steps go on as far as they may."""
    wasted = []
    for seed in range(20):
        world = World(seed, sizes, epochs=1)
        gone_at = 6 * max(step_s, RECEIPT_S) * (1 + world.chance.random())
        world.chance.random = lambda: 0.9  # Until then nothing is lost.
        worker, last_steps = Worker("w", world, step_s), -1
        while worker.request is None or worker.steps > last_steps:
            last_steps = worker.steps
            if worker.request is None and worker.leases.due_at(world.now) <= world.now:
                if world.now < gone_at:
                    world.carry(worker)
                else:
                    worker.next_request()
            worker.work()
            world.now += 0.001
        worker.leases.clear()
        wasted.append(worker.leases.num_wasted)
    assert 0 < max(wasted) <= RECEIPT_S / step_s * BATCH + 2 * BATCH
