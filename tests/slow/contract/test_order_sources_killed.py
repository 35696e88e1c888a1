"""Order sources of a Loader whose workers and schedulers are processes, and are killed at any moment.

The moments are random; whichever they are, the tests hold. FOREBAY_CONTRACT_KILLS says how often workers are killed (3
a source), FOREBAY_CONTRACT_SEED when (0). A machine that stands still for longer than the leases of a second last only
makes workers begin again with what others did not use.
"""

import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain

import pytest

pytest.importorskip("libtorrent")

from support.calibration import scaled
from support.order_sources import (
    SAMPLES_PER_WORKER,
    WORKERS,
    Cluster,
    Leased,
    Static,
    batches_of,
    make_slices,
    wait_for,
)
from support.order_worker import open_loader
from support.waiting import until

KILLS = int(os.environ.get("FOREBAY_CONTRACT_KILLS", "3"))
SEED = int(os.environ.get("FOREBAY_CONTRACT_SEED", "0"))
MASKS = {"dataset": "web", "document_masks": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack, {"web": make_slices(18, 0)})


def any_moment(chance: random.Random, workers: list, count: int):
    """Wait until the workers together have so many batches more, and then for a moment within a batch."""
    before = sum(len(batches_of(worker)) for worker in workers)
    until(
        lambda: (
            sum(len(batches_of(worker)) for worker in workers) >= before + count
            or all(worker.wait(0.0) is not None for worker in workers)
        )
    )
    time.sleep(chance.uniform(0.0, 0.03))


class Brief(Leased):
    """With leases that a killed worker keeps from others only for a moment."""

    term_s = 1.0


def test_a_killed_workers_leases_are_used_by_others_once(cluster):
    """What a killed worker had not committed comes again; what the ledger has as used does not.

    The scheduler is killed, too, and started again where it was.
    """
    chance, num_epochs = random.Random(SEED), 1 + KILLS // 4
    source = Brief(cluster, MASKS, ["--epochs", str(num_epochs)])
    source.spec["samples"] = {"prefetch_batches": 2}  # Batches that were formed, and not given, come again, too.
    pause_s, names = 0.02, iter(range(WORKERS, 8))
    live = {index: source.start(index, pause_s=pause_s) for index in range(WORKERS)}
    killed = []
    for _ in range(KILLS):
        any_moment(chance, list(live.values()), chance.randrange(1, 15))
        index = chance.choice(list(live))
        live[index].kill()
        killed.append((index, live.pop(index)))
        again = index if chance.random() < 0.5 else next(names, index)
        live[again] = source.start(again, pause_s=pause_s)
    any_moment(chance, list(live.values()), 3)
    scheduler, address = source.schedulers["web"]
    scheduler.kill()
    assert scheduler.wait() == -9
    source.start_scheduler("web", listen=address)
    wait_for(live.values())
    report = source.verify("web")
    alone = Static(cluster, MASKS)
    alone.num_workers = 1
    numbers = set(chain(*(batch.sample_ids.tolist() for batch in open_loader(alone.loader(0)))))
    assert report["ok"] and [epoch["samples"] for epoch in report["epochs"]] == [len(numbers)] * num_epochs, report
    delivered = defaultdict(list)
    for index, process in [*killed, *live.items()]:
        for line in batches_of(process):
            for number in line["ids"]:
                delivered[line["epoch"], number].append((line["at"], f"worker-{index}"))
    assert delivered.keys() == {(epoch, number) for epoch in range(num_epochs) for number in numbers}
    used = {(use["epoch"], number): use["name"] for use in source.uses("web") for number in use["samples"]}
    assert used == {sample: max(times)[1] for sample, times in delivered.items()}
    repeated = sum(len(times) - 1 for times in delivered.values())
    wasted = sum(process.lines()[-1]["stats"]["wasted_samples"] for process in live.values())
    lines = list(chain(*(batches_of(process) for _, process in killed)))
    of_killed = [(line["epoch"], number) for line in lines for number in line["ids"]]
    assert repeated - wasted <= sum(len(delivered[sample]) > 1 for sample in of_killed)
    # Of each killed worker: what it used in one `receipt_s` of 0.2 s, and two steps.
    assert repeated - wasted <= KILLS * SAMPLES_PER_WORKER * (2 + scaled(0.2) / pause_s)
