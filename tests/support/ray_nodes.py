"""Nodes of a Ray cluster in network namespaces and with file systems of their own: machines that share nothing."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.calibration import scaled

_NET = "10.77.0"
HEAD = f"{_NET}.1"
_PORT = 6399
_NODE = """
set -e
mkdir -p {private}
mount -t tmpfs tmpfs {private}
cp -r {kernels} {private}/
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
export TMPDIR={private}
options="--num-cpus=1 --object-store-memory=80000000 --block"
until {ray} start --address={head}:{port} --node-ip-address={address} $options
do  # Ray gives a start 30 s, however busy the machine is.
    for pid in $(ip netns pids {name}); do [ $pid = $$ ] || kill -9 $pid || true; done
done
"""


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Nodes:
    """A head without CPUs in this namespace, and nodes of one CPU that are added and killed."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._count = folder, 0
        self.environment = {
            **os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789" * 4,
            **environment,
        }  # fmt: skip
        self.nodes = []
        self._names = {}  # of network namespaces, by process
        self._ray = str(Path(sys.executable).with_name("ray"))

    @property
    def driver(self) -> dict[str, str]:
        """The environment of a driver."""
        return {**self.environment, "RAY_ADDRESS": f"{HEAD}:{_PORT}"}

    def start_head(self) -> None:
        """Start the part of the cluster that the driver talks to."""
        command = [self._ray, "start", "--head", f"--port={_PORT}", f"--node-ip-address={HEAD}", "--num-cpus=0"]
        command += ["--include-dashboard=false", "--object-store-memory=80000000", "--block"]
        head = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.nodes.append(head)
        deadline = time.monotonic() + scaled(60)
        status = [self._ray, "status", f"--address={HEAD}:{_PORT}"]
        while subprocess.run(status, env=self.environment, capture_output=True, check=False).returncode:
            assert head.poll() is None and time.monotonic() < deadline, "the head of the cluster does not start"

    def add(self) -> None:
        """Start a machine that joins the cluster."""
        number = self._count
        self._count += 1
        name, address = f"forebay{number}", f"{_NET}.{10 + number}"
        _ip("netns", "add", name)
        _ip("link", "add", f"fby{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", f"fby{number}", "master", "forebay-br", "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        private = self._folder / f"node{number}"
        kernels = Path(tempfile.gettempdir()) / f"forebay-{os.getuid()}"
        script = _NODE.format(
            name=name, private=private, kernels=kernels, ray=self._ray, head=HEAD, port=_PORT, address=address
        )
        command = ["ip", "netns", "exec", name, "unshare", "-m", "--propagation", "private", "sh", "-c", script]
        with (self._folder / f"node{number}.log").open("wb") as log:
            node = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        self.nodes.append(node)
        self._names[node.pid] = name

    def kill(self, index: int) -> None:
        """As a spot machine: all its processes at once."""
        node = self.nodes.pop(index)
        pids = _session(node.pid)  # The first is the shell that would start it again.
        if node.pid in self._names:  # Also those whose parent has ended.
            named = subprocess.run(["ip", "netns", "pids", self._names[node.pid]], capture_output=True, text=True)
            pids += map(int, named.stdout.split())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()

    def close(self) -> None:
        """End everything."""
        while self.nodes:
            self.kill(len(self.nodes) - 1)
        for number in range(self._count):
            subprocess.run(["ip", "netns", "del", f"forebay{number}"], check=False, capture_output=True)


def _session(leader):
    """The processes of a session, and those that they started in sessions of their own."""
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    members, pending = [leader], [leader]
    while pending:
        parent = pending.pop()
        children = [pid for pid, its_parent in parents.items() if its_parent == parent]
        members += children
        pending += children
    return members


@contextmanager
def ray_nodes(folder: Path, environment: dict[str, str]) -> Iterator[Nodes]:
    """A bridge and its nodes; skips where namespaces cannot be made."""
    pytest.importorskip("ray")
    if os.getuid() or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip and unshare for network namespaces")
    nodes = Nodes(folder, environment)
    try:
        try:
            _ip("link", "add", "forebay-br", "type", "bridge")
            _ip("addr", "add", f"{HEAD}/24", "dev", "forebay-br")
            _ip("link", "set", "forebay-br", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        yield nodes
    finally:
        nodes.close()
        subprocess.run(["ip", "link", "del", "forebay-br"], check=False, capture_output=True)
