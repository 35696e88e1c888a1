"""Transfers from origins that break the protocol, stall or fail in ways of their own."""

from __future__ import annotations

import errno
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from forebay.dataset.manifest import SliceInfo
from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.storage.base import Origin, PermanentError
from forebay.storage.fetch import RunFetcher
from forebay.storage.transfers import Transfer
from support.transfer_cases import CONTENT, INFO, QUICK, fetch, start


class Fake(Origin):
    """An origin made of a function."""

    def __init__(self, url: str, answer: Callable[[int, int], Iterator[memoryview]]) -> None:
        self.url = url
        self._answer = answer

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        return self._answer(start, stop)

    def get(self, name: str, max_bytes: int) -> bytes:
        raise PermanentError("not asked for")

    def sources(self) -> Sequence[Origin]:
        return [self]


def raising(error: Exception) -> Callable[[int, int], Iterator[memoryview]]:
    def answer(start: int, stop: int) -> Iterator[memoryview]:
        raise error

    return answer


def honest(start: int, stop: int) -> Iterator[memoryview]:
    yield memoryview(CONTENT)[start:stop]


def too_much(start: int, stop: int) -> Iterator[memoryview]:
    yield memoryview(bytes(stop - start + 1))


@pytest.mark.parametrize("fault", [raising(ProtocolError("nonsense")), too_much])
def test_a_violation_is_told(tmp_path: Path, fault: Callable[[int, int], Iterator[memoryview]]) -> None:
    reported: list[str] = []
    with RunFetcher(4, **QUICK) as transfers:
        origins = [Fake("bad", fault), Fake("good", honest)]
        moved = start(transfers, INFO, tmp_path / "part", origins, lambda origin, reason: reported.append(origin.url))
        assert moved.wait() and moved.error is None
        assert set(reported) == {"bad"}
        moved = start(transfers, INFO, tmp_path / "part2", [Fake("bad", fault)])
        assert moved.wait() and type(moved.error) is NetworkError


def test_without_a_thread_to_fetch_with_a_transfer_ends_and_the_next_one_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with RunFetcher(3, **QUICK) as transfers:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", cannot)
            moved = start(transfers, INFO, tmp_path / "part", [Fake("x", honest)])
            assert moved.wait() and isinstance(moved.error, NetworkError)
        moved = start(transfers, INFO, tmp_path / "part", [Fake("x", honest)])
        assert moved.wait() and moved.error is None


def test_a_fork_is_told(tmp_path: Path) -> None:
    with RunFetcher(1, **QUICK) as transfers:
        transfers._pid -= 1
        with pytest.raises(UsageError, match="a fork of it"):
            start(transfers, INFO, tmp_path / "part", [Fake("x", honest)])


def test_our_own_fault_is_not_hidden(tmp_path: Path) -> None:
    with RunFetcher(1, **QUICK) as transfers:
        moved = start(transfers, INFO, tmp_path / "part", [Fake("x", raising(ValueError("a bug")))])
        assert moved.wait() and isinstance(moved.error, ValueError)
        moved = start(transfers, INFO, tmp_path / "part", [Fake("x", raising(OSError(errno.EDQUOT, "quota")))])
        assert moved.wait() and isinstance(moved.error, UsageError) and "quota" in str(moved.error)
        with pytest.raises(UsageError, match="Check the directory"):
            start(transfers, INFO, tmp_path / "absent" / "part", [Fake("x", honest)])
        assert start(transfers, INFO, tmp_path / "part", [Fake("x", honest)]).wait(), "the pool lives on"


def test_a_callback_that_fails_harms_nobody(tmp_path: Path) -> None:
    def fails(moved: Transfer) -> None:
        raise ValueError("theirs")

    hold = threading.Event()

    def held(start: int, stop: int) -> Iterator[memoryview]:
        assert hold.wait()
        yield from honest(start, stop)

    with RunFetcher(1, **QUICK) as transfers:
        moved = start(transfers, INFO, tmp_path / "part", [Fake("x", held)])
        after = threading.Event()
        moved.on_done(fails)
        moved.on_done(lambda _: after.set())
        hold.set()
        assert moved.wait() and moved.error is None
        assert fetch(transfers, tmp_path / "other", str(tmp_path / "none")).error is not None
        assert after.wait()


@pytest.mark.parametrize("wrong", [{"connections": 0}, {"tries": 0}])
def test_bad_arguments(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="expected"):
        RunFetcher(**wrong)  # type: ignore[arg-type]


def test_two_origins_of_one_url_are_each_asked_for_their_own(tmp_path: Path) -> None:
    """A peer is one source however many slices it is asked for; each transfer reads from the origin it was given."""

    class Fixed(Origin):
        url = "peer://a"

        def __init__(self, data: bytes) -> None:
            self.data = data

        def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
            time.sleep(0.01)
            yield memoryview(self.data)[start:stop]

        def get(self, name: str, max_bytes: int) -> bytes:
            raise AssertionError

        def sources(self) -> list[Fixed]:
            return [self]

    invalid: list[str] = []
    with RunFetcher(4, tries=1, timeout_s=1.0) as transfers:
        running = []
        for number in range(20):
            data = bytes([number]) * 1000
            info = SliceInfo(number, f"{number}", 1000, hashlib.sha256(data).hexdigest(), 0, 0)
            part = tmp_path / f"{number}.part"
            running.append(start(transfers, info, part, [Fixed(data)], lambda origin, reason: invalid.append(reason)))
        for transfer in running:
            assert transfer.wait() and transfer.error is None
    assert invalid == []
