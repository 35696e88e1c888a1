"""One output, and the runs that meet there."""

import itertools
import json
import os
from types import SimpleNamespace

import pytest

from forebay.errors import UsageError
from forebay.prepare import run as reserving
from forebay.prepare.progress import RUNNING_FILE
from forebay.prepare.run import reserve
from forebay.storage.store import open_store


class Clock(SimpleNamespace):
    """A clock that sleeping moves on; `on_sleep` is called then."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float):
        self.now += seconds
        self.on_sleep()


def test_runs_of_one_key_meet_and_others_are_refused_while_it_lives(tmp_path, monkeypatch):
    store, messages, numbers = open_store(tmp_path), list[str](), itertools.count()

    def write():
        store.write(RUNNING_FILE, json.dumps({"state": "running", "number": next(numbers)}).encode())

    clock = Clock(on_sleep=write)
    monkeypatch.setattr(reserving, "time", clock)
    reserve(store, "a", messages.append, exclusive=False)
    reserve(store, "a", messages.append, exclusive=False)
    assert messages == []
    write()
    with pytest.raises(UsageError, match="of other inputs or settings, writes to"):
        reserve(store, "b", messages.append, exclusive=False)
    assert len(messages) == 1 and "waiting" in messages[0]
    clock.on_sleep = lambda: None  # It is dead: its record does not change.
    reserve(store, "b", messages.append, exclusive=False)
    assert clock.now >= 3 * reserving.BUCKET_WRITE_S
    reserve(store, "b", messages.append, exclusive=False)
    assert len(messages) == 2


@pytest.mark.parametrize("record", [b"", b"{", b'{"state": "failed"}'])
def test_a_run_that_ended_is_not_waited_for(tmp_path, monkeypatch, record):
    clock = Clock(on_sleep=lambda: None)
    monkeypatch.setattr(reserving, "time", clock)
    store, messages = open_store(tmp_path), list[str]()
    reserve(store, "a", messages.append, exclusive=False)
    if record:
        store.write(RUNNING_FILE, record)
    reserve(store, "b", messages.append, exclusive=False)
    reserve(store, "c", messages.append, exclusive=True)
    assert len(messages) == 1 and clock.now == 0


def test_a_directory_is_locked(tmp_path):
    store = open_store(tmp_path / "out")
    refused = pytest.raises(UsageError, match=rf"out: process {os.getpid()} on \S+ writes it")
    with store.locked(shared=True), store.locked(shared=True), refused, store.locked(shared=False):
        pass
    with store.locked(shared=False), refused, store.locked(shared=True):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="which is a file"), open_store(tmp_path / "file").locked(shared=False):
        pass
