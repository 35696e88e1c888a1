"""Loaders that share: ranks whose caches are smaller than the dataset read it from each other; a fork, a dead node."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.data_node import DataNode
from forebay.dataset.reader import open_dataset
from forebay.load.loader import Loader
from forebay.load.options import NetworkOptions, OrderOptions
from forebay.network.pki.identity import Identity, create_network, join
from forebay.storage.hosts import parse_address
from forebay.storage.origins import RemoteDataset, open_remote
from support.calibration import scaled
from support.feeding import _processes, are_whole, make_dataset, read_lines, read_steps
from support.local_discovery import LocalDiscovery

SLICES, SAMPLES, SEQ_LEN, RANKS = 16, 16, 2048, 4
READ = {"seq_len": SEQ_LEN, "global_batch_size": 16, "seed": 3, "epochs": 2, "world_size": RANKS}
READ |= {"order": OrderOptions(lanes=16)}  # So that ranks read different slices at a time, of few.


SHARED = NetworkOptions(listen="auto")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    make_dataset(folder / "c4", SLICES, SAMPLES, SEQ_LEN)
    create_network(folder / "network", "net", bootstrap=[])
    for name in ["node", *(f"rank{i}" for i in range(RANKS))]:
        join(folder / "network", folder / name, name)
    return folder


@pytest.fixture
def node(world) -> Iterator[DataNode]:
    with DataNode(Identity.load(world / "node"), [open_dataset(world / "c4")], "127.0.0.1", 0, None) as node:
        yield node


def remote(world: Path, name: str, address: str) -> RemoteDataset:
    registered = LocalDiscovery(addresses=[parse_address(address)])
    return open_remote("forebay://net/c4", identity=world / name, discovery=registered)


def _rank(world, identity, address, out, arguments, together):
    """Read in step with the others, as ranks of one training do: none is far ahead of another, or gone before it."""
    lines = []
    try:
        with Loader(remote(world, identity, address), **arguments) as loader:
            for batch in loader:
                ids = batch.sample_ids.tolist()
                lines.append({"step": batch.step, "ids": ids, "whole": are_whole(batch, SAMPLES)})
                time.sleep(0.04)
                together.wait()
        lines.append({"stats": loader.stats()})
    except BaseException as error:
        together.abort()
        lines.append({"error": str(error)})
        raise
    finally:
        out.write_text("".join(json.dumps(line, default=float) + "\n" for line in lines))


def run_ranks(world: Path, folder: Path, address: str, **arguments: Any) -> list[dict]:
    """Run each rank in a process; check that it reads the local batches; return its stats."""
    outs = [folder / f"rank{i}.json" for i in range(RANKS)]
    processes, together = [], _processes.Barrier(RANKS)
    for rank, out in enumerate(outs):
        options = READ | {"rank": rank, "cache_dir": folder / f"cache{rank}"} | arguments
        task = (world, f"rank{rank}", address, out, options, together)
        processes.append(_processes.Process(target=_rank, args=task, daemon=True))
        processes[-1].start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for rank, out in enumerate(outs):
        local = Loader(world / "c4", **READ, rank=rank)
        assert [line["ids"] for line in read_steps(out).values()] == [batch.sample_ids.tolist() for batch in local]
    return [read_lines(out)[-1]["stats"] for out in outs]


def test_ranks_with_caches_below_the_dataset_take_the_second_epoch_from_each_other(world, node, tmp_path):
    table = open_dataset(world / "c4").table
    stats = run_ranks(world, tmp_path, node.address, cache_bytes=int(table.bytes.sum()) * 5 // 8, network=SHARED)
    names = ("fetched_bytes", "from_peers", "from_origins")
    fetched, peers, origins = (sum(int(item[name]) for item in stats) for name in names)
    print(f"fetched {fetched} bytes, {peers + origins} slices of {SLICES}, {origins} from the origin")
    assert fetched > int(table.bytes.sum()) and peers > 0
    # A peer that is slow to answer is passed over for the origin, and on a busy machine all are slow.
    assert origins <= SLICES + scaled(2)
    assert sum(item["shared_bytes"] for item in stats) > 0


def test_a_forked_child_neither_serves_nor_ends_its_parents_share(world, node, tmp_path):
    with Loader(
        remote(world, "rank0", node.address), **READ, rank=0, cache_dir=tmp_path, cache_bytes=1 << 20, network=SHARED
    ) as loader:
        batches = iter(loader)
        next(batches)
        fetches = loader._slices._providers
        (share,) = fetches._shares.values()
        location = parse_address(share.address)
        closed, says_so = os.pipe()
        pid = os.fork()
        if pid == 0:
            loader.close()
            fetches.close()
            os.write(says_so, b"closed")
            signal.pause()
        try:
            os.close(says_so)
            assert os.read(closed, 6) == b"closed"
            os.close(closed)
            socket.create_connection(location, 1.0).close()
            assert len(list(batches)) == len(loader) - 1
            loader._pause()
            socket.create_connection(location, 1.0).close()  # Between two loops it goes on sharing.
            loader.close()
            with pytest.raises(OSError):  # Though the child lives.
                socket.create_connection(location, 1.0).close()
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def test_a_port_that_another_process_has_leaves_this_one_to_get_only(world, node, tmp_path):
    settings = READ | {"epochs": 1, "rank": 0, "world_size": 1}
    local = [batch.inputs for batch in Loader(world / "c4", **settings)]
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        Loader(
            remote(world, "rank1", node.address),
            **settings,
            cache_dir=tmp_path,
            network=NetworkOptions(listen=f"127.0.0.1:{taken.getsockname()[1]}"),
        ) as loader,
    ):
        assert all(np.array_equal(batch.inputs, other) for batch, other in zip(loader, local, strict=True))
        assert loader.stats()["from_origins"] == SLICES and loader.stats()["shared_bytes"] == 0
