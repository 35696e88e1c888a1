"""A dataset, two data nodes, a scheduler and several workers: trained once, fetched once, proved."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("libtorrent")

from forebay.data_node import DataNode
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset, open_dataset
from forebay.dataset.slices import write_rows_slice
from forebay.errors import DatasetError, NetworkError, StateError
from forebay.ledger.chain import Used, receipt_message
from forebay.ledger.verify import verify_ledger
from forebay.load.batch import RowBatch, TokenBatch
from forebay.network.addresses import parse_address
from forebay.network.client import Client, RemoteError
from forebay.network.dht import LibtorrentDht
from forebay.network.pki.identity import Identity, verify
from forebay.scheduler import proofs
from forebay.scheduler.server import SchedulerService
from support.calibration import scaled
from support.leases import work
from support.nodes import HOST, NAME, Bootstrap, make_dataset, make_network
from support.proofs import proof_by_hand

NUM_SLICES = 40
TOKENS = 400
SEQ_LEN = 16
SAMPLES = (NUM_SLICES - 1) * (TOKENS // SEQ_LEN)
MEMBERS = ["data-1", "data-2", "scheduler", "w1", "w2", "w3", "w4"]


class World:
    """The nodes of one test, all in this process."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.stack = stack
        bootstrap = Bootstrap()
        stack.callback(bootstrap.close)
        self.homes = make_network(directory, MEMBERS, bootstrap.at)
        self.dataset = make_dataset(directory / "dataset", NUM_SLICES, TOKENS)
        self.dht = LibtorrentDht(HOST, 0, bootstrap.at)
        stack.callback(self.dht.close)

    def identity(self, name: str) -> Identity:
        return Identity.load(self.homes[name])

    def client(self, name: str) -> Client:
        client = Client(self.identity(name))
        self.stack.callback(client.close)
        return client

    def serve(self, name: str, dataset: Dataset | None = None) -> DataNode:
        node = DataNode(self.identity(name), [dataset or self.dataset], HOST, 0, self.dht, ttl_s=30)
        node.start()
        self.stack.callback(node.stop)
        return node

    def scheduler(self, **settings: Any) -> SchedulerService:
        settings = {"seq_len": SEQ_LEN, "lease_s": 30.0, "rediscover_s": 0.5, **settings}
        service = SchedulerService(
            self.identity("scheduler"), NAME, self.dht, self.client("scheduler"), self.directory / "state", **settings
        )
        service.start()
        self.stack.callback(service.stop)
        return service

    def work(self, name: str, service: SchedulerService, **settings: Any) -> dict[str, float]:
        settings = {"listen": f"{HOST}:0", **settings}
        cache = self.directory / f"cache-{name}"
        return work(self.identity(name), NAME, service.address, cache, **settings)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, stack)


def together(jobs: dict[str, Callable[[], dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Runs workers side by side; a failure of one is raised here."""
    results: dict[str, dict[str, float] | Exception] = {}

    def run(name: str, job: Callable[[], dict[str, float]]) -> None:
        try:
            results[name] = job()
        except Exception as error:  # noqa: BLE001  # raised below, in the test's own thread
            results[name] = error

    threads = [threading.Thread(target=run, args=item) for item in jobs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reports: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        if isinstance(result, Exception):
            raise result
        reports[name] = result
    return reports


def assert_proved(service: SchedulerService, epochs: int = 1) -> None:
    report = verify_ledger(service.ledger_path, service.identity.public_key, verify)
    assert report.ok, report
    assert report.epochs == [{"epoch": e, "samples": SAMPLES, "missing": 0, "repeated": 0} for e in range(epochs)]


def test_four_workers_train_once_and_fetch_once(world: World) -> None:
    nodes = [world.serve("data-1"), world.serve("data-2")]
    # A lease that a busy machine lets expire, or that is cut for who waits, makes two workers fetch a slice.
    service = world.scheduler(lease_s=600.0, steal_s=600.0)
    seen: dict[int, np.ndarray[Any, Any]] = {}
    all_began, begun = threading.Barrier(4), set[threading.Thread]()

    def remember(batch: TokenBatch[Any]) -> None:
        if threading.current_thread() not in begun:  # Else one that starts late finds nothing left.
            begun.add(threading.current_thread())
            all_began.wait()
        time.sleep(0.002)
        for sample_id, inputs in zip(batch.sample_ids.tolist(), batch.inputs):
            assert sample_id not in seen
            seen[sample_id] = inputs.copy()

    reports = together(
        {n: lambda n=n: world.work(n, service, on_batch=remember) for n in ("w1", "w2", "w3", "w4")}  # type: ignore[misc]
    )
    assert service.is_done()
    assert_proved(service)
    used_bytes = int(world.dataset.table.bytes[: NUM_SLICES - 1].sum())
    table_bytes = sum(p.stat().st_size for p in world.dataset.path.iterdir() if p.is_file())
    assert sum(r["fetched_bytes"] for r in reports.values()) == used_bytes
    assert used_bytes <= sum(n.status()["bytes_sent"] for n in nodes) < used_bytes + 40 * table_bytes
    for name, report in reports.items():
        cached = sum(p.stat().st_size for p in (world.directory / f"cache-{name}").glob("?" * 64))
        assert report["samples"] > 0 and cached < used_bytes
        assert report["done"] and report["wasted_samples"] == 0 and 0 <= report["wait_share"] <= 1
    per_slice = TOKENS // SEQ_LEN
    assert sorted(seen) == list(range(SAMPLES))
    tokens = world.dataset.open_slice(1).tokens
    assert np.array_equal(seen[per_slice + 2], tokens[2 * SEQ_LEN : 3 * SEQ_LEN])


def test_a_second_epoch_is_read_from_the_caches(world: World) -> None:
    world.serve("data-1")
    service = world.scheduler(epochs=3)
    report = world.work("w1", service)
    assert report["samples"] == 3 * SAMPLES
    assert report["fetched_slices"] == NUM_SLICES - 1
    assert_proved(service, epochs=3)


def test_rows_are_leased_and_fed_as_they_are(world: World) -> None:
    directory = world.directory / "rows"
    directory.mkdir()
    for i in range(3):
        rows = np.arange(5 * i, 5 * i + 5, dtype=np.int64)
        write_rows_slice(
            directory / f"{i}.safetensors", {"input_ids": rows[:, None], "weight": rows.astype(np.float32)}
        )
    world.serve("data-1", import_slices(directory, NAME))
    service = world.scheduler()
    seen: list[int] = []

    def remember(batch: RowBatch[Any]) -> None:
        ids = batch.sample_ids
        assert np.array_equal(batch["input_ids"][:, 0], ids) and np.array_equal(batch["weight"], ids)
        seen.extend(ids.tolist())

    report = world.work("w1", service, on_batch=remember)
    assert sorted(seen) == list(range(15)) and report["samples"] == 15
    assert verify_ledger(service.ledger_path, verify=verify).ok


def test_a_flipped_byte_is_rejected_and_its_provider_named(world: World) -> None:
    shutil.copytree(world.dataset.path, world.directory / "bad")
    for path in (world.directory / "bad" / "slices").iterdir():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    world.serve("data-1", open_dataset(world.directory / "bad"))
    service = world.scheduler(lease_s=2.0)

    def bring_another() -> None:
        # Only the liar at first, so that it is asked whatever the choice of providers.
        while not service.status()["bad_providers"]:
            time.sleep(0.02)
        world.serve("data-2")

    thread = threading.Thread(target=bring_another)
    thread.start()
    report = world.work("w1", service)
    thread.join()
    liar = world.identity("data-1").peer_id
    # Where the machine stands still for longer than a lease, what was not on record comes again.
    assert report["samples"] - report["wasted_samples"] == SAMPLES
    assert report["rejected_providers"] > 0
    assert {entry["peer_id"] for entry in service.status()["bad_providers"]} == {liar}
    assert_proved(service)


def test_a_worker_told_to_stop_settles_up_and_another_goes_on(world: World) -> None:
    world.serve("data-1")
    service = world.scheduler(lease_s=30.0)
    stop, seen = threading.Event(), list[TokenBatch[Any]]()

    def slow(batch: TokenBatch[Any]) -> None:
        seen.append(batch)
        deadline = time.monotonic() + scaled(60)
        while len(seen) > 100 and service.status()["samples_used"] <= 30 and time.monotonic() < deadline:
            time.sleep(0.01)  # Receipts come every 0.05 s, but on a busy machine not before the last batches.
        if service.status()["samples_used"] > 30:
            stop.set()

    first = world.work("w1", service, on_batch=slow, stop=stop, receipt_s=0.05)
    assert not first["done"] and first["wasted_samples"] == 0
    assert service.status()["slices_leased"] == 0
    assert service.status()["samples_used"] == first["samples"]
    second = world.work("w2", service)
    assert first["samples"] + second["samples"] == SAMPLES
    assert_proved(service)


def test_the_scheduler_returns_at_another_address_and_the_lease_lives_on(world: World) -> None:
    world.serve("data-1")
    service = world.scheduler(lease_s=60.0)
    again: list[SchedulerService] = []

    def restart() -> None:
        while service.status()["samples_used"] < 100:
            time.sleep(0.01)
        service.stop()
        again.append(world.scheduler(lease_s=60.0))

    thread = threading.Thread(target=restart)
    thread.start()
    pause = lambda batch: time.sleep(0.01)  # noqa: E731
    report = world.work("w1", service, on_batch=pause, discovery=world.dht, receipt_s=0.05)
    thread.join()
    assert again[0].address != service.address
    assert report["samples"] == SAMPLES and report["leases_lost"] == 0
    assert_proved(again[0])


def ask(client: Client, service: SchedulerService, **body: Any) -> dict[str, Any]:
    answer = client.request_json(service.address, "POST", "/v2/exchange", {"session": "s", **body})[0]
    assert isinstance(answer, dict)
    return answer


def test_garbage_and_thieves_are_refused(world: World) -> None:
    world.serve("data-1")
    service = world.scheduler()
    owner, thief = world.client("w1"), world.client("w2")
    first = ask(owner, service, want=1)["leases"][0]
    lease_id, job_id = first["lease_id"], first["job_id"]

    def used(client: Client, by: Identity, **more: int) -> dict[str, Any]:
        position = {"epoch": 0, "slice": first["slice"], "start": 0, "stop": 1, "step": 1, **more}
        receipt = receipt_message(job_id, [Used(lease_id, **position)])
        use = {"lease_id": lease_id, **position, "proof": proof_by_hand(owner, first)}
        body = {"job_id": job_id, "uses": [use], "signature": by.sign(receipt).hex()}
        return ask(client, service, **body)

    # A thief's own signature counts for the thief, who has no such lease; the owner's is not the thief's.
    assert used(thief, world.identity("w2"))["refused"][0]["code"] == "lost"
    with pytest.raises(RemoteError, match="not this peer's"):
        used(thief, world.identity("w1"))
    stolen = ask(thief, service, known_leases=[lease_id], release=[lease_id], declared_until={lease_id: 0})
    assert stolen["lost"] == [lease_id]
    refused = used(owner, world.identity("w1"), start=1, stop=2)["refused"]
    assert (refused[0]["code"], refused[0]["offset"]) == ("range", 0)
    assert used(owner, world.identity("w1"))["uses"] == [{"lease_id": lease_id, "offset": 1, "stop": first["stop"]}]
    for body in (
        [], {"want": -1}, {"want": 17}, {"want": 1.5}, {"known_leases": [1]}, {"session": "\n"}, {"uses": [{}]},
        {"more": 1},
        {"declared_until": {lease_id: -1}}, {"cached": {"x": "0"}}, {"failed": [7]},
        {"reports": [{"peer_id": "x", "sha256": "0"}]},
    ):  # fmt: skip
        with pytest.raises(RemoteError) as caught:
            owner.request_json(service.address, "POST", "/v2/exchange", body)
        assert caught.value.status == 400, body
    with pytest.raises(RemoteError, match="POST /v1/nothing: Not Found"):
        owner.request_json(service.address, "POST", "/v1/nothing", {})
    assert service.status()["samples_used"] == 1


def test_an_exchange_that_comes_late_takes_nothing_back(world: World) -> None:
    world.serve("data-1")
    service = world.scheduler()
    owner = world.client("w1")
    first = ask(owner, service, want=2, known_leases=[], attempt=1)["leases"]
    assert len(ask(owner, service, known_leases=[lease["lease_id"] for lease in first], attempt=2)["active"]) == 2
    with pytest.raises(RemoteError, match="attempt 1 is not newer than the last one, 2"):
        ask(owner, service, want=2, known_leases=[], attempt=1)
    assert service.status()["slices_leased"] == 2


def test_a_use_needs_proof_that_its_slice_was_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "MAX_TOKENS_PER_S", 1.0)
    world.serve("data-1")
    service = world.scheduler(stall_s=60.0)
    client, by = world.client("w1"), world.identity("w1")

    def use(lease: dict[str, Any], proof: str | None) -> dict[str, Any]:
        position = {key: lease[key] for key in ("epoch", "slice", "start", "stop")} | {"step": 1}
        signature = by.sign(receipt_message(lease["job_id"], [Used(lease["lease_id"], **position)])).hex()
        row = {"lease_id": lease["lease_id"], **position} | ({} if proof is None else {"proof": proof})
        return ask(client, service, job_id=lease["job_id"], uses=[row], signature=signature)

    first, second = ask(client, service, want=2)["leases"]
    with pytest.raises(RemoteError, match="too soon") as caught:
        use(first, proof_by_hand(client, first))
    assert caught.value.status == 429 and caught.value.wait_s > 0
    monkeypatch.setattr(proofs, "MAX_TOKENS_PER_S", 200.0)
    deadline = time.monotonic() + scaled(30)
    while time.monotonic() < deadline:
        try:
            use(first, None)
        except RemoteError as error:
            if error.status != 429:
                assert (error.status, error.code) == (400, "no_proof")
                break
        time.sleep(0.01)
    assert use(first, proof_by_hand(client, first))["uses"][0]["offset"] == first["stop"]
    # Of another lease's range, another worker's, or of other bytes: none is this one's.
    other = {**second, "lease_id": first["lease_id"]}
    with pytest.raises(RemoteError) as caught:
        use(second, proof_by_hand(client, other))
    assert (caught.value.status, caught.value.code) == (403, "false_proof")
    assert ask(client, service, want=1)["leases"] == [], "who lied is leased nothing for a while"
    assert ask(world.client("w2"), service, want=1)["leases"]


def test_an_assignment_names_providers_and_a_slice_and_carries_no_payload(world: World) -> None:
    """Peer ids and addresses of those who have it, dataset, slice, hash, place: less than a kilobyte."""
    node = world.serve("data-1")
    service = world.scheduler()
    lease = ask(world.client("w1"), service, want=1)["leases"][0]
    row = world.dataset.table.row(lease["slice"])
    provider = {"peer_id": node.identity.peer_id, "address": node.address}
    assert lease["providers"] == [provider]
    assert (lease["dataset_id"], lease["sha256"], lease["bytes"]) == (world.dataset.id, row.sha256, row.bytes)
    assert (lease["start"], lease["stop"], lease["count"]) == (0, TOKENS // SEQ_LEN, TOKENS // SEQ_LEN)
    assert lease["expires_in_s"] > 0 and len(json.dumps(lease)) < 1024


def test_less_than_a_kilobyte_a_slice_passes_through_the_scheduler(world: World) -> None:
    """All that a worker and the scheduler send each other, TLS included, over the slices used."""
    world.serve("data-1")
    service = world.scheduler()
    with Relay(service.address) as relay:
        # Handshakes, some 2,400 bytes each, are once a connection: two or three if threads ask at the same moment.
        # Here they count, with 2,500 bytes for what a job is. Receipts each half of `receipt_s`, of slices that
        # take long, as on a machine that becomes busy, are not what is measured here: none falls into this run.
        report = world.work("w1", service, via=relay.address, receipt_s=scaled(20.0))
    assert report["samples"] == SAMPLES
    assert relay.connections <= 3
    carried = relay.carried - 2500 * (relay.connections + 1)
    print(f"{carried / (NUM_SLICES - 1):.0f} bytes a slice, {relay.connections} connections")
    assert carried < 1024 * (NUM_SLICES - 1)


class Relay:
    """Carries TCP to an address, and counts the bytes of both directions."""

    def __init__(self, target: str) -> None:
        self._target = parse_address(target)
        self._listener = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self._listener.getsockname()[1]}"
        self.carried = self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                self.connections += 1
                far = socket.create_connection(self._target)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.carried += len(data)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.close()


def test_a_stranger_gets_no_claim_manifest_slice_job_or_lease(world: World, tmp_path: Path) -> None:
    node = world.serve("data-1")
    service = world.scheduler()
    # Another network of the same name: all is right but the root key.
    strangers = make_network(tmp_path / "elsewhere", ["w1"], [])
    row, dataset = world.dataset.table.row(0), f"/v1/datasets/{world.dataset.id}"
    with Client(Identity.load(strangers["w1"])) as stranger:
        for address, method, path in [
            (node.address, "GET", "/v1/claims"),
            (node.address, "GET", f"{dataset}/manifest.json"),
            (node.address, "GET", f"{dataset}/slices.parquet"),
            (node.address, "GET", f"/v1/slices/{row.sha256}"),
            (service.address, "GET", "/v1/job"),
            (service.address, "GET", "/v1/status"),
            (service.address, "POST", "/v2/exchange"),
        ]:
            with pytest.raises(NetworkError, match="certificate of the same network"):
                stranger.request_json(address, method, path, {} if method == "POST" else None)
    assert service.status()["slices_leased"] == 0 and service.status()["workers"] == {}
    assert set(node.status()["peers"]) <= {service.identity.peer_id, node.identity.peer_id}


def test_a_state_of_another_job_and_a_dataset_nobody_has(world: World) -> None:
    world.serve("data-1")
    world.scheduler().stop()
    with pytest.raises(StateError, match="seq_len"):
        world.scheduler(seq_len=8)
    nobody = SchedulerService(
        world.identity("scheduler"), "nothing", world.dht, world.client("scheduler"), world.directory / "other",
        seq_len=8, wait_s=0.5,
    )  # fmt: skip
    with pytest.raises(DatasetError, match="'nothing'"):
        nobody.start()
    nobody.stop()
