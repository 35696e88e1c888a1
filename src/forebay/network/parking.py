"""Connections that wait, in one thread for all; and threads that are there while there is work.

A connection is held by one at a time: by the lot while it waits for its peer, by a thread of a pool while that works
on it. Who holds it closes it; others only shut it down, which its holder sees as its end.

What the choice costs: a wait that ends wakes the lot and a thread, some 60 us.
"""

import contextlib
import errno
import logging
import os
import queue
import select
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.errors import NetworkError
from forebay.network.heads import Incoming
from forebay.network.peer import Peer

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
REST_S = 10.0  # a thread without work goes after this long
DEAF_S = 0.1  # how long none is accepted when descriptors are out: connections that end give some back
ACCEPTS_AT_ONCE = 64
GATHER_FROM = 256  # connections; with fewer nobody is made to wait for others
BACKLOG = 1024
log = logging.getLogger("forebay.network")


@dataclass(eq=False)
class Connection:
    """One client. `peer` is known once it proved itself; `deadline`: how long it may wait for what it waits for.

    Attributes:
        phase: What the deadline is for, as of `Incoming.phase`; empty: not set yet.
        ready_at: When its handshake could go on. `counted`: whether its peer's connections include it.
        ending: An answer ended it; what still comes is read and dropped, so that no reset overtakes the answer.
    """

    socket: socket.socket
    address: str
    deadline: float
    peer: Peer | None = None
    incoming: Incoming = field(default_factory=Incoming)
    events: int = READ
    phase: str = ""
    ready_at: float = 0.0
    busy: bool = False
    counted: bool = False
    ending: bool = False
    to_discard: int = 0

    def shut(self) -> None:
        """Ends it for both sides; its holder will notice and close."""
        with contextlib.suppress(OSError):  # it has ended by itself
            # Not SSLSocket.shutdown: that drops the TLS layer under the thread which is using it.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def has_room(self) -> bool:
        """Whether a short answer can be sent without waiting for the client to read."""
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        return bool(poll.poll(0))

    def is_gone(self) -> bool:
        """Whether the peer closed its end: an answer would reach nobody."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        if not poll.poll(0):
            return False
        try:
            # The bare socket, under TLS: what is peeked at stays there.
            return socket.socket.recv(self.socket, 1, socket.MSG_PEEK) == b""
        except OSError:
            return True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        NetworkError: If the port is taken or the host is none of this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise NetworkError(
                f"server: port {port} is in use on {host}. "
                "Stop what holds it, or choose another port (0 takes a free one)."
            ) from error
        raise NetworkError(f"server: cannot listen on {host}:{port}: {error}") from error
    return listener


class Pool:
    """Threads that come with work and go when there is none for a while; the last to rest is the first to work.

    Args:
        most: Threads at once; further work waits in line.
    """

    def __init__(self, most: int, name: str) -> None:
        self.most = most
        self.name = name
        self._lock = threading.Lock()
        self._line: deque[Callable[[], None]] = deque()
        self._resting: list[queue.SimpleQueue[Callable[[], None]]] = []
        self._num_threads = 0

    def run(self, work: Callable[[], None]) -> None:
        """Have a thread call `work`, which raises nothing. From any thread; waits for nothing."""
        with self._lock:
            if self._resting:
                self._resting.pop().put(work)
            elif self._num_threads < self.most:
                threading.Thread(target=self._serve, args=(work,), name=self.name, daemon=True).start()
                self._num_threads += 1
            else:
                self._line.append(work)

    def _serve(self, work: Callable[[], None] | None) -> None:
        mine: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        while work is not None:
            work()
            work = None  # what it held must not live as long as the rest
            with self._lock:
                if self._line:
                    work = self._line.popleft()
                    continue
                self._resting.append(mine)
            try:
                work = mine.get(timeout=REST_S)
            except queue.Empty:
                with self._lock:
                    if mine in self._resting:
                        self._resting.remove(mine)
                        self._num_threads -= 1
                        return
                work = mine.get()


class Lot:
    """Waits for parked connections to become readable, or late; accepts new ones.

    Args:
        ready: Called in the lot's thread, must not block. None: the connection stays parked. Else it leaves the lot,
            and what was returned is called, in the lot's thread as well.
        end: Closes a connection; called when it is late, or parked in a lot that has stopped.
        check: Called when deadlines are looked at, every `check_s`.
        flush: Called after each look at what is ready; whether it handed requests over.
        gather_s: With GATHER_FROM connections, the pause after requests were handed over, so that the next ones come
            together: what wakes for one alone finds cold caches and pays for three.
    """

    def __init__(
        self,
        ready: Callable[[Connection], Callable[[], None] | None],
        end: Callable[[Connection], None],
        check: Callable[[], None],
        check_s: float,
        flush: Callable[[], bool] = lambda: False,
        gather_s: float = 0.0,
    ) -> None:
        self._ready = ready
        self._end = end
        self._check = check
        self._check_s = check_s
        self._flush = flush
        self._gather_s = gather_s
        self._lock = threading.Lock()
        self._arrivals: list[Connection] = []
        self._parked: set[Connection] = set()
        self._inner, self._outer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="https-lot", daemon=True)

    def start(self, listener: socket.socket, arrived: Callable[[socket.socket, str], None]) -> None:
        """Begin; `arrived` gets each new socket, non-blocking, and its IP address. The listener is the lot's now."""
        for sock in (self._inner, self._outer, listener):
            sock.setblocking(False)
        self._listener, self._arrived = listener, arrived
        self._is_deaf = threading.Event()
        self._must_be_deaf = False
        self._deaf_until = 0.0
        self._selector.register(self._inner, READ)
        self._selector.register(listener, READ)
        _lots.add(self)
        self._thread.start()

    def park(self, connection: Connection) -> None:
        """Take a connection until it is ready for its `events`. From any thread."""
        with self._lock:
            if not self._is_stopped:
                self._arrivals.append(connection)
                if len(self._arrivals) == 1:
                    self._wake()
                return
        self._end(connection)

    def evict(self, connection: Connection) -> None:
        """Close a connection if it is parked, else shut it down. In the lot's thread only."""
        if connection in self._parked:
            self._leave(connection)
            self._end(connection)
        else:
            connection.shut()

    def deafen(self) -> None:
        """Stop listening, for good; nobody can connect when this returns. May be repeated."""
        self._must_be_deaf = True
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._is_deaf.wait(10.0)

    def stop(self) -> None:
        """Close the listener and what is parked. May be repeated."""
        with self._lock:
            self._is_stopped = True
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    def forsake(self) -> None:
        """In a child made by a fork, whose parent goes on: let go of the listener here, and of nothing there."""
        self._selector.close()
        self._listener.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: it has ended
            self._outer.send(b"\0")

    def _run(self) -> None:
        check_at = time.monotonic() + self._check_s
        while not self._is_stopped:
            for key, _ in self._selector.select(max(0.0, check_at - time.monotonic())):
                if key.fileobj is self._inner:
                    self._take_arrivals()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._parked:
                    self._step(key.data)
            if self._flush() and self._gather_s > 0 and len(self._parked) >= GATHER_FROM:
                time.sleep(self._gather_s)
            now = time.monotonic()
            if self._must_be_deaf and not self._is_deaf.is_set():
                self._close_listener()
            if now >= check_at:
                self._look(now)
                check_at = now + self._check_s
        self._close()

    def _step(self, connection: Connection) -> None:
        events = connection.events
        leave = self._ready(connection)
        if leave is not None:
            self._leave(connection)
            leave()
        elif connection.events != events:
            self._selector.modify(connection.socket, connection.events, connection)

    def _leave(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        self._parked.discard(connection)

    def _take_arrivals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._inner.recv(4096)
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
        for connection in arrivals:
            self._selector.register(connection.socket, connection.events, connection)
            self._parked.add(connection)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    log.warning("server: accept failed, trying again: %s", error)
                    self._selector.unregister(self._listener)
                    self._deaf_until = time.monotonic() + DEAF_S
                    return
                continue  # that one ended before it was accepted
            sock.setblocking(False)
            self._arrived(sock, str(address[0]))

    def _look(self, now: float) -> None:
        try:
            self._check()
        except Exception:
            log.exception("server: a check failed; trying again in %g s", self._check_s)
        for connection in [connection for connection in self._parked if connection.deadline <= now]:
            self._leave(connection)
            self._end(connection)
        if self._deaf_until and now >= self._deaf_until and not self._is_deaf.is_set():
            self._deaf_until = 0.0
            self._selector.register(self._listener, READ)

    def _close_listener(self) -> None:
        if not self._deaf_until:
            self._selector.unregister(self._listener)
        self._listener.close()
        self._is_deaf.set()

    def _close(self) -> None:
        if not self._is_deaf.is_set():
            self._close_listener()
        with self._lock:
            left, self._arrivals = [*self._parked, *self._arrivals], []
        for connection in left:
            self._end(connection)
        self._parked.clear()
        self._selector.close()
        self._inner.close()
        self._outer.close()


_lots: weakref.WeakSet[Lot] = weakref.WeakSet()


def _after_fork() -> None:
    """A port is its parent's alone: with a copy of it in a child, who connects after the parent's end would wait."""
    for lot in list(_lots):
        lot.forsake()
    _lots.clear()


os.register_at_fork(after_in_child=_after_fork)
