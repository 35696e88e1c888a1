"""The choice of a source: without connections."""

from contextlib import closing
from functools import partial
from types import SimpleNamespace

from forebay.fetch.engine import RunFetcher
from forebay.fetch.runs import SourceStats, choose_source
from forebay.storage.retry import backoff_s


def test_choice():
    def source(**fields):
        created = SourceStats("x", 4.0)
        for key, value in fields.items():
            setattr(created, key, value)
        return created

    fast, slow = source(speed=9.0), source(speed=1.0)
    assert choose_source([slow, fast], 0)[0] is fast
    assert choose_source([slow, source(speed=9.0, avoid_until=5)], 0)[0] is slow
    assert choose_source([slow, source(speed=9.0, lies=1)], 0)[0] is slow
    assert choose_source([slow, source(speed=9.0, active=4)], 0)[0] is slow
    assert choose_source([new := source(), fast], 0)[0] is new, "one connection tries it"
    assert choose_source([source(active=1), fast], 0)[0] is fast
    assert choose_source([source(failing=1), new], 0)[0] is new
    assert choose_source([source(wait_until=7.0), source(wait_until=3.0)], 0) == (None, 3.0)
    assert choose_source([source(active=4)], 0) == (None, float("inf"))


def test_a_busy_source_gets_fewer_connections_and_then_more():
    created, backoff = SourceStats("x", 16.0), partial(backoff_s, first_s=1, max_s=10)
    created.record_overload(10, 9, 5, backoff)
    assert (created.limit, created.wait_until) == (8, 15)
    created.record_overload(10.5, 9, 0, backoff)
    assert created.limit == 8, "what was asked before counts once"
    created.record_overload(20, 19, 0, backoff)
    assert created.limit == 4
    for _ in range(200):
        created.record_success(16)
    assert created.limit == 16


def test_the_speed_of_a_source_follows_its_larger_answers():
    created = SourceStats("x", 4.0)
    created.record_speed(1000, 1.0)
    assert created.speed is None, "short answers say nothing"
    created.record_speed(100_000, 0.5)
    assert created.speed == 200_000
    created.record_speed(100_000, 1.0)
    assert 100_000 < created.speed < 200_000
    created.record_failure(10, partial(backoff_s, first_s=1, max_s=10))
    assert created.failing == 1 and 10 < created.avoid_until <= 12


def test_a_source_that_others_named_must_send_an_eighth_of_what_is_usual():
    """And at least 32 KiB/s beside another; one that is alone is not left for its speed."""
    slow, state = SimpleNamespace(url="slow"), SimpleNamespace(sources=[SimpleNamespace(url="slow")])
    run = SimpleNamespace(state=state)
    with closing(RunFetcher(1)) as fetcher:
        assert fetcher._least_bytes_per_s(run, slow) == 0
        state.sources.append(SimpleNamespace(url="another"))
        assert fetcher._least_bytes_per_s(run, slow) == 32 << 10
        speeds = {"slow": 1e3, "a": 4e6, "b": 8e6, "c": 1e9, "new": None}
        fetcher._sources = {url: SourceStats(url, 4.0, speed=speed) for url, speed in speeds.items()}
        assert fetcher._least_bytes_per_s(run, slow) == 1e6
