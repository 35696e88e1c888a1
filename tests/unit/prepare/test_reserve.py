"""One output, and the runs that meet there."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.prepare import reserve as reserving
from forebay.prepare.progress import RUNNING_FILE
from forebay.prepare.reserve import locked, reserve
from forebay.storage.store import open_store
from support.calibration import scaled


def test_runs_of_one_key_meet_and_others_are_refused_while_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reserving, "BUCKET_WRITE_S", 60.0)  # A record that changes ends the wait before.
    monkeypatch.setattr(reserving, "_POLL_S", 0.01)
    store, messages, stop = open_store(tmp_path), list[str](), threading.Event()
    reserve(store, "a", messages.append, exclusive=False)
    reserve(store, "a", messages.append, exclusive=False)
    assert messages == []

    def live() -> None:
        number = 0
        while not stop.wait(0.02):
            number += 1
            store.write(RUNNING_FILE, json.dumps({"state": "running", "number": number}).encode())

    thread = threading.Thread(target=live)
    thread.start()
    try:
        while not store.exists(RUNNING_FILE):
            time.sleep(0.01)
        with pytest.raises(UsageError, match="of other inputs or settings, writes to"):
            reserve(store, "b", messages.append, exclusive=False)
    finally:
        stop.set()
        thread.join()
    assert len(messages) == 1 and "waiting" in messages[0]
    monkeypatch.setattr(reserving, "BUCKET_WRITE_S", 0.1)
    reserve(store, "b", messages.append, exclusive=False)  # it is dead: its record does not change
    reserve(store, "b", messages.append, exclusive=False)
    assert len(messages) == 2


@pytest.mark.parametrize("record", [b"", b"{", b'{"state": "failed"}'])
def test_a_run_that_ended_is_not_waited_for(tmp_path: Path, record: bytes) -> None:
    store, messages = open_store(tmp_path), list[str]()
    reserve(store, "a", messages.append, exclusive=False)
    if record:
        store.write(RUNNING_FILE, record)
    began = time.monotonic()
    reserve(store, "b", messages.append, exclusive=False)
    assert time.monotonic() - began < scaled(5)
    reserve(store, "c", messages.append, exclusive=True)
    assert len(messages) == 1


def test_a_directory_is_locked(tmp_path: Path) -> None:
    store = open_store(tmp_path / "out")
    refused = pytest.raises(UsageError, match="another prepare writes to")
    with locked(store, shared=True), locked(store, shared=True), refused, locked(store, shared=False):
        pass
    with locked(store, shared=False), refused, locked(store, shared=True):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="which is a file"), locked(open_store(tmp_path / "file"), shared=False):
        pass
