"""A table of leases as plain values, and back: what a snapshot of the desk keeps of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.schedule.leases import LeaseTable
from forebay.schedule.owners import Ended, Lease


def save(table: LeaseTable) -> dict[str, Any]:
    """All that replaying events from the beginning would give, as plain values."""
    return {
        "epoch": table.epoch,
        "before": table.before,
        "used": np.packbits(table.used_of >= table.samples).tobytes().hex(),
        "partly": [
            [int(i), int(table.used_of[i])]
            for i in np.flatnonzero((table.used_of > 0) & (table.used_of < table.samples))
        ],
        "fresh": np.packbits(table.parts.fresh).tobytes().hex(),
        "returned": [[i, start, stop] for (i, start), stop in table.parts.returned.items()],
        "aside": [[i, parts] for i, parts in table.aside.items()],
        "leases": [
            [x.lease_id, x.worker, x.session, x.slice_index, x.start, x.stop, x.position] for x in table.leases.values()
        ],
        "remembered": [
            [i, e.worker, e.epoch, e.slice_index, e.start, e.reached, e.whole] for i, e in table.remembered.items()
        ],
    }


def load(table: LeaseTable, saved: dict[str, Any], now: float) -> None:
    """Puts a snapshot back into a new table."""
    table.before = saved["before"]
    if saved["epoch"] > 0:
        table.begin(saved["epoch"])
    whole = _bits(saved["used"], len(table.samples))
    table.used_of = np.where(whole, table.samples, 0)
    for index, num in saved["partly"]:
        table.used_of[index] = num
    table.used = int(table.used_of.sum())
    table.num_used_slices = int(whole.sum())
    table.parts.fresh = _bits(saved["fresh"], len(table.samples))
    for index, start, stop in saved["returned"]:
        table.parts.give(index, start, stop)
    table.aside = {index: [(i, a, b) for i, a, b in parts] for index, parts in saved["aside"]}
    table.num_aside = sum(stop - start for parts in table.aside.values() for _, start, stop in parts)
    for lease_id, worker, session, index, start, stop, position in saved["leases"]:
        owner = table.owners.at((worker, session), table.lease_s, now)
        lease = Lease(lease_id, worker, session, table.epoch, index, start, stop, position, position, now)
        table.leases[lease_id] = owner.leases[lease_id] = lease
        table.leased += lease.left
    for lease_id, *values in saved["remembered"]:
        table.remembered[lease_id] = Ended(*values)


def _bits(packed: str, count: int) -> NDArray[np.bool_]:
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(packed), np.uint8), count=count)
    return bits.astype(np.bool_)
