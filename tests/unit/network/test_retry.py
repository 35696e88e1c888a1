"""Log lines while a process waits: of each wait, by one thread, which ends with the last."""

from __future__ import annotations

import logging
import os
import threading
import time

import pytest

from forebay.network import retry
from forebay.network.retry import log_while_waiting
from support.calibration import scaled

log = logging.getLogger("forebay.test")


def waiting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "waiting"]


def until(condition: object, what: str) -> None:
    deadline = time.monotonic() + scaled(20)
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_S", 0.2)
    monkeypatch.setattr(retry, "EVERY_S", 0.2)
    monkeypatch.setattr(retry, "_LOOK_EVERY_S", 0.02)


def test_each_wait_is_named_until_it_ends_by_one_thread(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> str:
        raise ValueError("gone")

    with log_while_waiting(log, lambda: "the first"), log_while_waiting(log, broken):
        with log_while_waiting(log, lambda: "the second"):
            until(lambda: caplog.text.count("for the first") > 1 and "for the second" in caplog.text, caplog.text)
            assert len(waiting_threads()) == 1 and "ValueError: gone" in caplog.text
        for _ in range(2):  # A line of the second may be on its way.
            caplog.clear()
            until(lambda: "for the first" in caplog.text, caplog.text)
        assert "for the second" not in caplog.text
    until(lambda: not waiting_threads(), "the thread ends")
    caplog.clear()
    for _ in range(1000):
        with log_while_waiting(log, lambda: "a short one"):
            pass
    until(lambda: not waiting_threads(), "the thread ends")
    assert not caplog.text


def test_a_fork_waits_for_itself_alone() -> None:
    with log_while_waiting(log, lambda: "the parent"):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            try:
                lines: list[str] = []
                log.addHandler(
                    type("Lines", (logging.Handler,), {"emit": lambda self, r: lines.append(r.getMessage())})()
                )
                with log_while_waiting(log, lambda: "the child"):
                    until(lambda: len(lines) > 2, "lines")
                os.write(write, "\n".join(lines).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        with os.fdopen(read) as answer:
            text = answer.read()
        assert os.waitpid(child, 0)[1] == 0 and "the child" in text and "the parent" not in text
