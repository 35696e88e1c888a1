"""A worker's lease state in virtual time; `world` has the moment `now`, and the chance `renewal` of a new request."""

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from forebay.lease.messages import ExchangeReply, ExchangeRequest, ExchangeResult
from forebay.lease.state import LeaseState

DATASET = "ab" * 32
BATCH, RECEIPT_S = 3, 1.0


LEASE = json.loads("""{"bytes": 100, "sample_base": 0, "seed": 0, "seq_len": 1, "layout": "tokens",
    "dtype": "U16", "vocab_size": 1}""") | {"sha256": DATASET}


def to_reply(result: ExchangeResult) -> ExchangeReply:
    """Return a scheduler's result as a worker reads it."""
    fields = json.loads(json.dumps(asdict(result)))
    fields["leases"] = [{**grant, **LEASE, "job_id": grant["job"]} for grant in fields["leases"]]
    return ExchangeReply.from_json(fields)


class Worker:
    """A worker's leases, and what it used: (epoch, slice, sample) for each."""

    def __init__(self, name: str, world: Any, step_s: float = 0.01) -> None:
        self.name = name  # Of its session.
        self.world = world
        self.step_s = step_s
        self.released = Counter()
        self.leases = LeaseState(BATCH, 10_000, RECEIPT_S, self._release)
        self.used = []
        self.lease = None
        self.request = None
        self.attempt = self.steps = 0
        self.fetched = Counter()

    def _release(self, grant):
        self.released[grant.lease_id] += 1

    def work(self) -> None:
        """Fetches, and makes one step if one may be made now."""
        while (lease := self.leases.next_to_fetch()) is not None:
            self.fetched[lease.grant.lease_id] += 1
            assert self.leases.fetched(lease, Path("slice"), 0.1)
        lease = self.lease = self.lease or self.leases.next_to_use()
        if lease is None:
            return
        if (taken := self.leases.take(lease, self.world.now)) is not None:
            start, stop = taken
            assert stop <= lease.allowed_until
            self.world.now += self.step_s
            self.steps += 1
            self.leases.used([(lease, lease.started)], self.steps, self.world.now)
            self.used += [(lease.grant.epoch, lease.grant.slice, sample) for sample in range(start, stop)]
        if lease.started >= lease.stop or lease.ended:
            self.leases.finish(lease)
            self.lease = None

    def next_request(self) -> ExchangeRequest:
        """Another attempt of the request that has no reply, that or a new one; or the next."""
        if self.request is None or self.world.chance.random() < self.world.renewal:
            self.request = self.leases.request(self.world.now)
        self.attempt += 1
        return replace(self.request, session=self.name, attempt=self.attempt, signature="00")

    def receive(self, reply: ExchangeResult) -> None:
        for lease in self.leases.leases:  # A cut is never before what the worker may have used already.
            live = reply.active.get(lease.grant.lease_id)
            assert live is None or live.stop >= lease.used
        self.leases.receive(self.request, to_reply(reply), self.world.now)
        self.request = None
