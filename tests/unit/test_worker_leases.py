"""Workers' hands and the scheduler's desk, in virtual time: exchanges are lost, come twice and late; workers die."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.network.swarm import Holder
from forebay.schedule.ask import Ask, Reply
from forebay.schedule.desk import Desk, JobSpec, Source
from forebay.worker.answers import Answer, Lease
from forebay.worker.hand import Hand, Held
from leases_by_hand import answer

DATASET = "ab" * 32
BATCH = 3


def answer_of(reply: Reply) -> Answer:
    """A reply as a worker reads it."""
    return Answer.from_json(
        {
            "uses": [vars_of(use) for use in reply.uses],
            "refused": [vars_of(refused) for refused in reply.refused],
            "live": {lease_id: vars_of(live) for lease_id, live in reply.live.items()},
            "lost": list(reply.lost),
            "leases": [
                {
                    "lease_id": g.lease_id, "job": g.job, "job_id": g.job, "epoch": g.epoch, "slice": g.slice_index,
                    "index": g.index, "dataset_id": g.dataset_id, "name": f"{g.index}", "sha256": f"{g.index:064x}",
                    "bytes": 100, "count": g.count, "start": g.start, "stop": g.stop, "sample_base": 0, "seed": 0,
                    "seq_len": 1, "layout": "tokens", "dtype": "U16", "vocab_size": 1,
                    "providers": [vars_of(holder) for holder in g.providers], "expires_in_s": g.expires_in_s,
                }
                for g in reply.leases
            ],
            "wait_s": reply.wait_s, "done": reply.done, "paused": reply.paused, "tell_have": reply.tell_have,
        }
    )  # fmt: skip


def vars_of(value: Any) -> dict[str, Any]:
    return {key: getattr(value, key) for key in value.__dataclass_fields__}


class Worker:
    """A worker's hand, and what it used: (epoch, slice, sample) for each."""

    def __init__(self, name: str, world: World, step_s: float) -> None:
        self.name = name
        self.world = world
        self.step_s = step_s
        self.let_go: Counter[str] = Counter()
        self.hand = Hand(BATCH, None, 10_000, 1.0, self._let_go, lambda: world.now)
        self.used: list[tuple[int, int, int]] = []
        self.held: Held | None = None
        self.said: Ask | None = None
        self.attempt = self.steps = 0
        self.fetched: Counter[str] = Counter()

    def _let_go(self, grant: Lease) -> None:
        self.let_go[grant.lease_id] += 1

    def work(self) -> None:
        """Fetches, and makes one step if one may be made now."""
        for held in self.hand.held:
            if held.path is None and not held.fetching and not held.over:
                assert self.hand.next_to_fetch() is held
                self.fetched[held.grant.lease_id] += 1
                assert self.hand.note_fetched(held, Path("slice"), 0.1)
        if self.held is None and any(held.path is not None and not held.is_spent for held in self.hand.held):
            self.held = self.hand.next_ready()
        held = self.held
        if held is None or (min(held.taken + BATCH, held.stop) > held.limit and not held.over):
            return
        if (taken := self.hand.take(held)) is not None:
            start, stop = taken
            assert stop <= held.limit
            self.world.now += self.step_s
            self.steps += 1
            self.hand.note_used(held, self.steps)
            self.used += [(held.grant.epoch, held.grant.slice_index, sample) for sample in range(start, stop)]
        if held.taken >= held.stop or held.over:
            self.hand.note_over(held)
            self.held = None

    def ask(self) -> Ask:
        """One more attempt of the exchange under way, or the first of the next."""
        self.said = said = self.said or self.hand.state()
        self.attempt += 1
        return replace(said, job="job", session=self.name, attempt=self.attempt, receipt="00")

    def hear(self, reply: Reply) -> None:
        assert self.said is not None
        self.hand.apply_answer(self.said, answer_of(reply))
        self.said = None


class World:
    def __init__(self, seed: int, sizes: list[int], epochs: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        source = Source("data", DATASET, np.array(sizes, np.int64))
        spec = JobSpec("job", (source,), epochs=epochs, lease_s=30.0, steal_s=0.1)
        self.desk = Desk([spec])
        self.expire()
        self.late: list[tuple[str, Ask]] = []
        self.recorded: Counter[tuple[int, int, int]] = Counter()
        self.cuts = 0

    def expire(self) -> None:
        """What a scheduler does every second or so: it says who is there, and forgets who is not."""
        self.desk.origins(DATASET, [Holder("origin", "a:1", True)], self.now)
        self.desk.expire(self.now)

    def carry(self, worker: Worker) -> None:
        """One attempt: it may be lost on its way or on the way back, and may come again, late."""
        ask = worker.ask()
        if self.chance.random() < 0.2:
            self.late.append((worker.name, ask))
        if self.chance.random() < 0.15:
            return
        reply = self.hand_in(worker.name, ask)
        if reply is not None and self.chance.random() >= 0.15:
            worker.hear(reply)

    def hand_in(self, name: str, ask: Ask) -> Reply | None:
        try:
            reply, events = self.desk.exchange(name, ask, self.now)
        except Exception as error:
            if "came after" in str(error):
                return None
            raise
        for event in events:
            self.cuts += type(event).__name__ == "Cut"
            for use in getattr(event, "uses", ()):
                self.recorded.update((use.epoch, use.slice, sample) for sample in range(use.start, use.stop))
        return reply


@pytest.mark.parametrize("seed", range(40))
def test_no_sample_is_used_twice_though_leases_are_cut_and_exchanges_lost(seed: int) -> None:
    """Workers that live and speak waste nothing, lose nothing that they began, and use no sample of another's."""
    chance = random.Random(seed)
    sizes = [chance.randint(0, 40) for _ in range(chance.randint(1, 12))] + [7]
    world = World(seed, sizes, epochs=2)
    workers = [Worker(f"w{i}", world, chance.choice([0.01, 0.05, 0.5])) for i in range(chance.randint(2, 5))]
    for _ in range(20_000):
        worker = chance.choice(workers)
        if worker.hand.is_closed:
            workers_left = [w for w in workers if not w.hand.is_closed]
            if not workers_left:
                break
            continue
        match chance.randrange(6):
            case 0 | 1:
                world.carry(worker)
            case 2 if world.late:
                name, ask = world.late.pop(chance.randrange(len(world.late)))
                world.hand_in(name, ask)
            case _:
                worker.work()
        world.now += 0.001
        if chance.random() < 0.01:
            world.expire()
    assert all(worker.hand.done for worker in workers)
    every = Counter((e, i, s) for e in range(2) for i, size in enumerate(sizes) for s in range(size))
    assert world.recorded == every
    assert sum((Counter(worker.used) for worker in workers), Counter()) == every
    for worker in workers:
        worker.hand.empty()
        assert worker.hand.tally.wasted == 0 and worker.hand.tally.lost == 0
        assert worker.let_go == worker.fetched


@pytest.mark.parametrize("step_s", [0.001, 0.04, 0.3, 3.0])
def test_a_lost_lease_wastes_what_is_used_in_one_receipt_s_and_a_step(step_s: float) -> None:
    """The scheduler stops answering at any moment: an exchange is sent and no answer comes; steps go on meanwhile."""
    batch, receipt_s, now = 4, 0.5, [0.0]
    worst = 0.0
    for seed in range(12):
        chance = random.Random(seed)
        hand = Hand(batch, None, 1 << 30, receipt_s, lambda grant: None, lambda: now[0])
        lease = {
            "lease_id": "1", "job": "j", "job_id": "j", "epoch": 0, "slice": 3, "index": 3, "dataset_id": DATASET,
            "name": "s", "sha256": DATASET, "bytes": 9, "count": 10**6, "start": 0, "stop": 10**6, "sample_base": 0,
            "seed": 0, "seq_len": 1, "layout": "tokens", "dtype": "U16", "vocab_size": 1, "providers": [],
            "expires_in_s": 30.0,
        }  # fmt: skip
        hand.apply_answer(hand.state(), answer(leases=[lease]))
        held = hand.next_to_fetch()
        assert held is not None and hand.note_fetched(held, Path("x"), 0.01) and hand.next_ready() is held
        gone_at = now[0] + 6 * max(step_s, receipt_s) * (1 + chance.random())
        said, ends_at = None, None  # the exchange without an answer; the end of the step under way
        while now[0] < gone_at + 100 * max(step_s, receipt_s):
            if ends_at is None and held.taken + batch <= held.limit:
                hand.take(held)
                ends_at = now[0] + step_s
            due_at = hand._due_at(now[0]) if said is None else float("inf")
            if ends_at is None and said is not None:
                break  # the step after waits for an answer
            now[0] = max(now[0], min(due_at, ends_at if ends_at is not None else float("inf")))
            if ends_at is not None and now[0] >= ends_at:
                hand.note_used(held, 0)
                ends_at = None
            if said is None and hand._due_at(now[0]) <= now[0]:
                asked = hand.state()
                if now[0] >= gone_at:
                    said = asked
                    continue
                uses = [{"lease_id": "1", "offset": use.stop, "stop": 10**6} for use in asked.uses]
                hand.apply_answer(asked, answer(uses=uses, live={"1": {"stop": 10**6, "expires_in_s": 30.0}}))
        assert said is not None and ends_at is None
        hand.empty()
        worst = max(worst, hand.tally.wasted)
    assert 0 < worst <= receipt_s / step_s * batch + batch


def test_leases_are_cut() -> None:
    """The law above is about something: in most worlds idle workers get the ends of others' leases."""
    cuts = 0
    for seed in range(5):
        world = World(seed, [60, 60], epochs=1)
        slow, fast = Worker("slow", world, 0.2), Worker("fast", world, 0.01)
        slow.hand._ahead = 1
        for turn in range(4000):
            worker = slow if turn % 8 == 0 else fast
            if not worker.hand.is_closed:
                worker.work() if world.chance.random() < 0.5 else world.carry(worker)
        cuts += world.cuts
        assert slow.hand.done and fast.hand.done
        assert slow.hand.tally.wasted == fast.hand.tally.wasted == 0
    assert cuts > 0


def test_who_was_cut_does_not_get_it_back_before_the_idle() -> None:
    """The slow one asks first after each cut, for a lease ahead: it must not take what was cut for the fast one."""
    world = World(0, [300, 300, 300], epochs=1)
    world.chance.random = lambda: 0.9  # type: ignore[method-assign]  # nothing is lost
    slow, fast = Worker("slow", world, 0.1), Worker("fast", world, 0.001)
    for turn in range(2000):
        if not slow.hand.is_closed:
            slow.work()
            world.carry(slow)
        # The fast one asks seldom while it has nothing to do, as it is told.
        for _ in range(20 if fast.hand.held or turn % 4 == 0 else 0):
            if not fast.hand.is_closed:
                fast.work()
                world.carry(fast)
    assert world.desk.done() and len(slow.used) + len(fast.used) == 900
    assert world.cuts <= 4 and len(slow.used) <= 100, (world.cuts, len(slow.used))
