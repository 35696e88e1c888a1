"""Hosts on one machine: network namespaces with addresses of their own, around a router that can misbehave.

    with Lab() as lab:
        a, b = lab.host("a"), lab.host("b")
        node = a.forebay("serve", …)         a real process in a's namespace
        lab.vanish(a); lab.return_(a)         a is cut from all: packets are dropped, without a reply
        home = lab.nat("home"); c = home.host("c")     c is masqueraded: nothing comes in

Every host is routed to every other through the router's namespace: 10.77.K.2 by 10.77.K.1. Names hold this process's
id, so that what a killed run left is known and removed by the next. Needs root, iproute2, nft and the kernel's
namespaces; `lacking` names what is missing here.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from support.forks import Forks, Process

_NAME = re.compile(r"mr-(\d+)-")


@functools.cache
def lacking() -> str:
    """Why this machine cannot do it, or ""."""
    if sys.platform != "linux":
        return "hosts: expected Linux with network namespaces"
    if os.geteuid() != 0:
        return "hosts: expected root, for namespaces are made by root only"
    for tool in ("ip", "nft"):
        if shutil.which(tool) is None:
            return f"hosts: expected the program {tool} (iproute2, nftables)"
    probe = f"mr-{os.getpid()}-probe"
    try:
        if message := _try(["ip", "netns", "add", probe]):
            return f"hosts: expected namespaces, got: {message}"
        if message := _try(["ip", "-n", probe, "link", "add", "v0", "type", "veth", "peer", "name", "v1"]):
            return f"hosts: expected veth pairs, got: {message}"
        rules = "table inet t { chain c { type nat hook postrouting priority 100; masquerade; }; }"
        if message := _try(["ip", "netns", "exec", probe, "nft", rules]):
            return f"hosts: expected nft with NAT, got: {message}"
    finally:
        _try(["ip", "netns", "del", probe])
    return ""


class Host:
    """A namespace with one address."""

    def __init__(self, lab: Lab, name: str, address: str) -> None:
        self.lab = lab
        self.name = name
        self.ns = lab.ns(name)
        self.address = address

    def forebay(self, *argv: object, log: str = "") -> Process:
        """A node in this host, by the arguments of its command line."""
        words = [str(word) for word in argv]
        path = self.lab.directory / f"{self.name}-{log or words[0]}.log"
        path.touch()
        path.with_name(path.name + ".err").touch()
        return self.lab.forks.start(self.ns, words, path)


class Nat(Host):
    """A router at home: its hosts reach all others, and no other host reaches them."""

    def host(self, name: str) -> Host:
        """A host behind it, at 192.168.K.2."""
        return self.lab.wire(name, self.ns, f"192.168.{self.lab.next_index()}")


class Lab:
    """Hosts around one router, removed with every process in them at the end. A context manager, for one thread.

    Args:
        directory: Where the nodes' logs go.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._index = 0
        self._namespaces: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> Lab:
        remove_stale()
        self.router = self._add("router")
        self.forks = Forks()
        self._stack.callback(self.forks.close)
        _batch(self.router, ["link set lo up", "route add blackhole 192.168.0.0/16"])  # a home's address leads nowhere
        _forwarding(self.router)
        _nft(
            self.router,
            "table inet lab { set gone { type ipv4_addr; };"
            " chain forward { type filter hook forward priority 0; ip saddr @gone drop; ip daddr @gone drop; }; }",
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()  # the forks die first
        for ns in self._namespaces:
            _remove(ns)

    def ns(self, name: str) -> str:
        return f"mr-{os.getpid()}-{name}"

    def next_index(self) -> int:
        self._index += 1
        return self._index

    def host(self, name: str) -> Host:
        """A host at 10.77.K.2."""
        return self.wire(name, self.router, f"10.77.{self.next_index()}")

    def nat(self, name: str) -> Nat:
        """A router of its own at 10.77.K.2, for hosts behind it."""
        host = self.host(name)
        _forwarding(host.ns)
        chain = 'chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; };'
        _nft(host.ns, f"table inet home {{ {chain} }}")
        return Nat(self, name, host.address)

    def wire(self, name: str, router: str, net: str) -> Host:
        """A host with a wire to a router's namespace."""
        ns = self._add(name)
        port = f"v{self._index}"
        _batch(router, [f"link add {port} type veth peer name eth0 netns {ns}",
                        f"addr add {net}.1/24 dev {port}", f"link set {port} up"])  # fmt: skip
        _batch(ns, ["link set lo up", f"addr add {net}.2/24 dev eth0", "link set eth0 up",
                    f"route add default via {net}.1"])  # fmt: skip
        return Host(self, name, f"{net}.2")

    def vanish(self, host: Host) -> None:
        """Drop every packet from and to a host: no reset, no word."""
        _nft(self.router, f"add element inet lab gone {{ {host.address} }}")

    def return_(self, host: Host) -> None:
        """Undo a vanishing."""
        _nft(self.router, f"delete element inet lab gone {{ {host.address} }}")

    def _add(self, name: str) -> str:
        ns = self.ns(name)
        _run(["ip", "netns", "add", ns])
        self._namespaces.append(ns)
        return ns


def remove_stale() -> None:
    """Remove the namespaces, and kill the processes in them, of runs whose process is gone."""
    for line in _output(["ip", "netns", "list"]).splitlines():
        result = _NAME.match(line)
        if result and not Path(f"/proc/{result[1]}").exists():
            _remove(line.split()[0])


def _remove(ns: str) -> None:
    for pid in _output(["ip", "netns", "pids", ns]).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    _try(["ip", "netns", "del", ns])


def _forwarding(ns: str) -> None:
    settings = ["net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0"]
    writes = "; ".join(f"echo {s.split('=')[1]} > /proc/sys/{s.split('=')[0].replace('.', '/')}" for s in settings)
    _run(["ip", "netns", "exec", ns, "sh", "-c", writes])


def _nft(ns: str, rules: str) -> None:
    _run(["ip", "netns", "exec", ns, "nft", rules])


def _batch(ns: str, lines: list[str]) -> None:
    with tempfile.TemporaryFile("w+") as file:
        file.write("\n".join(lines) + "\n")
        file.seek(0)
        done = subprocess.run(["ip", "-n", ns, "-batch", "-"], stdin=file, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip in {ns}: {lines}: {done.stderr}"


def _output(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def _try(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"{argv[0]} failed")


def _run(argv: list[str]) -> None:
    message = _try(argv)
    assert not message, f"{' '.join(argv)}: {message}"
