"""Whole nodes for the end-to-end tests, in this process or as processes of their own.

Run as a program it is one node: `python nodes.py ROLE JSON`; it prints a JSON line when it is up, and
another when it is done.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from forebay.data_node import DataNode
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset, open_dataset
from forebay.dataset.slices import write_token_slice
from forebay.network.client import Client
from forebay.network.dht import LibtorrentDht
from forebay.network.pki.identity import Identity, create_network, join
from forebay.scheduler.server import SchedulerService

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from support.leases import work

HOST = "127.0.0.1"
NAME = "tiny"


def make_dataset(directory: Path, num_slices: int, tokens: int, vocab: int = 60) -> Dataset:
    """A dataset of random tokens, each slice one document; the last slice is too short for any sample."""
    (directory / "slices").mkdir(parents=True)
    chance = np.random.default_rng(3)
    for i in range(num_slices):
        length = tokens if i < num_slices - 1 else 3
        ids = chance.integers(0, vocab, length).astype(np.uint16)
        write_token_slice(directory / "slices" / f"{i:06d}.safetensors", ids, np.array([length], np.uint64))
    return import_slices(directory, NAME)


def make_network(directory: Path, names: list[str], bootstrap: list[tuple[str, int]]) -> dict[str, Path]:
    """A network and a directory for each member."""
    create_network(directory / "network", "test", bootstrap=bootstrap)
    for name in names:
        join(directory / "network", directory / name, name)
    return {name: directory / name for name in names}


class Bootstrap:
    """The first nodes of a private DHT; a lookup needs a handful to be quick."""

    def __init__(self, num_nodes: int = 6) -> None:
        first = LibtorrentDht(HOST, 0, [])
        self.at = [(HOST, first.port)]
        self._nodes = [first, *(LibtorrentDht(HOST, 0, self.at) for _ in range(num_nodes - 1))]

    def close(self) -> None:
        for node in self._nodes:
            node.close()


class Node:
    """A node in a process of its own, killed at the latest when the test ends."""

    def __init__(self, role: str, log: Path, **settings: Any) -> None:
        self.role = role
        self.settings = settings
        self.log = log
        self.lines: list[dict[str, Any]] = []
        self.up = threading.Event()
        with log.open("ab") as errors:
            self.popen = subprocess.Popen(
                [sys.executable, __file__, role, json.dumps(settings)], stdout=subprocess.PIPE, stderr=errors
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as lines:
            for line in lines:
                self.lines.append(json.loads(line))
                self.up.set()

    def kill(self) -> None:
        self.popen.kill()
        self.wait()

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 60.0) -> int:
        code = self.popen.wait(timeout_s)
        self._reader.join()
        return code

    def again(self) -> Node:
        """The same node, started anew on what it left."""
        return Node(self.role, self.log, **self.settings)


def _main(role: str, settings: dict[str, Any]) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if role == "dht":
        _dht(settings, stop)
        return
    identity = Identity.load(settings["node"])
    dht = LibtorrentDht(HOST, 0, list(identity.bootstrap))

    def say(**facts: Any) -> None:
        print(json.dumps(facts), flush=True)

    try:
        if role == "serve":
            node = DataNode(identity, [open_dataset(settings["dataset"])], HOST, 0, dht, ttl_s=settings["ttl_s"])
            node.start()
            say(address=node.address)
            stop.wait()
            node.stop()
            say(bytes_sent=node.status()["bytes_sent"])
        elif role == "schedule":
            keys = ("seq_len", "epochs", "lease_s", "rediscover_s", "steal_s")
            service = SchedulerService(
                identity, NAME, dht, Client(identity), settings["state"], HOST, 0,
                **{key: settings[key] for key in keys if key in settings},
            )  # fmt: skip
            service.start()
            say(address=service.address)
            while not stop.wait(0.05):
                if settings.get("exit_when_done") and service.is_done():
                    break
            service.stop()
            say(done=service.is_done())
        else:
            say(up=True)
            pause_s = settings.get("pause_s", 0.0)
            stats = work(
                identity, NAME, None, settings["cache"], cache_bytes=settings["cache_bytes"], batch_size=2,
                discovery=dht, receipt_s=settings.get("receipt_s", 0.5), stop=stop, listen=f"{HOST}:0",
                on_batch=lambda batch: time.sleep(pause_s),
            )  # fmt: skip
            say(**stats)
    finally:
        dht.close()


def _dht(settings: dict[str, Any], stop: threading.Event) -> None:
    """A node of the DHT and nothing else, at a port that stays the same over restarts."""
    dht = LibtorrentDht(HOST, settings["port"], [(HOST, port) for port in settings["others"]])
    print(json.dumps({"port": dht.port}), flush=True)
    stop.wait()
    dht.close()


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]))
