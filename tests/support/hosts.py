"""Hosts on one machine: network namespaces with addresses of their own, around a router that can misbehave.

    with Lab(directory) as lab:
        a, b = lab.host("a"), lab.host("b")
        node = a.forebay("serve", …)         a real process in a's namespace
        lab.vanish(a); lab.return_(a)         a is cut from all: packets are dropped, without a reply
        c = lab.host_behind_nat("c")          c is masqueraded: nothing comes in

Every host is routed to every other through the router's namespace: 10.77.K.2 by 10.77.K.1. Names hold this process's
id, so that what a killed run left is known and removed by the next. Needs root, iproute2, nft and the kernel's
namespaces; `lacking` names what is missing here.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support.forks import Forks, Process


@functools.cache
def lacking() -> str:
    """Why this machine cannot do it, or ""."""
    probe = f"mr-{os.getpid()}-probe"
    rules = "table inet t { chain c { type nat hook postrouting priority 100; masquerade; }; }"
    try:
        _sh(f"""ip netns add {probe}; trap 'ip netns del {probe}' EXIT
            ip -n {probe} link add v0 type veth peer name v1
            ip netns exec {probe} nft '{rules}'""")
    except RuntimeError as error:
        return f"hosts: expected root, ip, nft and the network namespaces of Linux, got: {error}"
    return ""


@dataclass(frozen=True)
class Host:
    """A namespace with one address."""

    lab: Lab
    name: str
    ns: str
    address: str

    def forebay(self, *argv: object) -> Process:
        """A node in this host, by the arguments of its command line."""
        path = self.lab.directory / f"{self.name}-{argv[0]}.log"
        path.touch()
        path.with_name(path.name + ".err").touch()
        return self.lab.forks.start(self.ns, list(map(str, argv)), path)


class Lab:
    """Hosts around one router, removed with every process in them at the end. A context manager, for one thread.

    Args:
        directory: Where the nodes' logs go.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._namespaces = []

    def __enter__(self) -> Lab:
        _remove_stale()
        self.router = self._add("router")
        _forward(self.router)
        self.forks = Forks()
        _sh(f"ip -n {self.router} route add blackhole 192.168.0.0/16")  # a home's address leads nowhere
        self._nft(
            "table inet lab { set gone { type ipv4_addr; };"
            " chain forward { type filter hook forward priority 0; ip saddr @gone drop; ip daddr @gone drop; }; }"
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self.forks.close()  # the forks die first
        for ns in self._namespaces:
            _remove(ns)

    def host(self, name: str) -> Host:
        """A host at 10.77.K.2."""
        return self._wire(name, self.router, "10.77")

    def host_behind_nat(self, name: str) -> Host:
        """A host at 192.168.K.2, behind a router at home: it reaches all others, and no other host reaches it."""
        home = self._wire(f"{name}-home", self.router, "10.77").ns
        _forward(home)
        chain = 'chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; };'
        _sh(f"ip netns exec {home} nft 'table inet home {{ {chain} }}'")
        return self._wire(name, home, "192.168")

    def vanish(self, host: Host) -> None:
        """Drop every packet from and to a host: no reset, no word."""
        self._nft(f"add element inet lab gone {{ {host.address} }}")

    def return_(self, host: Host) -> None:
        """Undo a vanishing."""
        self._nft(f"delete element inet lab gone {{ {host.address} }}")

    def _nft(self, rules):
        _sh(f"ip netns exec {self.router} nft '{rules}'")

    def _wire(self, name, router, net):
        """A host with a wire to a router's namespace."""
        ns = self._add(name)
        port, net = f"v{len(self._namespaces)}", f"{net}.{len(self._namespaces)}"
        _sh(f"""ip -n {router} link add {port} type veth peer name eth0 netns {ns}
            ip -n {router} addr add {net}.1/24 dev {port}
            ip -n {router} link set {port} up
            ip -n {ns} addr add {net}.2/24 dev eth0
            ip -n {ns} link set eth0 up
            ip -n {ns} route add default via {net}.1""")
        return Host(self, name, ns, f"{net}.2")

    def _add(self, name):
        ns = f"mr-{os.getpid()}-{name}"
        _sh(f"ip netns add {ns}; ip -n {ns} link set lo up")
        self._namespaces.append(ns)
        return ns


def _forward(ns):
    """Let a namespace pass packets on."""
    writes = "echo 1 > ip_forward; echo 0 > conf/all/rp_filter; echo 0 > conf/default/rp_filter"
    _sh(f"ip netns exec {ns} sh -c 'cd /proc/sys/net/ipv4; {writes}'")


def _remove_stale():
    """Remove the namespaces, and kill the processes in them, of runs whose process is gone."""
    for ns, pid in re.findall(r"^(mr-(\d+)-\S+)", _sh("ip netns list"), re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            _remove(ns)


def _remove(ns):
    _sh(f"ip netns pids {ns} | xargs -r kill -9 || true; ip netns del {ns}")


def _sh(script):
    """Return the output of lines of shell; RuntimeError where one fails."""
    done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script}: {done.stderr.strip()}")
    return done.stdout
