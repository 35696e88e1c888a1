"""Back-off, Retry-After, and log lines while a process waits: one thread for all waits, which ends with the last."""

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.storage import retry
from forebay.storage.retry import backoff_s, log_while_waiting
from support.waiting import until

log = logging.getLogger("forebay.test")


class Looks:
    """The watching thread's clock: each of its pauses takes a virtual quarter of a second."""

    def __init__(self):
        self.now, self.threads = 0.0, []

    def sleep(self, seconds: float):
        threading.Event().wait(0.001)
        if threading.current_thread() in self.threads:  # Other tests' waits have a thread, too.
            self.now += seconds

    def thread(self, **settings: object) -> threading.Thread:
        self.threads.append(threading.Thread(**settings))
        return self.threads[-1]


@pytest.fixture
def looks(monkeypatch) -> Iterator[Looks]:
    looks = Looks()
    monkeypatch.setattr(retry, "_waits", waits := retry._Waits())
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: looks.now, sleep=looks.sleep))
    monkeypatch.setattr(retry, "threading", SimpleNamespace(Thread=looks.thread, get_ident=threading.get_ident))
    yield looks
    until(lambda: not waits.is_watched)


def test_each_wait_is_named_until_it_ends_by_one_thread(caplog, looks):
    def broken():
        raise ValueError("gone")

    with log_while_waiting(log, lambda: "the first"):
        until(lambda: caplog.text.count("for the first") > 1)
        assert "waiting for the first (2 s so far)" in caplog.text and "(12 s so far)" in caplog.text
        with log_while_waiting(log, broken):
            until(lambda: "ValueError: gone" in caplog.text)
        with log_while_waiting(log, lambda: "the second"):
            until(lambda: caplog.text.count("for the second") > 1)
            assert len(looks.threads) == 1
        for _ in range(3):  # Lines of the second may be on their way.
            caplog.clear()
            until(lambda: "for the first" in caplog.text)
        assert "for the second" not in caplog.text
    until(lambda: not retry._waits.is_watched)
    with log_while_waiting(log, lambda: "another"):  # another thread
        until(lambda: "for another" in caplog.text)
    assert len(looks.threads) == 2


@given(st.integers(1, 10_000), st.floats(0.01, 5), st.floats(5, 60), st.floats(0, 100))
def test_waits_grow_to_a_bound_and_heed_what_was_asked(tried, first, max_s, asked):
    wait_s = backoff_s(tried, first, max_s, asked)
    planned = min(max_s, first * 2.0 ** min(tried - 1, 60))
    assert max(asked, planned / 2) <= wait_s <= max(asked, planned * 1.5)
