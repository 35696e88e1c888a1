"""The local engine in its own process: order, attempts and errors. `tests/slow/prepare` has its processes."""

import os
from dataclasses import dataclass

import pytest

from forebay.errors import PrepareError, UsageError
from forebay.prepare.engines.base import Attempts
from forebay.prepare.engines.local import LocalEngine


@dataclass(frozen=True)
class Long:
    text: str = "x" * 5000


def memory_until_two(number: int, scale: int) -> tuple[int, int, int]:
    if number == 3 and scale < 2:
        raise MemoryError("no room")
    return number, scale, os.getpid()


def test_one_process_runs_heavy_tasks_first_and_those_that_lack_memory_again_smaller():
    messages = []
    results = {}
    with LocalEngine(1, on_message=messages.append) as engine:
        engine.map(memory_until_two, range(5), results.__setitem__, [1, 5, 2, 5, 0])
        assert list(results) == [1, 3, 2, 0, 4]
        assert results == {i: (i, 2 if i == 3 else 0, os.getpid()) for i in range(5)}
        assert len(messages) == 2 and all("task 3" in text and "ran out of memory" in text for text in messages)
        with pytest.raises(KeyError, match="text"):
            engine.map(lambda task, scale: {}["text"], [0], results.__setitem__)
    with LocalEngine(2) as engine:  # One task needs no other process.
        engine.map(memory_until_two, [7], results.__setitem__)
    assert results[0] == (7, 0, os.getpid())
    with pytest.raises(UsageError, match="at least 1"):
        LocalEngine(0)


def test_long_names_are_cut():
    attempts = Attempts([Long()], None, lambda _: None)
    for scale in range(3):
        attempts.died(0, scale, "died")
    with pytest.raises(PrepareError) as caught:
        attempts.died(0, 3, "died")
    assert len(str(caught.value)) < 400 and "Long(text='xxx" in str(caught.value)
