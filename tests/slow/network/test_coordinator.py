"""The coordinator with real workers as processes: killed, joining, coming back; and itself killed."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from typing import Any

import pytest

from forebay.coordinator.messages import Rules
from forebay.coordinator.server import MAX_VALUES, Coordinator
from forebay.errors import StateError, UsageError
from forebay.network.client import Client, RemoteError
from forebay.worker.membership import Membership
from forebay.worker.membership_state import CoordinatorUnreachableError, DuplicateWorkerError
from support.paths import TESTS
from support.processes import Process, Start
from support.waiting import until

BATCH = 2


def coordinator(start: Start, *flags: object, listen: str = "127.0.0.1:0") -> tuple[Process, str]:
    """A coordinator as a process, and its address."""
    process = start("coordinator", "--listen", listen, "--json", *flags)
    return process, process.ready()["address"]


class Workers:
    """Workers that one process forks, which has PyTorch in memory; what each printed, in the order of their start."""

    def __init__(self, stack: ExitStack, address: str, **settings: Any):
        self.process = Process(TESTS / "support" / "distributed_workers.py", address, OMP_NUM_THREADS="1")
        stack.callback(self.process.end)
        self.settings = settings
        self.names = []

    def begin(self, name: str):
        self.process.popen.stdin.write(json.dumps({"name": name, **self.settings}) + "\n")
        self.process.popen.stdin.flush()
        self.names.append(name)
        until(lambda: len(self.lines("pid")) == len(self.names))

    def lines(self, key: str, name: str | None = None) -> list[dict]:
        return [line for line in self.process.lines if key in line and name in (None, line["name"])]

    def last(self, name: str) -> dict:
        return self.lines("step", name)[-1]


def get(address: str, path: str) -> Any:
    with urllib.request.urlopen(f"http://{address}{path}") as answer:
        return json.load(answer)


def polling(address: str) -> str:
    """The workers that wait for an answer of the coordinator: they will know of a change at once."""
    return "".join(sorted(m["worker_id"] for m in get(address, "/v1/status")["members"] if m["seen_s"] == 0))


def join_all(*members: Membership):
    """Join at the same time, as each waits for the others."""
    threads = [threading.Thread(target=member.join) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_run_goes_on_through_a_death_a_newcomer_and_a_dead_coordinator(start: Start, stack: ExitStack, tmp_path):
    pytest.importorskip("torch")
    flags = f"--min-workers 4 --disconnect-timeout 2 --state {tmp_path}/run --set num_steps=60".split()
    first, address = coordinator(start, *flags)
    gate = tmp_path / "gate"  # Its size: up to which step the workers go, however late this process looks.
    gate.write_bytes(bytes(10))
    settings = {"batch_size": BATCH, "num_steps": 7, "step_s": 0.03, "timeout_s": 120, "gate": str(gate)}
    workers = Workers(stack, address, **settings)
    for name in "abcd":
        workers.begin(name)
    until(lambda: all(len(workers.lines("step", name)) >= 5 for name in "abcd"))
    rank = workers.last("b")["rank"]
    os.kill(workers.lines("pid", "b")[0]["pid"], signal.SIGKILL)
    os.truncate(gate, 20)
    until(lambda: workers.last("a")["world"] == 3)
    workers.begin("e")
    until(lambda: polling(address) == "acde")
    os.truncate(gate, 40)
    until(lambda: workers.last("a")["world"] == 4)
    first.end()  # The coordinator is killed, and training goes on.
    os.truncate(gate, 45)
    until(lambda: workers.last("a")["step"] == 44)
    second, _ = coordinator(start, *flags, "--exit-when-done", listen=address)
    workers.begin("b")  # back under its name
    until(lambda: polling(address) == "abcde")
    os.truncate(gate, 1000)
    until(lambda: len(workers.lines("code")) == 6)
    codes = sorted(line["code"] for line in workers.lines("code"))
    assert codes == [-signal.SIGKILL, 0, 0, 0, 0, 0], workers.process.errors
    assert second.wait() == 0, second.errors
    of_b = workers.lines("step", "b")
    assert {line["rank"] for line in of_b} == {rank} and len(of_b) > 10

    lines = workers.lines("step")
    retained = {}
    for line in lines:
        retained[line["step"]] = max(retained.get(line["step"], 0), line["generation"])
    assert sorted(retained) == list(range(60))
    num_used = 0
    for step, generation in sorted(retained.items()):
        # Each step that counts: one generation, the same loss and weights everywhere, each rank once.
        same = [line for line in lines if (line["step"], line["generation"]) == (step, generation)]
        assert len({(line["loss"], line["weights"]) for line in same}) == 1
        ranks, world = [line["rank"] for line in same], same[0]["world"]
        assert len(set(ranks)) == len(ranks) and set(ranks) <= set(range(world))
        stop = num_used + BATCH * world
        for line in same:
            assert line["samples"] == list(range(num_used + line["rank"], stop, world))
        num_used = stop
    assert lines[0]["loss"] > 10 * next(line["loss"] for line in lines if line["step"] == 59)
    status = second.lines[-1]
    assert status["done"] and status["step"] == 60 and status["config"]["num_steps"] == 60


def test_the_coordinator_hands_out_ranks_and_refuses_a_second_of_the_same_name(start: Start):
    settings_given = "--set dataset_name=tiny --set batch_size=8 --set seq_len=32"
    process, address = coordinator(start, *f"--min-workers 4 {settings_given}".split())
    settings = {"batch_size": 2, "num_steps": 9}
    members = [Membership(f"http://{address}", f"worker-{i}", settings=settings, lockstep=False) for i in range(4)]
    join_all(*members)
    assert sorted(member.generation.rank for member in members) == [0, 1, 2, 3]
    expected = {"batch_size": 8, "dataset_name": "tiny", "seq_len": 32, "num_steps": 9}
    assert {key: members[2].config[key] for key in expected} == expected
    with pytest.raises(DuplicateWorkerError, match="worker-1"):
        Membership(address, "worker-1").join()
    assert get(address, "/v1/status")["generation"]["world_size"] == 4
    assert "/v1/members/join" in get(address, "/openapi.json")["paths"]
    members[0].leave()
    until(lambda: all(member.changing for member in members[1:]))
    for member in members[1:]:
        member.leave()
    assert process.end(signal.SIGTERM) == 0


def test_plain_http_stays_on_this_machine_unless_told_and_refuses_web_pages(start: Start):
    refused = start("coordinator", "--listen", "0.0.0.0:0")
    assert refused.wait() == 2 and "--allow-plain-http" in refused.messages[0]
    process, address = coordinator(start)
    body = json.dumps({"settings": {"batch_size": 1}}).encode()
    for headers in ({"Content-Type": "text/plain"}, {"Content-Type": "application/json", "Origin": "http://evil.test"}):
        request = urllib.request.Request(f"http://{address}/v1/config", body, headers)
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(request)
        assert refusal.value.code == 403
        refusal.value.close()
    assert process.end(signal.SIGINT) == 0


def test_over_mutual_tls_sessions_and_values_belong_to_their_certificates(
    make_identity,
):
    """Ranks find each other by values, which are of their generation alone; each rank sets its own."""
    with (
        Coordinator(identity=make_identity("coordinator"), rules=Rules(min_workers=2)) as server,
        Client(make_identity("thief")) as thief,
    ):
        url, members = f"https://{server.address}", [make_identity(name) for name in ("a", "b")]
        with pytest.raises(UsageError, match="https"):
            Membership(f"http://{server.address}", identity=members[0])
        with Membership(url, "a", identity=members[0]) as a, Membership(url, "b", identity=members[1]) as b:
            join_all(a, b)
            ranks = a.generation.rank, b.generation.rank
            assert b.meet(ranks[0], "0/0", None) is None
            late = threading.Timer(0.2, a.meet, (ranks[0], "0/0", b"\x00address of a\xff"))
            for value in (b"of b", b"also of b"):  # the first value of a rank's key counts
                assert b.meet(ranks[1], "0/0", value) == b"of b"
                with pytest.raises(RemoteError, match="expected a key of its own, got one of rank"):
                    b.meet(ranks[0], "0/0", value)
            late.start()
            assert b.meet(ranks[0], "0/0", None, 30.0) == b"\x00address of a\xff"
            late.join()
            assert a.meet(ranks[1], "0/0", None) == b"of b"
            for index in range(MAX_VALUES - 1):
                a.meet(ranks[0], f"1/{index}", b"x")
            with pytest.raises(RemoteError, match="at most"):
                a.meet(ranks[0], "2/0", b"x")
            assert b.meet(ranks[1], "2/0", b"of b") is not None  # another rank has room of its own
            body = {"worker_id": "a", "session": a.session, "generation": 1, "rank": ranks[0], "key": "0/0"}
            owner = Client(members[0])
            for client, verb, changes, message in (
                (thief, "leave", {"step": 0, "key": None, "rank": None}, "another peer"),
                (thief, "meet", {}, "another peer"),
                (thief, "meet", {"worker_id": "c"}, "no member of it"),
                (owner, "meet", {"generation": 2}, "no member of it"),
            ):  # fmt: skip
                changed = {key: value for key, value in {**body, **changes}.items() if value is not None}
                with pytest.raises(RemoteError, match=message):
                    client.request_json(server.address, "POST", f"/v1/members/{verb}", changed)
            owner.close()
            assert server.status()["generation"]["world_size"] == 2
        assert server.status()["members"] == []


def test_a_coordinator_that_stays_away_is_named_and_a_dead_one_comes_back_as_it_was(tmp_path):
    with pytest.raises(CoordinatorUnreachableError, match="forebay coordinator"):
        Membership("127.0.0.1:9", patience_s=0.2).join()
    with Coordinator(state_dir=tmp_path, config={"batch_size": 4}) as server:
        membership = Membership(server.address, "w", lockstep=False)
        membership.join()
        membership.boundary(3)
        other = Membership(server.address, "v", lockstep=False)
        joining = threading.Thread(target=other.join)
        joining.start()
        until(lambda: membership.changing)
        assert membership.boundary(5).start_sample == 5 * 4
        joining.join()
        run_id = server.run_id
        membership.leave()
        other.leave()
    with pytest.raises(StateError, match="batch_size"), Coordinator(state_dir=tmp_path, config={"batch_size": 8}):
        pass
    with Coordinator(state_dir=tmp_path) as server:
        assert server.run_id == run_id and server.status()["generation"]["number"] == 2
        assert [g["start_step"] for g in get(server.address, "/v1/log")["generations"]] == [0, 5]


def test_who_finishes_while_the_coordinator_is_away_tells_it_when_it_is_back(tmp_path):
    """Else the run would wait for ever for workers that have done all of it."""
    config = {"batch_size": 1, "num_steps": 3}
    with Coordinator(state_dir=tmp_path, config=config) as server:
        address = server.address
        membership = Membership(address, "w")
        membership.join()
    leaving = threading.Thread(target=lambda: membership.leave(finished=True))
    assert membership.boundary(3).number == 1
    leaving.start()
    time.sleep(0.5)
    assert leaving.is_alive()
    host, port = address.rsplit(":", 1)
    with Coordinator(host, int(port), state_dir=tmp_path, config=config) as server:
        leaving.join()
        assert not leaving.is_alive()
        assert server.done and server.status()["step"] == 3


def test_a_coordinator_that_was_stopped_gives_nobody_up_for_it(start: Start, stack: ExitStack):
    """As with a machine that stands still: no message could arrive then."""
    flags = ["--silence-timeout", "2", "--disconnect-timeout", "2", "--allow-plain-http"]
    process, address = coordinator(start, "--min-workers", 2, *flags)
    stack.callback(process.popen.send_signal, signal.SIGCONT)
    members = [Membership(address, name, settings={"batch_size": BATCH}, lockstep=False) for name in ("w1", "w2")]
    join_all(*members)
    for _ in range(2):
        process.popen.send_signal(signal.SIGSTOP)
        time.sleep(3.2)
        process.popen.send_signal(signal.SIGCONT)
        time.sleep(0.5)
    status = get(address, "/v1/status")
    assert {member["worker_id"] for member in status["members"]} == {"w1", "w2"}
    assert status["generation"]["number"] == 1 and not any(member.changing for member in members)
    for member in members:
        member.leave()
