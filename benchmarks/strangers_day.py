"""A job of real processes beside a member that attacks: `python -m benchmarks.strangers_day [--minutes 2]`.

One root and two organisations; a data node, a scheduler and one that stands by, six workers, each a command of
`forebay` over mutual TLS. The workers' trainer sleeps, as a device that computes leaves the processor free, so that an
undisturbed job takes `--minutes`. At half time the scheduler is killed with SIGKILL and the other goes on. The job runs
twice: alone, and beside an attacker with the valid certificate of a worker, in the organisation of half of the
workers, which repeats every attack of ATTACKS for as long as the job lasts: those of `tests/attacks` that need no more
than such a certificate and a connection. LEFT_OUT has the others, and why.

Shown, and exit code 1 if one of it fails: the ledger proves that each sample was used once (`forebay ledger verify`),
with the attacker the job takes at most 1.25 times as long, scheduler and data node stay below 300 MB at their peak, and
every worker ends with 0. The attacker has low priority for the processor (nice 10), as it would have a machine of its
own; and a thread that does steps of the same length and touches no network says how much slower the machine was
beside it, be it by the attacker's own work or by other programs: that is taken out of the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.swarm import HOST, NAME, make_dataset
from forebay.dataset.reader import open_dataset
from forebay.ledger.chain import Used, receipt_message
from forebay.network.addresses import parse_address
from forebay.network.dht import LibtorrentDht
from forebay.network.peer import Scope
from forebay.network.pki.files import read_issuer
from forebay.network.pki.identity import Identity, create_network, create_organisation, join
from forebay.network.pki.revocation import sign_crl

TESTS = Path(__file__).parent.parent / "tests"
sys.path += [str(TESTS), str(TESTS / "attacks")]
attackers, ports, rude_peer, wire = map(
    import_module, ("support.attackers", "support.ports", "support.rude_peer", "support.wire")
)  # the tools of the tests of attacks
answers, ask, connection, request = attackers.answers, attackers.ask, attackers.connection, attackers.request

WORKERS, SLICE_S, STEPS = 6, 3.0, 64  # seconds and steps that a slice takes one worker
SEQ_LEN, BATCH = 2048, 8
SLICE_BYTES = 2 * SEQ_LEN * BATCH * STEPS
LEASE_S, STALL_S = 5.0, 10.0
MAX_RATIO, MAX_PEAK_MB = 1.25, 300.0
HOLD_S = 4.0  # for which an attack keeps what it took
ENDED = "connection ended"

PACED = f"""
import json, time
import forebay
samples = 0
for batch in forebay.Loader():
    time.sleep({SLICE_S / STEPS})
    samples += len(batch)
    print(json.dumps({{"samples": samples}}), flush=True)
"""


# The attacker.


class Attacker:
    """A member's certificate, what it knows of the others, and what it was answered."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.me = Identity.load(settings["node"])
        self.scheduler, self.data = settings["scheduler"], settings["data"]
        self.folder = Path(settings["folder"])
        self.others: list[str] = settings["others"]  # peer ids
        self.dataset_id, self.hashes, self.num_slices = (
            settings["dataset_id"],
            settings["hashes"],
            len(settings["hashes"]),
        )
        self.counts: dict[str, Counter[str]] = {}
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._name = threading.local()

    def count(self, what: object, num: int = 1) -> None:
        """An answer to the attack that this thread runs."""
        with self._lock:
            self.counts.setdefault(self._name.is_, Counter())[str(what)] += num

    def run(self, name: str, attack: Callable[[Attacker], object]) -> None:
        """One attack, once; whatever ends it is counted."""
        self._name.is_ = name
        try:
            attack(self)
        except TimeoutError:
            self.count("no answer in 20 s")
        except (OSError, http.client.HTTPException):
            self.count(ENDED)
        else:
            self.count("rounds")

    def ask(self, address: str, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """A request on a connection of its own: status and body."""
        try:
            status, answer = ask(self.me, address, method, path, body, **headers)
        except TimeoutError:
            self.count("no answer in 20 s")
        except (OSError, http.client.HTTPException):
            self.count(ENDED)
        else:
            self.count(status)
            return status, answer
        return 0, None

    def exchange(self, **body: Any) -> Any:
        return self.ask(self.scheduler, "POST", "/v2/exchange", body)

    def swarm(self, **body: Any) -> Any:
        return self.ask(self.data, "POST", f"/v1/swarm/{self.dataset_id}", body)

    def send_all(self, address: str, *requests: bytes) -> None:
        """Requests on one connection, one after the other."""
        with connection(self.me, address) as sock:
            responses = answers(sock, *requests)
        for answer in responses:
            self.count(answer.status)
        if len(responses) < len(requests):
            self.count(ENDED)

    def hold(self, address: str, num: int, first: bytes, drip: bytes = b"") -> None:
        """Connections that send something and read nothing, for HOLD_S; `drip`: sent on each every half second."""
        with contextlib.ExitStack() as stack:
            opened: list[ssl.SSLSocket] = []
            for _ in range(num):
                try:
                    opened.append(stack.enter_context(connection(self.me, address)))
                    opened[-1].sendall(first)
                except OSError:
                    self.count(ENDED)
            until = time.monotonic() + HOLD_S
            while time.monotonic() < until and not self.stop.wait(0.5):
                for sock in opened if drip else ():
                    with contextlib.suppress(OSError):
                        sock.sendall(drip)
            self.count("connections held", len(opened))

    @property
    def both(self) -> tuple[str, str]:
        return self.data, self.scheduler

    def leases(self, session: str, want: int = 4) -> list[dict[str, Any]]:
        """Leases of this member, as many as it gets."""
        status, answer = self.exchange(session=session, want=want)
        return list(answer["leases"]) if status == 200 else []


def traps(a: Attacker) -> None:
    """Addresses that accept and say nothing."""
    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(40)]
        for trap in listening:
            a.swarm(address=f"{HOST}:{trap.getsockname()[1]}", want=f"0-{a.num_slices - 1}", num=2)
            a.exchange(session="s4", address=f"{HOST}:{trap.getsockname()[1]}")


def addresses_inside(a: Attacker) -> None:
    """Addresses of others, of this machine, of a cloud's metadata."""
    for address in (a.scheduler, a.data, "169.254.169.254:80", "0.0.0.0:22", "localhost:22", "[::1]:22", "nowhere:1"):
        a.swarm(address=address)
        a.exchange(session="s4", address=address)


def invented_members(a: Attacker) -> None:
    """Failures reported of members that do not exist."""
    a.swarm(failed=[{"index": 0, "member": f"{i}{'x' * 290}", "wrong": i % 2 == 0} for i in range(1024)])


def ranges_without_end(a: Attacker) -> None:
    """Messages of ranges that cost more than their bytes."""
    for text in (",".join(str(i) for i in range(0, 300_000, 2)), "0," * 200_000 + "0"):
        a.swarm(have=text)
        a.swarm(want=text)
        a.exchange(cached={a.dataset_id: text})


def unknown_swarms(a: Attacker) -> None:
    """Swarms of datasets that are not there."""
    for i in range(8):
        a.ask(a.data, "POST", f"/v1/swarm/{i:064x}", {})


def swarm_sessions(a: Attacker) -> None:
    """Many processes of one certificate in a swarm, which have everything and leave."""
    for i in range(100):
        a.swarm(session=f"{i:08x}", have=f"0-{a.num_slices - 1}")
    a.swarm(session="00000001", leave=True)


def accusations(a: Attacker) -> None:
    """Everybody is accused of wrong bytes, again and again."""
    for peer_id in [*a.others, *(f"unknown{i}" for i in range(64))]:
        a.swarm(failed=[{"index": i, "member": peer_id, "wrong": True} for i in range(min(64, a.num_slices))])
    leased = a.leases("s5", 2)
    for lease in leased:
        reports = [{"peer_id": peer_id, "sha256": lease["sha256"], "reason": "r" * 300} for peer_id in a.others]
        a.exchange(session="s5", reports=reports, known_leases=[other["lease_id"] for other in leased])
    a.exchange(session="s5", reports=[{"peer_id": f"unknown{i}", "sha256": a.hashes[0]} for i in range(64)])


def slow_readers(a: Attacker) -> None:
    """All connections of a certificate ask for slices, and read nothing."""
    slices = b"".join(request("GET", f"/v1/slices/{sha256}") for sha256 in a.hashes[:8])
    a.hold(a.data, 64, slices)


def small_files(a: Attacker) -> None:
    """Files that are sent from memory, asked for and not read."""
    a.hold(a.data, 32, request("GET", f"/v1/datasets/{a.dataset_id}/slices.parquet") * 16)


def idle_connections(a: Attacker) -> None:
    """As many connections as it gets, which rest."""
    a.hold(a.data, 70, b"")
    a.hold(a.scheduler, 200, b"")


def half_closed(a: Attacker) -> None:
    """Requests that end halfway."""
    for address in a.both:
        for _ in range(8):
            with connection(a.me, address) as sock:
                sock.sendall(b"GET /v1/claims HTTP/1.1\r\nHost: x\r\n")
                socket.socket.shutdown(sock, socket.SHUT_WR)
                with contextlib.suppress(OSError):
                    if sock.recv(100):
                        a.count("answered")
                        continue
                a.count(ENDED)


def slow_heads(a: Attacker) -> None:
    """Heads and bodies that come a byte at a time."""
    a.hold(a.data, 30, b"GET /v1/claims HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"x")
    body = b"POST /v2/exchange HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    a.hold(a.scheduler, 60, body, b" ")


def endless(a: Attacker) -> None:
    """Blank lines, heads and bodies without end."""
    for address in a.both:
        for first, more in (
            (b"", b"\r\n" * 1000),
            (b"GET / HTTP/1.1\r\n", b"X-A: " + b"b" * 1000 + b"\r\n"),
            (b"POST /v2/exchange HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"3e8\r\n" + b"x" * 1000 + b"\r\n"),
        ):
            with connection(a.me, address) as sock:
                try:
                    sock.sendall(first)
                    for _ in range(6000):  # more than a server reads on before it closes
                        sock.sendall(more)
                    a.count("took all")
                except OSError:
                    a.count(ENDED)
        a.send_all(address, b"POST /v2/exchange HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")


def names_in_heads(a: Attacker) -> None:
    """Line ends in paths and keys."""
    injected = "manifest.json%0d%0aX-Evil:%201%0d%0a%0d%0a"
    for path in (
        f"/v1/datasets/{a.dataset_id}/{injected}",
        f"/v1/slices/{injected}",
        f"/{injected}",
        "/../../etc/passwd",
        "/v1/..%2f",
    ):
        for address in a.both:
            a.send_all(address, request("GET", path, Idempotency_Key=injected))


def figures_of_others(a: Attacker) -> None:
    """What only administrators see, and do."""
    for address in a.both:
        for path in ("/metrics", "/v1/status", "/openapi.json"):
            a.ask(address, "GET", path)
    for path in ("pause", "resume", "readmit"):
        a.ask(a.scheduler, "POST", f"/v1/job/{path}", {})
    a.ask(a.scheduler, "POST", f"/v1/peers/{a.me.peer_id}/pardon", {})


def large_messages(a: Attacker) -> None:
    """A megabyte of JSON of the wrong form, or nested."""
    a.ask(a.scheduler, "POST", "/v2/exchange", "x" * 1_000_000)
    for body in (b"[" * 1_000_000, b'{"known_leases": [' + b'"a",' * 240_000 + b'"a"]}', b"x" * 1_100_000):
        head = f"POST /v2/exchange HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        a.send_all(a.scheduler, head + body)


def invented_datasets(a: Attacker) -> None:
    """Millions of slices of datasets that no job has; more slices than there are."""
    a.exchange(session="s4", cached={f"{i:064x}": "0-999999999" for i in range(64)})
    a.exchange(session="s4", cached={a.dataset_id: "0-999999999"})


def scheduler_sessions(a: Attacker) -> None:
    """More sessions than a certificate may have, each of which has everything."""
    with connection(a.me, a.scheduler) as sock:
        have = {a.dataset_id: f"0-{a.num_slices - 1}"}
        messages = [request("POST", "/v2/exchange", {"session": f"s{i}", "cached": have}) for i in range(300)]
        for answer in answers(sock, *messages):
            a.count(answer.status)


def failures(a: Attacker) -> None:
    """Leases taken and given back as broken."""
    leased = a.leases("s6")
    a.exchange(session="s6", failed=[{"lease_id": lease["lease_id"], "reason": "broken"} for lease in leased])


def receipts(a: Attacker) -> None:
    """Uses without proof, with a false one, of others' leases, with others' signatures; each again."""
    leased = a.leases("s7", 2)
    for lease in [*leased, *({**other, "lease_id": "1"} for other in leased)]:
        span = {"epoch": lease["epoch"], "slice": lease["slice"], "start": lease["start"], "stop": lease["start"] + 8}
        used = Used(lease["lease_id"], *span.values(), 1)
        good = a.me.sign(receipt_message(lease["job_id"], [used])).hex()
        for proof, signature in (("", good), ("00" * 6, "00" * 64), ("00" * 6, good), ("00" * 6, good)):
            use = {"lease_id": lease["lease_id"], **span, "step": 1, "proof": proof}
            lease_ids = [other["lease_id"] for other in leased]
            a.exchange(session="s7", job_id=lease["job_id"], uses=[use], signature=signature, known_leases=lease_ids)


def keys_of_others(a: Attacker) -> None:
    """Idempotency-Keys that others may have used, and more of them than are kept."""
    keys = ["k", "0" * 16, "1", "x" * 65, *(f"{i:016x}" for i in range(200))]
    for address, path in ((a.scheduler, "/v2/exchange"), (a.data, f"/v1/swarm/{a.dataset_id}")):
        a.send_all(address, *(request("POST", path, {}, Idempotency_Key=key) for key in keys))


def crls(a: Attacker) -> None:
    """CRLs without an issuer, of another network, of a megabyte."""
    own = a.folder / "own-network"
    if not own.exists():
        create_network(own, "own")
    signed = sign_crl(read_issuer(own), range(1, 15_000), 9)
    for pem in (b"a list", b"x" * 1_000_000, signed, signed):
        head = f"POST /v1/crls HTTP/1.1\r\nHost: x\r\nContent-Length: {len(pem)}\r\n\r\n".encode()
        for address in a.both:
            a.send_all(address, head + pem)
    a.ask(a.scheduler, "GET", "/v1/crls/" + "a" * 32)


def flood(a: Attacker) -> None:
    """As many requests as go over one connection, sixteen at a time."""
    many = request("GET", "/v1/job") * 16
    with connection(a.me, a.scheduler) as sock:
        for _ in range(200):
            for answer in answers_of(sock, many, 16):
                a.count(answer.status)


def answers_of(sock: ssl.SSLSocket, data: bytes, num: int) -> list[Any]:
    """Answers to requests that are sent at once."""
    sock.sendall(data)
    return list(wire.read_answers(sock, num))


def strangers(a: Attacker) -> None:
    """TLS 1.2, no TLS, and the certificate of another network."""
    own = a.folder / "own-network"
    if not own.exists():
        create_network(own, "own")
    stranger = a.folder / "stranger"
    identity = Identity.load(stranger) if stranger.exists() else join(own, stranger, "stranger")
    for address in a.both:
        with socket.create_connection(parse_address(address), 20) as plain:
            plain.sendall(request("GET", "/v1/status"))
            with contextlib.suppress(ConnectionResetError):
                assert b"HTTP" not in plain.recv(1000)
            a.count(ENDED)
        for attempt in (identity, None):
            try:
                context = (attempt or a.me).client_context()
                if attempt is None:
                    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
                with socket.create_connection(parse_address(address), 20) as plain, context.wrap_socket(plain) as tls:
                    tls.sendall(request("GET", "/v1/status"))
                    a.count("answered" if tls.recv(1000) else ENDED)
            except (OSError, ValueError):
                a.count(ENDED)


def hoard(a: Attacker) -> None:
    """Half of the leases that it gets, held and not used, their horizons at their ends: nothing may be cut off them."""
    leases: dict[str, dict[str, int]] = {"s0": {}}
    for _ in range(20):
        for session, stops_by_lease in leases.items():
            status, answer = a.exchange(
                session=session, want=16, known_leases=list(stops_by_lease), declared_until=stops_by_lease
            )
            if status == 200:
                stops = {lease["lease_id"]: lease["stop"] for lease in answer["leases"]}
                leases[session] = {
                    lease: stops_by_lease[lease] for lease in answer["active"] if lease in stops_by_lease
                } | stops
        a.count("leases held", sum(map(len, leases.values())))
        if a.stop.wait(1.0):
            return


@contextlib.contextmanager
def false_provider(a: Attacker) -> Iterator[None]:
    """A sharer that says that it has everything, and gives wrong bytes, half answers, redirects, or nothing."""
    chance = random.Random(0)

    def answer(asked: Any) -> bytes | None:
        a._name.is_ = "false_provider"
        a.count("asked")
        kind = chance.randrange(5)
        if kind == 0:
            return rude_peer.http(200, bytes(SLICE_BYTES))
        if kind == 1:
            start, _, stop = asked.headers.get("range", "bytes=0-99").removeprefix("bytes=").partition("-")
            size = int(stop or SLICE_BYTES) - int(start) + 1
            head = {"Content_Range": f"bytes {start}-{stop}/{SLICE_BYTES}"}
            return rude_peer.http(206, bytes(min(size, SLICE_BYTES)), **head)
        if kind == 2:
            return b"HTTP/1.1 206 X\r\nContent-Length: 1000000\r\n\r\n" + bytes(1000)
        if kind == 3:
            return rude_peer.http(307, b"", Location=f"https://{a.scheduler}/v1/job")
        return None

    ended = threading.Event()
    with rude_peer.RudePeer(a.me, answer, lambda asked: True) as peer:

        def announce() -> None:
            a._name.is_ = "false_provider"
            while not ended.wait(2.0):
                a.exchange(session="s8", address=peer.address, cached={a.dataset_id: f"0-{a.num_slices - 1}"})
                a.swarm(address=peer.address, have=f"0-{a.num_slices - 1}")

        thread = threading.Thread(target=announce)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


Attack = Callable[[Attacker], object]
ATTACKS: dict[str, tuple[Attack, str]] = {
    "traps": (traps, "addresses_of_one_member_keep_no_other that_is_being_dialled"),
    "addresses_inside": (addresses_inside, "leads_no_node_to_its_own_loopback"),
    "invented_members": (invented_members, "names_that_nobody_has_are_not_kept"),
    "ranges_without_end": (ranges_without_end, "more_ranges_than_slices"),
    "unknown_swarms": (unknown_swarms, "dataset_without_a_swarm"),
    "swarm_sessions": (swarm_sessions, "organisation_has_so_many_processes"),
    "accusations": (accusations, "accusing_the_honest reports_against_peers_that_are_not_there"),
    "slow_readers": (slow_readers, "slow_readers_make_room"),
    "small_files": (small_files, "small_files_in_memory"),
    "idle_connections": (idle_connections, ""),
    "half_closed": (half_closed, "half_closed_connections"),
    "slow_heads": (slow_heads, ""),
    "endless": (endless, "blank_lines_before_a_request"),
    "names_in_heads": (names_in_heads, "name_puts_nothing_into_an_answers_head"),
    "figures_of_others": (figures_of_others, "figures_of_peers_are_for_administrators"),
    "large_messages": (large_messages, "role_is_asked_for_before_a_message"),
    "invented_datasets": (invented_datasets, "slices_of_invented_datasets"),
    "scheduler_sessions": (scheduler_sessions, "sessions_of_a_certificate what_an_organisation_says_it_has"),
    "failures": (failures, "who_fails_on_a_slice_that_is_good"),
    "receipts": (receipts, ""),
    "keys_of_others": (keys_of_others, "kept_for_a_repeat_is_its_members_alone kept_answers_of_one_member"),
    "crls": (crls, "crl_that_is_not_wanted organisations_crl_takes_nobody"),
    "flood": (flood, ""),
    "strangers": (strangers, ""),
}
"""Each attack, and words of the names of those tests whose requests it sends. `hoard` and `false_provider`, which go on
all the time, are beside them: `many_certificates_of_one_organisation`, `redirect_of_a_peer`, `peer_that_drips`."""
BESIDE = "many_certificates_of_one_organisation redirect_of_a_peer peer_that_drips"
LEFT_OUT = {
    "test_attacks_coordinator": "a job in lease mode has no coordinator",
    "test_attacks_files": "files that a user converts, and tables of data nodes: not sent by a worker",
    "only_who_is_accused_can_be_pardoned": "what an administrator asks, not a worker",
    "after_an_address_without_answer": "moves the clock of the node",
    "where_a_member_may_have_a_node_connect_to": "calls a function with addresses of other machines",
    "checks_that_hang": "needs a data node that hangs",
    "proofs_that_are_checked_at_once": "puts a check of its own in the scheduler",
    "doubts_that_nobody_answers": "sets the scheduler's failures by hand",
    "without_certificates_clients": "plain HTTP: no node here speaks it",
    "another_members_certificate": "no admission server takes part",
    "certificates_that_say_two_things": "needs the key of an organisation",
    "publication_is_of_one_name": "reads a file of a data node, which a worker cannot send",
}
"""Tests of attacks that are not run here, by a part of their names, and why."""


def _attack(settings: dict[str, Any]) -> None:
    """The attacker's process: until its standard input ends."""
    os.nice(10)
    a = Attacker(settings)
    names, turn, lock = sorted(ATTACKS), 0, threading.Lock()
    random.Random(1).shuffle(names)
    names.sort(key=lambda name: name not in ("accusations", "failures", "receipts"))  # while it still gets leases

    def walk() -> None:
        nonlocal turn
        while not a.stop.is_set():
            with lock:
                name, turn = names[turn % len(names)], turn + 1
            a.run(name, ATTACKS[name][0])

    def hold() -> None:
        a.stop.wait(5.0)
        while not a.stop.wait(0.2):
            a.run("hoard", hoard)

    threads = [threading.Thread(target=target, daemon=True) for target in (walk, walk, walk, walk, hold)]
    with false_provider(a):
        for thread in threads:
            thread.start()
        sys.stdin.read()
        a.stop.set()
        for thread in threads:
            thread.join(30.0)
    used = time.process_time()
    print(json.dumps({"counts": {name: dict(c) for name, c in sorted(a.counts.items())}, "cpu_s": used}), flush=True)
    os._exit(0)


# The job.


@dataclass
class Day:
    """What one run of the job came to; `peaks_mb` by process, `step_ms` of a step without a network.

    `wait_share`: of the workers' time, for data or a lease; the mean.
    """

    seconds: float = 0.0
    step_ms: float = 0.0
    wait_share: float = 0.0
    peaks_mb: dict[str, float] = field(default_factory=dict)
    exits: dict[str, int] = field(default_factory=dict)
    wasted: int = 0
    verified: str = ""
    attacks: dict[str, dict[str, int]] = field(default_factory=dict)
    attacker_cpu_s: float = 0.0
    faults: list[str] = field(default_factory=list)


class World:
    """A network of two organisations and its processes, in a folder that is empty."""

    def __init__(self, folder: Path, minutes: float, workers: int = WORKERS) -> None:
        self.folder, self.workers = folder, workers
        self.num_slices = round(min(1.0, minutes) * 60.0 * workers / SLICE_S)
        self.epochs = max(1, round(minutes))
        self._dht = LibtorrentDht(HOST, 0, [])
        root = folder / "network"
        create_network(root, "day", bootstrap=[(HOST, self._dht.port)])
        for name in ("acme", "globex"):
            create_organisation(root, folder / name, name)
        self.homes = {
            name: join(folder / org, folder / "nodes" / name, name, scope=Scope(frozenset({role})))
            for name, org, role in [
                ("data", "acme", "data"), ("scheduler", "globex", "scheduler"), ("attacker", "globex", "worker"),
                *((f"worker{i}", ("acme", "globex")[i % 2], "worker") for i in range(workers)),
            ]
        }  # fmt: skip
        make_dataset(folder / "data", self.num_slices, SLICE_BYTES + 2)
        (folder / "paced.py").write_text(PACED)

    def close(self) -> None:
        self._dht.close()

    def _start(self, log: Path, *arguments: str, node: str, command: Sequence[str] = ()) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "forebay", *arguments, "--identity", str(self.homes[node].node_dir), "--json"]
        with log.open("a") as errors:
            return subprocess.Popen(
                [*words, *(["--", *command] if command else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=self.folder,
                env=os.environ | {"FOREBAY_EXIT_ON_STDIN_CLOSE": "1"},
            )

    def run(self, name: str, with_attacker: bool, limit_s: float, log: Callable[[str], object]) -> Day:
        """The job once, in a folder of this name."""
        folder, day, nodes = self.folder / name, Day(), dict[str, subprocess.Popen[str]]()
        folder.mkdir()
        attacker: subprocess.Popen[str] | None = None
        scheduler_address = f"{HOST}:{ports.free_port()}"
        schedule = [
            "scheduler", NAME, "--listen", scheduler_address, "--state", str(folder / "state"),
            "--seq-len", str(SEQ_LEN),
            "--epochs", str(self.epochs), "--lease-timeout", str(LEASE_S), "--idle-timeout", str(STALL_S),
        ]  # fmt: skip
        try:
            nodes["data"] = self._start(folder / "data.log", "serve", str(self.folder / "data"), node="data")
            data_at = _up(nodes["data"])["address"]
            nodes["scheduler"] = self._start(folder / "scheduler.log", *schedule, node="scheduler")
            _up(nodes["scheduler"])
            nodes["standby"] = self._start(folder / "standby.log", *schedule, "--standby", node="scheduler")
            _up(nodes["standby"])
            if with_attacker:
                attacker = self._start_attacker(folder, scheduler_address, data_at)
            began, steps = time.monotonic(), _Steps()
            for i in range(self.workers):
                nodes[f"worker{i}"] = self._start(
                    folder / f"worker{i}.log", "worker", NAME, "--scheduler", scheduler_address,
                    "--batch-size", str(BATCH),
                    "--cache-dir", str(folder / f"cache{i}"), "--cache-bytes", str(16 * SLICE_BYTES),
                    node=f"worker{i}", command=[sys.executable, str(self.folder / "paced.py")],
                )  # fmt: skip
            lines = {who: _Lines(node) for who, node in nodes.items() if who.startswith("worker")}
            self._watch(nodes, lines, day, began, limit_s, log)
            day.step_ms = round(steps.end(), 2)
            if attacker is not None:
                output, _ = attacker.communicate("", timeout=60.0)
                day.attacks, day.attacker_cpu_s = json.loads(output)["counts"], json.loads(output)["cpu_s"]
            for who, node in nodes.items():
                if node.poll() is None:
                    node.terminate()
                day.exits[who] = node.wait(60.0)
            reports = [line["report"] for reader in lines.values() for line in reader.end() if "report" in line]
            day.wasted = sum(report["wasted_samples"] for report in reports)
            day.wait_share = round(sum(report["wait_share"] for report in reports) / max(1, len(reports)), 3)
        finally:
            for node in [*nodes.values(), *([attacker] if attacker is not None else [])]:
                if node.poll() is None:
                    node.kill()
                node.communicate()
        self._check(folder, day)
        return day

    def _start_attacker(self, folder: Path, scheduler: str, data: str) -> subprocess.Popen[str]:
        identity = self.homes["attacker"]
        dataset = open_dataset(self.folder / "data")
        settings = {
            "node": str(identity.node_dir), "scheduler": scheduler, "data": data, "folder": str(folder),
            "others": [home.peer_id for name, home in self.homes.items() if name != "attacker"],
            "dataset_id": dataset.id,
            "hashes": [dataset.table.row(i).sha256 for i in range(dataset.num_slices)],
        }  # fmt: skip
        (folder / "facts.json").write_text(json.dumps(settings))
        with (folder / "attacker.log").open("a") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.strangers_day", "--attack", str(folder / "facts.json")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                cwd=Path(__file__).parent.parent,
            )  # fmt: skip

    def _watch(
        self, nodes: dict[str, subprocess.Popen[str]], lines: dict[str, _Lines], day: Day, began: float,
        limit_s: float, log: Callable[[str], object],
    ) -> None:  # fmt: skip
        """Until every worker has ended: the peaks of memory, and the scheduler's end at half time."""
        total, last_log_s = self.num_slices * STEPS * BATCH * self.epochs, 0.0
        while any(nodes[who].poll() is None for who in lines):
            now = time.monotonic() - began
            if now > limit_s:
                day.faults.append(f"the workers had not ended after {limit_s:.0f} s")
                return
            for who, node in nodes.items():
                if (peak := _peak_mb(node.pid)) and node.poll() is None:
                    day.peaks_mb[who] = round(peak, 1)
            used = sum(reader.samples for reader in lines.values())
            if now - last_log_s >= 15.0:
                last_log_s = now
                log(f"  {now:5.0f} s  {used / total:6.1%}  {json.dumps(day.peaks_mb)}")
            if used >= total / 2 and nodes["scheduler"].poll() is None:
                nodes["scheduler"].send_signal(signal.SIGKILL)
                log(f"  {now:5.0f} s  the scheduler is killed")
            time.sleep(0.25)
        day.seconds = time.monotonic() - began

    def _check(self, folder: Path, day: Day) -> None:
        expected = {who: -signal.SIGKILL if who == "scheduler" else 0 for who in day.exits}
        day.faults += [f"{who} ended with {code}" for who, code in day.exits.items() if code != expected[who]]
        for who in ("data", "scheduler", "standby"):
            if day.peaks_mb.get(who, 0.0) >= MAX_PEAK_MB:
                day.faults.append(f"{who}: peak of {day.peaks_mb[who]} MB")
        proof = subprocess.run(
            [sys.executable, "-m", "forebay", "ledger", "verify", str(folder / "state" / "ledger.jsonl"), "--json"],
            capture_output=True, text=True,
        )  # fmt: skip
        day.verified = proof.stdout.strip()[-2000:]
        if proof.returncode:
            day.faults.append(f"forebay ledger verify: {proof.stdout[-500:]} {proof.stderr[-500:]}")
        shutil.rmtree(folder / "state" / "datasets", ignore_errors=True)
        for cache in folder.glob("cache*"):
            shutil.rmtree(cache)


class _Steps:
    """Steps as the workers' trainer does them, by a thread without a network: how long one takes this machine now."""

    def __init__(self) -> None:
        self._ended, self._num, self._began = threading.Event(), 0, time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        data = bytes(SLICE_BYTES // 4)
        while not self._ended.is_set():
            time.sleep(SLICE_S / STEPS)
            hashlib.sha256(data).digest()  # in place of what a worker does for a step
            self._num += 1

    def end(self) -> float:
        """Mean milliseconds."""
        self._ended.set()
        self._thread.join()
        return 1e3 * (time.monotonic() - self._began) / max(1, self._num)


class _Lines:
    """The JSON lines that a process prints, as they come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.samples = 0
        self._reports: list[dict[str, Any]] = []
        self._process = process
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            self.samples = message.get("samples", self.samples)
            if "report" in message:
                self._reports.append(message)

    def end(self) -> list[dict[str, Any]]:
        self._thread.join(10.0)
        return self._reports


def _up(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a server says when it is up."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{' '.join(process.args[2:5])}: expected a line of JSON, got none; see its log")  # type: ignore[index]
    return dict(json.loads(line))


def _peak_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(match[1]) * 1024 / 1e6 if match else 0.0
    return 0.0


def run(folder: Path, minutes: float, log: Callable[[str], object] = print) -> dict[str, Any]:
    """Both runs, and what they came to."""
    world = World(folder, minutes)
    try:
        log("without the attacker")
        limit_s = 60.0 + 240.0 * minutes
        alone = world.run("alone", False, limit_s, log)
        log("with the attacker")
        beside = world.run("beside", True, limit_s, log)
    finally:
        world.close()
    raw = beside.seconds / alone.seconds if alone.seconds else float("inf")
    ratio = raw * alone.step_ms / beside.step_ms
    faults = [f"alone: {fault}" for fault in alone.faults] + [f"beside: {fault}" for fault in beside.faults]
    if ratio > MAX_RATIO:
        faults.append(f"the job took {ratio:.2f} times as long beside the attacker")
    return {
        "ratio": round(ratio, 3),
        "raw_ratio": round(raw, 3),
        "faults": faults,
        "alone": asdict(alone),
        "beside": asdict(beside),
    }


def _show(results: dict[str, Any]) -> None:
    print(f"\n{'':24}{'alone':>12}{'beside':>12}")
    days = [results["alone"], results["beside"]]
    print(f"{'seconds':24}" + "".join(f"{day['seconds']:12.1f}" for day in days) + f"   ratio {results['raw_ratio']}")
    print(f"{'a step alone, ms':24}" + "".join(f"{day['step_ms']:12.2f}" for day in days) + "   without a network")
    print(f"{'ratio':24}{'':12}{results['ratio']:12.3f}   without what the machine was slower by")
    print(f"{'workers waited':24}" + "".join(f"{day['wait_share']:12.1%}" for day in days))
    for who in ("scheduler", "standby", "data"):
        print(f"{who + ', peak MB':24}" + "".join(f"{day['peaks_mb'].get(who, 0.0):12.1f}" for day in days))
    print(f"{'samples wasted':24}" + "".join(f"{day['wasted']:12}" for day in days))
    attacks = results["beside"]["attacks"]
    kinds = sorted({kind for counts in attacks.values() for kind in counts} - {"rounds"})
    print(f"\n{'attack':20}{'rounds':>7}  answers")
    for name, counts in attacks.items():
        counts_text = ", ".join(f"{kind}: {counts[kind]:,}" for kind in kinds if kind in counts)
        print(f"{name:20}{counts.get('rounds', 0):7}  {counts_text}")
    print("left out: " + "; ".join(f"{name} ({reason})" for name, reason in LEFT_OUT.items()))
    for fault in results["faults"]:
        print(f"FAILED {fault}")


def main() -> int:
    """The table, a line of JSON, and 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="that an undisturbed job takes, about (2)")
    parser.add_argument("--keep", type=Path, help="an empty folder for what both runs leave, logs too")
    parser.add_argument("--attack", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack:
        _attack(json.loads(args.attack.read_text()))
        return 0
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        results = run(folder, args.minutes)
    _show(results)
    print(json.dumps(results))
    return 1 if results["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
