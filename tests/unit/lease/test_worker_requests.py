"""A lease worker with a real scheduler and data node: what a request raises ends no work before patience does."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from forebay.lease.scheduler_client import SchedulerClient
from forebay.lease.session import LeaseSession
from forebay.network.client import Client, RemoteError
from forebay.threads import failures
from support.nodes import Network, make_dataset

Work = Callable[..., dict[str, float]]


@pytest.fixture
def work(tmp_path) -> Iterator[Work]:
    """Runs a worker on a job of four slices of ten samples."""
    with ExitStack() as stack:
        network = Network(tmp_path, stack, "worker")
        network.serve(make_dataset(tmp_path / "data", 5, 80))
        service = network.schedule(seq_len=8)
        yield lambda: network.work("worker", service, batch_size=2, receipt_s=0.2)


def test_requests_go_on_after_an_unexpected_exception(work, monkeypatch):
    real, calls, deaths = SchedulerClient.exchange, [], []
    monkeypatch.setattr(threading, "excepthook", deaths.append)

    def exchange(self, *args):
        calls.append(len(calls))
        if len(calls) == 2:
            raise OSError(24, "Too many open files")
        answer = real(self, *args)
        if len(calls) == 3:
            raise RuntimeError("can't start new thread")  # The scheduler has heard it, and its reply is lost.
        return answer

    monkeypatch.setattr(SchedulerClient, "exchange", exchange)
    before = failures().get("worker requests", 0)
    report = work()
    assert report["done"] and report["samples"] == 40 and report["wasted_samples"] == report["leases_lost"] == 0
    assert failures()["worker requests"] == before + 2 and deaths == []


def test_attempts_that_were_heard_and_not_answered_end_no_work(work, monkeypatch):
    """A copy of each of some exchanges comes first, and its answer is lost: the next attempt is answered."""
    real, calls = Client.request_json, []

    def request_json(self, address, method, path, *args, **more):
        if path == "/v2/exchange":
            calls.append(path)
            if 2 <= len(calls) <= 5:
                real(self, address, method, path, *args, **more)
            if len(calls) == 6:
                raise RemoteError("refused with 500", 500, "internal")
        return real(self, address, method, path, *args, **more)

    monkeypatch.setattr(Client, "request_json", request_json)
    report = work()
    assert report["done"] and report["samples"] == 40 and report["wasted_samples"] == 0 and len(calls) > 6


def test_without_a_reply_for_patience_s_the_exception_ends_the_work(work, monkeypatch):
    def exchange(self, *args):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(SchedulerClient, "exchange", exchange)
    real = LeaseSession._request
    monkeypatch.setattr(LeaseSession, "_request", lambda self: (setattr(self.job, "patience_s", 0.5), real(self)))
    with pytest.raises(OSError, match="Too many open files"):
        work()
