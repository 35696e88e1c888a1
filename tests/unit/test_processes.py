"""Signals that come while a process is started."""

import signal
from collections.abc import Iterator

import pytest

from forebay.processes import deferred_signals

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def handled() -> Iterator[list[int]]:
    handled: list[int] = []
    before = {number: signal.signal(number, lambda number, _: handled.append(number)) for number in NUMBERS}
    yield handled
    for number, handler in before.items():
        signal.signal(number, handler)


def test_all_are_handled_after_the_block(handled):
    with deferred_signals():
        for number in NUMBERS:
            signal.raise_signal(number)
        assert handled == []
    assert handled == [*NUMBERS]


def test_one_that_raises_does_not_hide_another(handled):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), deferred_signals():
        for number in NUMBERS:
            signal.raise_signal(number)
    assert handled == [signal.SIGTERM]


def test_one_that_is_ignored_stays_ignored(handled):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_signals():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGTERM)
    assert handled == [signal.SIGTERM]
