"""Strangers train on a mixture of two jobs: each sample is used once, whoever dies, stalls or lies.

One data node, one that sends wrong bytes, a scheduler for each dataset, and six workers, all processes but the liar.
The workers pack whole documents, at speeds from 1 to 10. Two are killed, one is stopped for longer than its leases
last; others must take leases of the slow one.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import numpy as np
import pytest

from forebay import Loader
from forebay.cli import main
from forebay.dataset.reader import open_dataset
from forebay.network.dht import LibtorrentDht
from forebay.network.discovery import record_key
from forebay.network.pki.identity import Identity
from support.calibration import slowness
from support.liars import Liar
from support.nodes import HOST
from support.order_sources import Cluster, Leased, Line, batches_of, wait_for
from support.order_worker import digest_of
from support.waiting import until

SEQ_LEN, TOKENS, BATCH = 16_384, 1_500_000, 4  # 3 MB a slice.
CHANGE_AT = 4
PAUSES_S = [0.03, 0.04, 0.05, 0.06, 0.06, 0.5]
KILLED, STOPPED, SLOW = (0, 1), 2, 5
MIB = 1 << 20
MIXTURE = {
    "dataset": ["web", "books"], "packing": "best_fit", "document_masks": True,
    "weights": [[0, {"web": 1}], [CHANGE_AT, {"web": 1, "books": 1}]],
}  # fmt: skip


class Strangers(Leased):
    seq_len, term_s = SEQ_LEN, 1.0

    def loader(self, index: int) -> dict[str, Any]:
        spec = super().loader(index)
        network = {**spec["network"], "listen": f"{HOST}:0"}
        return {**spec, "batch_size": BATCH, "cache_bytes": 64 * MIB, "network": network}


def make_slices(num_slices: int, seed: int) -> list[tuple[Any, Any]]:
    """Documents of some thousand tokens, some longer than a sample."""
    chance = np.random.default_rng(seed)
    ends = [np.cumsum(chance.lognormal(8.5, 1.0, 400).astype(np.int64) + 1) for _ in range(num_slices)]
    return [(chance.integers(1, 60_000, TOKENS), np.append(of[of < TOKENS], TOKENS)) for of in ends]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        tokens = {"web": make_slices(7, 1), "books": make_slices(3, 2)}
        yield Cluster(tmp_path_factory.mktemp("strangers"), stack, tokens)


@pytest.fixture
def liar(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Iterator[Liar]:
    """A data node of the dataset `web` whose bytes are wrong, in the DHT."""
    with ExitStack() as stack:
        dht = LibtorrentDht(HOST, 0, cluster.bootstrap.at)
        stack.callback(dht.close)
        identity = Identity.load(cluster.homes["liar"])
        liar = stack.enter_context(Liar(identity, open_dataset(cluster.datasets["web"]), "wrong_bytes"))
        dht.announce(record_key(identity.network_id, "dataset", "web"), liar.port)
        find = ("find", "web", "--identity", cluster.homes["worker-7"])
        until(lambda: len(printed(capsys, *find)) == 2)
        yield liar


def printed(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    capsys.readouterr()
    main([*(str(word) for word in argv), "--json"])
    return json.loads(capsys.readouterr().out)


def digests(cluster: Cluster, index: int, name: str) -> dict[tuple[int, int], str]:
    """The digest of each sample of a Loader without a scheduler, by dataset and id."""
    loader = Loader(cluster.datasets[name], seq_len=SEQ_LEN, batch_size=1, packing="best_fit")
    return {(index, int(batch.sample_ids[0])): digest_of(batch, 0) for batch in loader}


def lies_to_workers(liar: Liar) -> list[tuple[str, int]]:
    """Without those to the scheduler, which compares bytes of data nodes with workers' proofs."""
    return [(name, num_bytes) for name, num_bytes in liar.told if name.startswith("worker")]


class Job:
    """The run of all workers, from their start to the end; `given` returns the samples of a worker's batches."""

    def __init__(self, cluster: Cluster, liar: Liar, chance: random.Random) -> None:
        self.source = Strangers(cluster, MIXTURE, ["--samples", "packing=best_fit"])
        # Their speeds differ as much on a busy machine, and they begin together: else a late one finds nothing left.
        factor, gate = min(4.0, slowness()), self.source.directory / "gate"
        settings = [{"pause_s": factor * pause_s, "has_losses": True, "gate": str(gate)} for pause_s in PAUSES_S]
        workers = [self.source.start(index, **each) for index, each in enumerate(settings)]
        for worker in workers:
            worker.ready()
        gate.touch()
        until(lambda: all(len(batches_of(worker)) > CHANGE_AT for worker in workers[:SLOW]))
        workers[STOPPED].kill(signal.SIGSTOP)
        for index in KILLED:
            time.sleep(chance.uniform(0.0, 0.3))
            workers[index].kill()
        time.sleep(self.source.lease_s + 2.0)  # The scheduler looks for expired leases about once a second.
        workers[STOPPED].kill(signal.SIGCONT)
        self.num_early_lies = len(lies_to_workers(liar))
        self.living = [index for index in range(len(workers)) if index not in KILLED]
        wait_for(workers[index] for index in self.living)
        self.lines = [batches_of(worker) for worker in workers]
        self.ends = {index: workers[index].lines()[-1] for index in self.living}

    def given(self, index: int) -> list[tuple[int, int]]:
        return [sample for line in self.lines[index] for sample in zip(line["sources"], line["ids"])]


def test_each_sample_is_used_once_and_the_liar_is_named(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], liar: Liar
) -> None:
    job = Job(cluster, liar, random.Random(0))
    expected = digests(cluster, 0, "web") | digests(cluster, 1, "books")
    for line in chain(*job.lines):
        check_batch(line, expected)
    check_liar(cluster, capsys, liar, job)
    check_ledgers(cluster, job, expected.keys())
    assert all(len(job.given(SLOW)) < len(job.given(index)) for index in job.living if index not in (SLOW, STOPPED))


def check_batch(line: Line, expected: dict[tuple[int, int], str]) -> None:
    """Its rows are those of a Loader alone, and the mixture is the one that was asked for."""
    assert line["digests"] == [expected[sample] for sample in zip(line["sources"], line["ids"])]
    assert line["weight"] == len(line["ids"]) / BATCH
    counts = Counter(line["sources"])
    assert max(counts.values()) <= (BATCH if line["step"] < CHANGE_AT else BATCH // 2)
    assert sorted(counts) == ([0] if line["step"] < CHANGE_AT else [0, 1])


def check_liar(cluster: Cluster, capsys: pytest.CaptureFixture[str], liar: Liar, job: Job) -> None:
    """Two members accuse it, so the scheduler asks it itself; then nobody is sent to it any more."""
    _, address = job.source.schedulers["web"]
    status = printed(capsys, "status", address, "--identity", cluster.homes["worker-7"])
    assert {report["peer_id"] for report in status["bad_providers"]} == {liar.identity.peer_id}
    assert sum(report["reports"] for report in status["bad_providers"]) >= 2
    wrong = [report for end in job.ends.values() for report in end["rejected"] if report["wrong"]]
    names = {Identity.load(home).peer_id: name for name, home in cluster.homes.items()}
    assert {names[report["peer_id"]] for report in wrong} == {"liar"}
    lies = lies_to_workers(liar)
    assert lies and max(num_bytes for _, num_bytes in lies) <= MIB
    later = lies[job.num_early_lies :]  # The stopped worker has leases from before the ban.
    assert {name for name, _ in later} <= {f"worker-{STOPPED}"}, later


def check_ledgers(cluster: Cluster, job: Job, expected: Collection[tuple[int, int]]) -> None:
    """The mixture ends with `books`; another worker uses what remains of `web`. Both ledgers then have all samples."""
    source = job.source
    assert source.verify("books")["ok"] and not source.verify("web")["ok"]
    spec = {**source.loader(6), "dataset": "forebay://test/web", "scheduler": source.schedulers["web"][1]}
    del spec["weights"]
    rest = cluster.worker(loader=spec)
    wait_for([rest])
    used: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for index, name in enumerate(("web", "books")):
        report, num_samples = source.verify(name), sum(of == index for of, _ in expected)
        assert report["ok"], report
        assert report["epochs"] == [{"epoch": 0, "samples": num_samples, "missing": 0, "repeated": 0}]
        for use in source.uses(name):
            used[use["name"]].update((index, number) for number in use["samples"])
    assert sum(used.values(), Counter()) == Counter(expected)
    assert used["worker-6"] == Counter((0, number) for line in batches_of(rest) for number in line["ids"])
    for index in range(len(PAUSES_S)):
        unused = Counter(job.given(index)) - used[f"worker-{index}"]
        assert not used[f"worker-{index}"] - Counter(job.given(index))
        if index in job.living:
            assert unused.total() == job.ends[index]["stats"]["wasted_samples"]
    assert job.ends[STOPPED]["stats"]["leases_lost"] > 0
