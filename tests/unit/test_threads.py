"""SupervisedThread threads: an exception is logged, counted and followed by another run; none dies unseen."""

import logging
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from forebay.network.app import make_app
from forebay.network.server import Server
from forebay.threads import SupervisedThread


@pytest.fixture
def deaths(monkeypatch) -> Iterator[list[object]]:
    """The calls of `threading.excepthook`: threads that died unseen."""
    seen = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    yield seen
    assert seen == []


def test_a_body_that_raises_once_runs_again_and_metrics_say_so(deaths, caplog):
    runs, done = [], threading.Event()

    def body():
        runs.append(len(runs))
        if len(runs) == 1:
            raise RuntimeError("can't start new thread")
        done.set()

    with caplog.at_level(logging.ERROR, "forebay.threads"):
        thread = SupervisedThread(body, "test once", first_wait_s=0.01).start()
        assert done.wait() and thread.join()
    assert runs == [0, 1]
    assert "name=test once" in caplog.text and "Traceback" in caplog.text and "can't start new thread" in caplog.text
    with (
        Server(make_app("test"), None, "127.0.0.1", 0) as server,
        urllib.request.urlopen(f"http://{server.address}/metrics") as answer,
    ):
        assert 'forebay_thread_failures_total{thread="test once"} 1.0' in answer.read().decode()


def test_join_returns_at_once_for_a_thread_that_never_started_or_joins_itself():
    assert SupervisedThread(lambda: None, "test never").join(0.0)
    joined = []
    thread = SupervisedThread(lambda: joined.append(thread.join()), "test itself")
    assert thread.start().join() and joined == [False]
