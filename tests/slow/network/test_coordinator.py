"""The coordinator with real workers as processes: killed, joining, coming back; and itself killed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.coordinator.messages import Rules
from forebay.coordinator.server import MAX_VALUES, Coordinator
from forebay.coordinator.store import ROSTER_NAME
from forebay.errors import StateError, UsageError
from forebay.network.client import Client, RemoteError
from forebay.network.pki.identity import Identity
from forebay.worker.membership import Membership
from forebay.worker.membership_state import CoordinatorUnreachableError, DuplicateWorkerError
from support.calibration import scaled
from support.paths import TESTS

SUPPORT = TESTS / "support"
BATCH = 2


class Process:
    """A process whose standard output is JSON lines; killed at the latest when the test ends."""

    def __init__(self, *argv: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.popen = subprocess.Popen(
            [sys.executable, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_notes)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(json.loads(line))

    def _read_notes(self) -> None:
        assert self.popen.stderr is not None
        self.notes.extend(self.popen.stderr)

    def end(self, number: int = signal.SIGKILL) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        return self.wait()

    def wait(self, timeout_s: float = 60) -> int:
        code = self.popen.wait(timeout_s)
        for reader in self._readers:
            reader.join()
            assert not reader.is_alive()
        for stream in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            assert stream is not None
            stream.close()
        return code


@pytest.fixture
def spawn() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def make(*argv: str) -> Process:
        started.append(Process(*argv))
        return started[-1]

    yield make
    for process in started:
        process.end()


def until(true: Callable[[], bool], what: str, timeout_s: float = 40) -> None:
    deadline = time.monotonic() + scaled(timeout_s)
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def coordinator(spawn: Callable[..., Process], *flags: str, listen: str = "127.0.0.1:0") -> tuple[Process, str]:
    """A coordinator as a process, and its address."""
    process = spawn("-m", "forebay", "coordinator", "--listen", listen, "--json", *flags)
    until(lambda: bool(process.lines) or process.popen.poll() is not None, "a coordinator that is up")
    assert process.lines, process.notes
    return process, process.lines[0]["address"]


class Workers:
    """Workers begun by one process that has PyTorch in memory; what each said, by the order they were begun in."""

    def __init__(self, spawn: Callable[..., Process], address: str, **facts: Any) -> None:
        self.process = spawn(str(SUPPORT / "distributed_workers.py"), address)
        self.facts = facts
        self.names: list[str] = []

    def begin(self, name: str) -> int:
        """Begins a worker; its number."""
        assert self.process.popen.stdin is not None
        self.process.popen.stdin.write(json.dumps({"name": name, **self.facts}) + "\n")
        self.process.popen.stdin.flush()
        self.names.append(name)
        number = len(self.names) - 1
        until(lambda: len(self.said("pid")) > number, f"worker {name}")
        return number

    def said(self, key: str, name: str | None = None) -> list[dict[str, Any]]:
        return [line for line in list(self.process.lines) if key in line and name in (None, line["name"])]

    def kill(self, number: int) -> None:
        os.kill(self.said("pid")[number]["pid"], signal.SIGKILL)

    def steps(self, name: str) -> int:
        return len(self.said("step", name))

    def last(self, name: str) -> dict[str, Any]:
        return self.said("step", name)[-1]


def get(address: str, path: str) -> Any:
    with urllib.request.urlopen(f"http://{address}{path}") as answer:
        return json.load(answer)


def waiting(address: str) -> str:
    """The workers that wait for an answer of the coordinator: they will know of a change at once."""
    return "".join(sorted(m["worker_id"] for m in get(address, "/v1/status")["members"] if m["seen_s"] == 0))


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_a_run_goes_on_through_a_death_a_newcomer_and_a_dead_coordinator(
    spawn: Callable[..., Process], tmp_path: Path
) -> None:
    state = str(tmp_path / "run")
    flags = (
        "--min-workers",
        "4",
        "--disconnect-timeout",
        f"{scaled(0.5):.1f}",
        "--state",
        state,
        "--set",
        "num_steps=60",
    )
    first, address = coordinator(spawn, *flags)
    gate = tmp_path / "gate"  # Its size: up to which step the workers go, however late this process looks.
    gate.write_bytes(bytes(10))
    workers = Workers(
        spawn, address, batch_size=BATCH, num_steps=7, step_s=0.03, timeout_s=scaled(20), gate=str(gate)
    )  # fmt: skip
    numbers = {name: workers.begin(name) for name in "abcd"}
    until(lambda: all(workers.steps(name) >= 5 for name in "abcd"), "five steps of each worker")
    rank = workers.last("b")["rank"]
    workers.kill(numbers["b"])
    os.truncate(gate, 20)
    until(lambda: workers.last("a")["world"] == 3, "a generation of three")
    workers.begin("e")
    until(lambda: waiting(address) == "acde", "the newcomer")
    os.truncate(gate, 40)
    until(lambda: workers.last("a")["world"] == 4, "a generation with the newcomer")
    first.end()  # the coordinator, killed: training goes on
    os.truncate(gate, 45)
    until(lambda: workers.last("a")["step"] == 44, "steps without a coordinator")
    second, _ = coordinator(spawn, *flags, "--exit-when-done", listen=address)
    workers.begin("b")  # back under its name
    until(lambda: waiting(address) == "abcde", "the worker that is back")
    os.truncate(gate, 1000)
    until(lambda: len(workers.said("code")) == 6, "the end of all workers")
    codes = sorted(line["code"] for line in workers.said("code"))
    assert codes == [-signal.SIGKILL, 0, 0, 0, 0, 0], "".join(workers.process.notes)
    assert second.wait() == 0, second.notes
    assert {line["rank"] for line in workers.said("step", "b")} == {rank} and workers.steps("b") > 10

    lines = workers.said("step")
    retained: dict[int, int] = {}
    for line in lines:
        retained[line["step"]] = max(retained.get(line["step"], 0), line["generation"])
    assert sorted(retained) == list(range(60))
    used: list[int] = []
    for step, generation in sorted(retained.items()):
        # Each step that counts: one generation, the same loss and weights everywhere, each rank once.
        same = [line for line in lines if (line["step"], line["generation"]) == (step, generation)]
        assert len({(line["loss"], line["weights"]) for line in same}) == 1
        ranks = [line["rank"] for line in same]
        assert len(set(ranks)) == len(ranks) and set(ranks) <= set(range(same[0]["world"]))
        first_sample = len(used)
        world = same[0]["world"]
        for line in same:
            assert line["samples"] == list(range(first_sample + line["rank"], first_sample + BATCH * world, world))
        used += range(first_sample, first_sample + BATCH * world)
    assert used == list(range(len(used)))
    assert lines[0]["loss"] > 10 * next(line["loss"] for line in lines if line["step"] == 59)
    status = second.lines[-1]
    assert status["done"] and status["step"] == 60 and status["config"]["num_steps"] == 60


def test_the_coordinator_hands_out_ranks_and_refuses_a_second_of_the_same_name(
    spawn: Callable[..., Process], tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('dataset_name = "tiny"\nbatch_size = 8\n')
    process, address = coordinator(spawn, "--min-workers", "4", "--config", str(config), "--set", "seq_len=32")
    members = [
        Membership(f"http://{address}", f"worker-{i}", settings={"batch_size": 2, "num_steps": 9}, lockstep=False)
        for i in range(4)
    ]
    threads = [threading.Thread(target=member.join) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(member.generation.rank for member in members) == [0, 1, 2, 3]
    reported = members[2].config
    assert (reported["batch_size"], reported["dataset_name"], reported["seq_len"], reported["num_steps"]) == (
        8,
        "tiny",
        32,
        9,
    )
    with pytest.raises(DuplicateWorkerError, match="worker-1"):
        Membership(address, "worker-1").join()
    assert get(address, "/v1/status")["generation"]["world_size"] == 4
    assert "/v1/members/join" in get(address, "/openapi.json")["paths"]
    members[0].leave()
    for member in members[1:]:
        until(lambda member=member: member.changing, "news of the one who left")
    for member in members[1:]:
        member.leave()
    assert process.end(signal.SIGTERM) == 0


def test_plain_http_stays_on_this_machine_unless_told_and_refuses_web_pages(spawn: Callable[..., Process]) -> None:
    refused = spawn("-m", "forebay", "coordinator", "--listen", "0.0.0.0:0")
    assert refused.wait() == 2 and "--allow-plain-http" in refused.notes[0]
    process, address = coordinator(spawn)
    body = json.dumps({"settings": {"batch_size": 1}}).encode()
    for headers in ({"Content-Type": "text/plain"}, {"Content-Type": "application/json", "Origin": "http://evil.test"}):
        request = urllib.request.Request(f"http://{address}/v1/config", body, headers)
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(request)
        assert refusal.value.code == 403
        refusal.value.close()
    assert process.end(signal.SIGINT) == 0


def test_over_mutual_tls_a_session_is_its_certificates_alone(make_identity: Callable[[str], Identity]) -> None:
    with Coordinator(identity=make_identity("coordinator")) as desk:
        client = Client(make_identity("thief"))
        with Membership(f"https://{desk.address}", "w", identity=make_identity("worker")) as membership:
            membership.join()
            assert membership.generation.world_size == 1
            body = {"worker_id": "w", "session": membership._state.session, "generation": 1, "step": 0}
            with pytest.raises(RemoteError, match="another peer"):
                client.request_json(desk.address, "POST", "/v1/members/leave", body)
            assert desk.status()["generation"]["world_size"] == 1
        assert desk.status()["members"] == []
        with pytest.raises(UsageError, match="https"):
            Membership(f"http://{desk.address}", identity=make_identity("other"))


def test_ranks_find_each_other_by_values_that_are_their_generations_alone(
    make_identity: Callable[[str], Identity],
) -> None:
    with Coordinator(identity=make_identity("coordinator"), rules=Rules(min_workers=2)) as desk:
        url, members = f"https://{desk.address}", [make_identity(name) for name in ("a", "b")]
        with Membership(url, "a", identity=members[0]) as a, Membership(url, "b", identity=members[1]) as b:
            joining = threading.Thread(target=b.join)
            joining.start()
            a.join()
            joining.join()
            assert b.meet("0/0", None) is None
            late = threading.Timer(0.2, a.meet, ("0/0", b"\x00address of a\xff"))
            late.start()
            assert b.meet("0/0", None, 20.0) == b"\x00address of a\xff"
            late.join()
            assert b.meet("0/0", b"another") == a.meet("0/0", None) == b"\x00address of a\xff"
            for index in range(MAX_VALUES - 1):
                a.meet(f"1/{index}", b"x")
            with pytest.raises(RemoteError, match="at most"):
                a.meet("2/0", b"x")
            assert b.meet("2/0", b"of b") is not None  # another rank has room of its own
            thief = Client(make_identity("thief"))
            body = {"worker_id": "a", "session": a._state.session, "generation": 1, "key": "0/0"}
            with pytest.raises(RemoteError, match="another peer"):
                thief.request_json(desk.address, "POST", "/v1/members/meet", body)
            with pytest.raises(RemoteError, match="no member of it"):
                thief.request_json(desk.address, "POST", "/v1/members/meet", {**body, "worker_id": "c"})
            with pytest.raises(RemoteError, match="no member of it"):
                Client(members[0]).request_json(desk.address, "POST", "/v1/members/meet", {**body, "generation": 2})


def test_a_coordinator_that_stays_away_is_named_and_a_dead_one_comes_back_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(CoordinatorUnreachableError, match="forebay coordinator"):
        Membership("127.0.0.1:9", patience_s=0.2).join()
    with Coordinator(state_dir=tmp_path, config={"batch_size": 4}) as desk:
        membership = Membership(desk.address, "w", lockstep=False)
        membership.join()
        membership.boundary(3)
        other = Membership(desk.address, "v", lockstep=False)
        joining = threading.Thread(target=other.join)
        joining.start()
        until(lambda: membership.changing, "news of the newcomer")
        assert membership.boundary(5).start_sample == 5 * 4
        joining.join()
        run_id = desk.run_id
        membership.leave()
        other.leave()
    with pytest.raises(StateError, match="batch_size"), Coordinator(state_dir=tmp_path, config={"batch_size": 8}):
        pass
    with Coordinator(state_dir=tmp_path) as desk:
        assert desk.run_id == run_id and desk.status()["generation"]["number"] == 2
        assert [g["start_step"] for g in get(desk.address, "/v1/log")["generations"]] == [0, 5]


def test_who_finishes_while_the_coordinator_is_away_tells_it_when_it_is_back(tmp_path: Path) -> None:
    """Else the run would wait for ever for workers that have done all of it."""
    config = {"batch_size": 1, "num_steps": 3}
    with Coordinator(state_dir=tmp_path, config=config) as desk:
        address = desk.address
        membership = Membership(address, "w")
        membership.join()
    leaving = threading.Thread(target=lambda: membership.leave(finished=True))
    assert membership.boundary(3).number == 1
    leaving.start()
    time.sleep(0.5)
    assert leaving.is_alive()
    host, port = address.rsplit(":", 1)
    with Coordinator(host, int(port), state_dir=tmp_path, config=config) as desk:
        leaving.join()
        assert not leaving.is_alive()
        assert desk.done and desk.status()["step"] == 3


def test_a_state_of_another_version_is_named(tmp_path: Path) -> None:
    with Coordinator(state_dir=tmp_path):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / ROSTER_NAME)) as database, database:
        (body,) = database.execute("SELECT body FROM state").fetchone()
        database.execute("UPDATE state SET body = ?", (json.dumps({**json.loads(body), "finished": ["a session"]}),))
    with pytest.raises(StateError, match="another version"), Coordinator(state_dir=tmp_path):
        pass


def test_a_coordinator_that_was_stopped_gives_nobody_up_for_it(spawn: Callable[..., Process]) -> None:
    """As with a machine that stands still: nobody could be heard then."""
    process, address = coordinator(
        spawn, "--min-workers", "2", "--silence-timeout", "2", "--disconnect-timeout", "2", "--allow-plain-http"
    )
    members = [Membership(address, name, settings={"batch_size": BATCH}, lockstep=False) for name in ("w1", "w2")]
    joins = [threading.Thread(target=member.join) for member in members]
    for join_ in joins:
        join_.start()
    for join_ in joins:
        join_.join()
    try:
        for _ in range(2):
            process.popen.send_signal(signal.SIGSTOP)
            time.sleep(3.2)
            process.popen.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        status = Client(None).request_json(address, "GET", "/v1/status")[0]
        assert {member["worker_id"] for member in status["members"]} == {"w1", "w2"}
        assert status["generation"]["number"] == 1 and not any(member.changing for member in members)
    finally:
        process.popen.send_signal(signal.SIGCONT)
        for member in members:
            member.leave()


def test_a_process_that_ends_between_two_requests_is_seen_to_have_ended() -> None:
    """Its last request asked for an answer within 30 s, so without its connection's end it would be waited for."""
    with Coordinator(rules=Rules(min_workers=1, lost_s=0.5, stale_s=3600.0)) as server:
        client = Client(None)
        body = {"worker_id": "w", "session": "session-1", "wait_s": 30.0}
        answer, _ = client.request_json(server.address, "POST", "/v1/members/join", body, timeout_s=scaled(10))
        assert answer["generation"]["rank"] == 0
        client.close()
        until(lambda: [member["lost"] for member in server.status()["members"]] in ([True], []), "its end")
        until(lambda: not server.status()["members"], "that it is given up")
