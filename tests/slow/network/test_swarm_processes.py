"""A swarm of processes on loopback: the origin gives once, a bucket's limit is not met."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.nodes import make_dataset, make_network
from support.origin_server import OriginServer
from support.processes import Process

NODE = """
import json, sys
from forebay.data_node import DataNode
from forebay.network.pki.identity import Identity
from forebay.storage.origins import open_remote
folder, source = sys.argv[1:]
with DataNode(Identity.load(folder), [open_remote(source)], "127.0.0.1", 0, None) as node:
    print(json.dumps({"address": node.address}), flush=True)
    sys.stdin.read()
"""
# All begin together, before a slice is assigned: a member that has everything leaves, and takes its copies along.
MEMBER = """
import json, sys
from forebay.dataset.reader import open_dataset
from forebay.mirror import mirror_by_swarm
from forebay.storage.hosts import parse_address
from forebay.storage.origins import open_remote
from support.local_discovery import LocalDiscovery
folder, address, out = sys.argv[1:]
discovery = LocalDiscovery(addresses=[parse_address(address)])
dataset = open_remote("forebay://test/tiny", identity=folder, discovery=discovery, from_urls="any")
print('{"began": true}', flush=True)
sys.stdin.readline()
report, figures = mirror_by_swarm(dataset, out, share=True, linger_s=30.0)
verified = report.complete and open_dataset(out).verify(workers=1).ok
print(json.dumps({"verified": verified, **figures}), flush=True)
"""


class SwarmOfProcesses:
    """A data node and members that mirror its dataset."""

    def __init__(self, folder: Path, num_members: int, source: str):
        names = [f"member{i}" for i in range(num_members)]
        make_network(folder, ["data", *names], [])
        self.node = Process("-c", NODE, folder / "data", source)
        address = self.node.ready()["address"]
        self.members = [Process("-c", MEMBER, folder / name, address, folder / f"out-{name}") for name in names]

    def begin(self):
        for member in self.members:
            member.ready("began")
        for member in self.members:
            member.popen.stdin.write("\n")
            member.popen.stdin.flush()

    def finish(self) -> int:
        """Wait for all; return how many slices came from the origin."""
        reports = [member.ready("verified") for member in self.members]
        assert all(report["verified"] for report in reports), reports
        return sum(report["from_origins"] for report in reports)

    def close(self):
        for process in (*self.members, self.node):
            process.end()


@pytest.fixture
def swarms(tmp_path) -> Iterator:
    """Starts swarms."""
    started = []

    def start(num_members, source):
        started.append(SwarmOfProcesses(tmp_path, num_members, source))
        return started[-1]

    yield start
    for swarm in started:
        swarm.close()


def test_a_web_server_that_answers_503_above_a_rate_serves_a_swarm_with_a_request_an_object(tmp_path, swarms):
    make_dataset(tmp_path / "web", 16, 1 << 15)
    with OriginServer(tmp_path / "web") as server:
        server.faults.requests_per_s = 40.0
        server.faults.retry_after = "1"
        swarm = swarms(3, server.url)
        swarm.begin()
        assert swarm.finish() == 16
        num_requests = sum(count for name, count in server.requests.items() if "slices/" in name)
        server.faults.requests_per_s = 5.0
        names = [str(path.relative_to(tmp_path / "web")) for path in tmp_path.glob("web/slices/*.safetensors")]
        with ThreadPoolExecutor(3) as pool:  # Three readers that each ask for all, once.
            alone = list(pool.map(lambda name: _status(f"{server.url}/{name}"), names * 3))
    assert num_requests <= 1.25 * 16, server.requests
    assert len(alone) == 3 * 16 and 503 in alone


def _status(url):
    try:
        with urllib.request.urlopen(url) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
