"""Ask many addresses, most of which may be dead, forged or traps, and take the good answers as they come.

An announcement costs a stranger one packet, so that a list of addresses may hold a thousand false ones. Who does not
even accept a connection costs a file descriptor here, no thread; who accepts and then stalls costs a thread for a
while. Addresses of one host are asked in turn with those of others, so that none crowds the rest out. Once somebody
has answered well, the others get a little more time, and then it is over.
"""

import contextlib
import errno
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

MAX_CONNECTING = 512  # file descriptors
MAX_ASKING = 32  # threads
CONNECT_S = 1.5
CONNECT_AFTER_GOOD_S = 0.5  # a round trip of half a second is still heard
ANSWER_AFTER_GOOD_S = 1.5
TICK_S = 0.02
Address = tuple[str, int]
T = TypeVar("T")


def spread(addresses: Sequence[Address]) -> list[Address]:
    """The addresses without duplicates, those of each host in turn with the other hosts'."""
    by_host: dict[str, list[Address]] = {}
    for address in dict.fromkeys(addresses):
        by_host.setdefault(address[0], []).append(address)
    turns = [(turn, address) for held in by_host.values() for turn, address in enumerate(held)]
    return [address for _, address in sorted(turns, key=lambda item: item[0])]


def ask_many(addresses: Sequence[Address], ask: Callable[[Address], T | None], deadline: float) -> list[T]:
    """The answers that are not None, as they came; `ask` runs in threads and must end by itself.

    The end comes at `deadline` (of time.monotonic), or when all have answered, or soon after one has.
    """
    few = len(addresses) <= MAX_ASKING
    with contextlib.closing(_Probes([] if few else spread(addresses))) as probes:
        pool = ThreadPoolExecutor(max(1, min(MAX_ASKING, len(addresses))), thread_name_prefix="ask")
        asked = [pool.submit(ask, address) for address in spread(addresses)] if few else []
        good: list[T] = []
        good_at = float("inf")
        try:
            while asked or probes.left:
                asked += [pool.submit(ask, address) for address in probes.wait(TICK_S)]
                asked, answers = _collect(asked, 0.0 if probes.left else TICK_S)
                good += answers
                now = time.monotonic()
                good_at = min(good_at, now) if good else good_at
                if now >= good_at + CONNECT_AFTER_GOOD_S:
                    probes.close()
                if now >= min(deadline, good_at + ANSWER_AFTER_GOOD_S):
                    break
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return good


def _collect(asked: list[Future[T | None]], wait_s: float) -> tuple[list[Future[T | None]], list[T]]:
    """Who has not answered yet, and the answers of those who have."""
    if asked and wait_s and not any(future.done() for future in asked):
        with contextlib.suppress(TimeoutError):
            asked[0].exception(wait_s)
    answers = [answer for future in asked if future.done() and (answer := future.result()) is not None]
    return [future for future in asked if not future.done()], answers


class _Probes:
    """Connections opened to see who is there, without a thread each; closed again at once."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._waiting = deque(addresses)
        self._selector = selectors.DefaultSelector() if addresses else None  # a descriptor only where it is needed
        self._open: dict[socket.socket, tuple[Address, float]] = {}

    @property
    def left(self) -> bool:
        return bool(self._waiting or self._open)

    def wait(self, timeout_s: float) -> list[Address]:
        """Those that have accepted since the last call."""
        while self._waiting and len(self._open) < MAX_CONNECTING:
            self._connect(self._waiting.popleft())
        accepted = []
        for key, _ in self._selector.select(timeout_s) if self._selector is not None and self._open else []:
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                accepted.append(self._open[sock][0])
            self._close(sock)
        now = time.monotonic()
        for sock in [sock for sock, (_, deadline) in self._open.items() if deadline < now]:
            self._close(sock)
        return accepted

    def close(self) -> None:
        """Wait for nobody any more. May be repeated."""
        self._waiting.clear()
        for sock in list(self._open):
            self._close(sock)
        if self._selector is not None:
            self._selector.close()

    def _connect(self, address: Address) -> None:
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            return
        sock.setblocking(False)
        try:
            code = sock.connect_ex(address)
        except (OSError, OverflowError):  # no address at all
            code = errno.EINVAL
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            return
        assert self._selector is not None
        self._selector.register(sock, selectors.EVENT_WRITE)
        self._open[sock] = (address, time.monotonic() + CONNECT_S)

    def _close(self, sock: socket.socket) -> None:
        assert self._selector is not None
        self._selector.unregister(sock)
        del self._open[sock]
        sock.close()
