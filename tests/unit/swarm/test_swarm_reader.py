"""A reader of a swarm: its requests, the trackers it chooses, replies that lie, and that no request waits for ever."""

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay import threads
from forebay.dataset.manifest import SliceInfo, SliceTable
from forebay.errors import NetworkError, ProtocolError
from forebay.fetch.runs import NoProviderError
from forebay.network.client import RemoteError
from forebay.network.messages import SwarmRequest
from forebay.network.peer import Provider
from forebay.storage.base import Origin, PermanentError, TransientError
from forebay.swarm import reader as swarm_reader
from forebay.swarm.reader import SliceProvider, SwarmReader
from forebay.swarm.steering import Swarm
from forebay.swarm.tracker import steer
from forebay.swarm.trackers import TrackerClient
from support import cached
from support.waiting import until

ORIGIN = Provider("origin", "127.0.0.1:1", True)
DATA = bytes(range(250)) * 40
TABLE = SliceTable.from_rows([SliceInfo(0, "0.safetensors", len(DATA), cached.info_of(DATA, 1 << 16).sha256, 10, 1)])


class StubClient:
    """A network without sockets: trackers answer by a function of their address; ORIGIN has the slice."""

    def __init__(self, trackers: dict[str, Callable[[dict], Any]] | None = None, peer_id="reader"):
        self.identity = SimpleNamespace(peer_id=peer_id)
        self.trackers = trackers or {}
        self.requests = []  # peer id and address

    def request_json(self, address, method, path, body, peer_id, *more):
        self.requests.append((peer_id, address))
        if address not in self.trackers:
            raise TransientError("no peer is there")
        reply = self.trackers[address](body)
        if not isinstance(reply, dict):
            raise ProtocolError("expected an object")
        return json.loads(json.dumps(reply)), None

    def read_range(self, address, path, into, start, *more, **named):
        if address != ORIGIN.address:
            raise NetworkError("no peer is there")
        into[:] = DATA[start : start + len(into)]


def provider(name: str, is_origin: bool = False, port: int = 1) -> Provider:
    return Provider(name, f"127.0.0.1:{port}", is_origin)


def ranking(dataset_id, day, providers, reader="reader"):
    client = StubClient(peer_id=reader)
    trackers = TrackerClient(client, dataset_id, lambda: providers, None, now=lambda: day * 86400.0 + 5)
    assert trackers.request({}, lambda body: None) is None
    return [peer_id for peer_id, _ in client.requests]


def test_no_key_of_a_data_node_makes_it_the_tracker_of_all():
    """The first by the old hash, for this dataset and day, is the first of one reader in 20 still."""
    nodes = [provider(f"node{i:02}", True, 100 + i) for i in range(20)]
    firsts = Counter(ranking("ab" * 32, 1, nodes, f"reader{i}")[0] for i in range(1000))
    assert len(firsts) == 20 and max(firsts.values()) < 90
    assert ranking("ab" * 32, 1, nodes) == ranking("ab" * 32, 1, nodes[::-1])


def test_readers_without_a_data_node_meet_at_one_member_that_shares():
    """All choose alike; another dataset or day has another order; those with everything come first."""
    providers = [provider(f"peer{i:02}", port=100 + i) for i in range(20)]
    first = ranking("ab" * 32, 1, providers)
    assert all(ranking("ab" * 32, 1, providers, f"reader{i}") == first for i in range(10))
    assert sorted(first) == [item.peer_id for item in providers] != first
    assert ranking("ab" * 32, 1, providers[::-1]) == first
    assert len({ranking(f"{i:064x}", day, providers)[0] for i in range(10) for day in range(10)}) > 10
    full = [*providers, provider("whole", True, 99)]
    assert all(ranking(f"{i:064x}", 1, full)[0] == "whole" for i in range(10))


def test_sharers_are_bounded():
    client = StubClient()
    trackers = TrackerClient(client, "ab" * 32, list, None)
    for answer in range(100):
        trackers.add_sharers([provider(f"{answer}-{i}", port=1 + 64 * answer + i) for i in range(64)])
    trackers.request({}, lambda body: None)
    asked = [peer_id for peer_id, _ in client.requests]
    assert len(asked) == 256 and "99-15" in asked and "99-16" not in asked


def test_a_tracker_that_is_busy_is_asked_again_later():
    def busy(body):
        raise RemoteError("too many requests", 429, "rate", 7.0)

    trackers = TrackerClient(StubClient({provider("t").address: busy}), "ab" * 32, lambda: [provider("t")], None)
    assert trackers.request({}, lambda body: None) == {"wait_s": 7.0} and trackers.current == provider("t")


RUDE, HONEST = provider("rude", True, 2), provider("honest", port=3)  # the first is asked first


def honest_tracker() -> Callable[[dict], dict]:
    swarm, now = Swarm(1), itertools.count()
    swarm.join(ORIGIN, None, 0.0)

    def answer(body):
        if body.get("leave"):
            return {}
        request = SwarmRequest.model_validate(body, strict=False)
        return steer(swarm, Provider("reader", "", False), request, float(next(now)))

    return answer


def reading(
    client: Any, trackers: Callable[[], list[Provider]] = lambda: [RUDE, HONEST], **settings: Any
) -> SwarmReader:
    """A reader whose data nodes are these trackers; `open_url` and `sources` are of its origin."""
    of_origin = {name: settings.pop(name) for name in ("open_url", "sources") if name in settings}

    def claims(max_age_s: float) -> list[SimpleNamespace]:
        return [SimpleNamespace(**vars(tracker), is_whole=tracker.is_origin) for tracker in trackers()]

    origin = SimpleNamespace(client=client, claims=claims, **of_origin)
    return SwarmReader(
        origin, "ab" * 32, TABLE, own_flags=lambda: np.zeros(1, np.bool_), on_change=lambda: None, **settings
    )


def named(reader: SwarmReader) -> Origin | NetworkError:
    """Wait until a provider of slice 0 was named, or none will be."""
    result = []

    def ask():
        try:
            result.append(reader.sources(0)[0])
        except NoProviderError:
            return False
        except NetworkError as error:
            result.append(error)
        return True

    until(ask)
    return result[0]


HOLDER = json.loads('{"index": 7, "member": "m", "peer_id": "p", "address": "127.0.0.1:9", "is_origin": true}')
GOOD = json.loads('{"assignments": [], "sharers": [], "wait_s": 0.02, "tell_have": false}')


@pytest.mark.parametrize("nonsense", [
    {"assignments": [{**HOLDER, "index": 0, "address": "https://"}]}, {"wait_s": float("nan")}, {"assignments": 3},
    {"assignments": [{**HOLDER, "index": -1}]}, {"sharers": [{}]}, {"sharers": [None]},
])  # fmt: skip
def test_a_tracker_is_left_for_the_next_on_its_first_malformed_answer(nonsense):
    client = StubClient({RUDE.address: lambda body: {**GOOD, **nonsense}, HONEST.address: honest_tracker()})
    with closing(reading(client)) as reader:
        assert named(reader).url.endswith(ORIGIN.address)
        assert client.requests.count((RUDE.peer_id, RUDE.address)) == 1


def test_what_happened_is_reported_until_a_tracker_answers(monkeypatch):
    """Failures with the provider, and if its bytes were wrong; the slice is wanted again; then that it is here."""
    monkeypatch.setattr(swarm_reader, "_UNANSWERED_S", 0.01)
    monkeypatch.setattr("forebay.swarm.trackers._DEAD_S", 0.0)
    bodies, honest = [], honest_tracker()

    def answer(body):
        bodies.append(body)
        return honest(body) if len(bodies) % 3 else None

    with closing(reading(StubClient({RUDE.address: answer, HONEST.address: answer}))) as reader:
        faults = [NetworkError("gone"), ProtocolError("nonsense")]
        for fault in faults:
            reader.failed(0, named(reader), fault)
        assert not isinstance(named(reader), NetworkError)
        reader.release(0, True)
        until(lambda: any(body.get("finished") for body in bodies))
    reported = [(item["member"], item["wrong"]) for body in bodies for item in body.get("failed", [])]
    assert list(dict.fromkeys(reported)) == [("origin", False), ("origin", True)]
    assert all(body["want"] == "0" for body in bodies if body.get("failed"))


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def wait_idly(reader, clock, seconds):
    """Let time pass while slice 0 is wanted."""
    with contextlib.suppress(NoProviderError):
        reader.sources(0)
    clock.now += seconds
    reader._check_tracker()


@pytest.mark.parametrize("reply", [
    lambda body: GOOD, lambda body: {**GOOD, "wait_s": 10.0, "sharers": [HOLDER]},
    lambda body: {**GOOD, "assignments": [{**HOLDER, "index": 0}]},
])  # fmt: skip
def test_a_tracker_of_which_nothing_comes_is_left_after_ten_seconds(reply):
    """However politely it answers, also if it names somebody who sends nothing; the next one names a provider."""
    clock = Clock()
    client = StubClient({RUDE.address: reply, HONEST.address: honest_tracker()})
    with closing(reading(client, now=clock)) as reader:
        until(lambda: client.requests)
        wait_idly(reader, clock, swarm_reader.IDLE_S - 1)
        assert client.requests[-1][1] == RUDE.address
        wait_idly(reader, clock, 2.0)
        if (own := reader._sources.get(0)) is not None:
            reader.failed(0, own[1], NetworkError("silent"))
        until(lambda: client.requests[-1][1] == HONEST.address)
        assert named(reader).url.endswith(ORIGIN.address)


@pytest.mark.parametrize("num_bytes, is_left", [(1000, True), (100 << 20, False)])
def test_a_tracker_is_judged_by_what_verified(num_bytes, is_left):
    clock = Clock()
    client = StubClient({RUDE.address: lambda body: {**GOOD, "assignments": [{**HOLDER, "index": 0}]}})
    with closing(reading(client, now=clock)) as reader:
        named(reader)
        clock.now += swarm_reader.IDLE_S + 1
        SliceProvider(reader, 0).verified(num_bytes)
        reader._check_tracker()
        assert (RUDE.address in reader._tracker._idle_since) is is_left


def test_where_all_trackers_are_idle_the_data_nodes_are_asked_without_one():
    """And a tracker again some minutes later."""
    clock, direct = Clock(), [StubClient()]
    client = StubClient(dict.fromkeys([RUDE.address, HONEST.address], lambda body: GOOD))
    with closing(reading(client, now=clock, sources=lambda: direct)) as reader:
        until(lambda: client.requests)
        with pytest.raises(NoProviderError):
            reader.sources(0)
        while clock.now < 1000.0 + swarm_reader._MIN_PATIENCE_S:
            wait_idly(reader, clock, swarm_reader.IDLE_S)
        assert reader.sources(0) == direct and not reader._waiting
        clock.now += swarm_reader._DIRECT_S + 1
        reader._check_tracker()
        with pytest.raises(NoProviderError):
            reader.sources(0)


def test_where_a_url_may_not_be_opened_the_data_nodes_are_asked_after_a_while(monkeypatch):
    """They, and not a tracker, say whether a slice can be had."""
    monkeypatch.setattr(swarm_reader, "_REFUSED_S", 0.0)
    url = {**GOOD, "assignments": [{**HOLDER, "index": 0, "address": "https://example.org/data"}]}

    def refuse(url):
        raise PermanentError("not allowed")

    client = StubClient({RUDE.address: lambda body: url})
    with closing(reading(client, open_url=refuse, sources=lambda: ["a data node"])) as reader:
        assert named(reader) == "a data node"


def test_a_provider_that_refuses_a_slice_is_asked_again_where_it_is_named_again():
    """As is one that was slow: it may be the only one. Then the data nodes are asked."""
    clock = Clock()
    client = StubClient({RUDE.address: lambda body: {**GOOD, "assignments": [{**HOLDER, "index": 0}]}})
    with closing(reading(client, now=clock, sources=lambda: ["a data node"])) as reader:
        provider = SliceProvider(reader, 0)
        assert provider.is_renamed
        for _ in range(3):
            reader.failed(0, named(reader), PermanentError("404"))
            assert reader._given_up == {}
        clock.now += swarm_reader._REFUSED_S + 1
        reader._sources.clear()
        reader._waiting.add(0)
        reader._give_up()
        assert provider.sources() == ["a data node"]


@pytest.mark.parametrize("wrong", [{"address": "nonsense"}, {"address": "a:99999"}, {"wait_s": float("inf")}])
def test_a_tracker_that_names_nobody_and_goes_ends_the_wait(wrong, monkeypatch):
    """A member that serves as a tracker may answer anything; the reader gives up within its patience."""
    monkeypatch.setattr(swarm_reader, "_MIN_PATIENCE_S", 0.0)
    answers = [{**GOOD, "sharers": [{**HOLDER, **wrong}], **wrong}]
    client = StubClient({RUDE.address: lambda body: answers.pop() if answers else None})
    with closing(reading(client, timeout_s=0.5)) as reader:
        until(lambda: not answers)
        assert isinstance(named(reader), NetworkError)


def test_a_reader_whose_thread_fails_goes_on_and_ends_what_is_wanted_in_time(monkeypatch):
    """Whatever fails in its thread, here the look-up of trackers, a transfer ends within the reader's patience."""
    monkeypatch.setattr(swarm_reader, "_MIN_PATIENCE_S", 0.0)
    before = threads.failures().get("swarm", 0)
    failing = [RuntimeError("unexpected"), RuntimeError("unexpected")]

    def trackers():
        if failing:
            raise failing.pop()
        return []

    with closing(reading(StubClient(), trackers=trackers, timeout_s=0.5)) as reader:
        until(lambda: len(failing) < 2)
        error = named(reader)
        assert isinstance(error, NetworkError) and "no provider of" in str(error)
    assert threads.failures()["swarm"] > before
