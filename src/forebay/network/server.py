"""HTTP/1.1 over mutual TLS 1.3: uvicorn's protocol and a FastAPI application, behind limits by member and organisation.

`app.py` has the application, `connections.py` what happens to a connection and a request, this file the server's life:
its socket, thread, loop and tasks.

Without an identity the server trusts whoever reaches it, over plain HTTP or over TLS that asks for no certificate: for
loopback, or for what its owner opens knowingly. It refuses what a browser sends for a page of another site.

Costs: one thread with one event loop for all connections; some 35 KiB a TLS connection that rests.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import itertools
import logging
import os
import socket
import ssl
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI

from forebay.errors import NetworkError
from forebay.network.addresses import join_address
from forebay.network.app import Metric, add_trust_routes
from forebay.network.client import Client
from forebay.network.limits import ServerLimits, Throttle
from forebay.network.peer import Peer
from forebay.network.revocation_sync import TrustWatch
from forebay.network.server_connections import Core, PeerProtocol
from forebay.network.tls import SocketTransport, handshake
from forebay.threads import FIRST_WAIT_S, MAX_WAIT_S, SupervisedThread

if TYPE_CHECKING:
    from forebay.network.discovery import Discovery
    from forebay.network.pki.identity import Identity

BACKLOG = 1024
ACCEPT_PAUSE_S = 0.1  # without free descriptors: connections that end give some back
THREAD_JOIN_S = 10.0
START_S = 30.0
SWEEP_PARTS = 4  # each connection is looked at every 4 s at least: all at once, 10,000 would delay requests
TRIM_AFTER, TRIM_EVERY_S = 64, 15.0  # connections, seconds
T = TypeVar("T")
log = logging.getLogger("forebay.network")


class Server:
    """Serves an application to the members of one network; with identity None to whoever asks, by `tls` if it is given.

    Owns its thread and sockets from `start` to `close`; both may be called from any thread, `close` more than once.
    `on_bytes` is called in the server's thread for each piece of a file that was sent. The `throttle` of the upload may
    be shared with other servers. With an identity other nodes that know who is revoked are found by `discovery`, or are
    among the `known` addresses.
    """

    def __init__(
        self,
        app: FastAPI,
        identity: Identity | None,
        host: str,
        port: int,
        *,
        limits: ServerLimits | None = None,
        throttle: Throttle | None = None,
        on_bytes: Callable[[Peer, int], None] | None = None,
        tls: ssl.SSLContext | None = None,
        discovery: Discovery | None = None,
        known: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.identity = identity
        self.host = host
        self.port = port
        self._tls = tls
        self._core = Core(app, identity, limits or ServerLimits(), throttle or Throttle(), on_bytes)
        self._discovery = discovery
        self._known = known
        self._trust: TrustWatch | None = None
        if identity is not None:
            add_trust_routes(app, identity)
        self._listener: socket.socket | None = None
        self._thread: SupervisedThread | None = None
        self._tasks: list[tuple[str, Callable[[], Awaitable[None]]]] = []
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """`host:port` where it listens; IPv6 in brackets."""
        return join_address(self.host, self.port)

    @property
    def limits(self) -> ServerLimits:
        return self._core.limits

    @property
    def draining(self) -> bool:
        return self._core.is_draining

    @property
    def num_connections(self) -> int:
        """Connections open now, those in their handshake included."""
        return len(self._core.connections)

    @property
    def refused_connections(self) -> int:
        """Connections that were closed for want of a certificate or of room."""
        return self._core.connections.num_refused

    def metrics(self) -> list[Metric]:
        """Its figures for `GET /metrics`."""
        return self._core.metrics()

    def add_task(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        """A background task of the server's loop, from its start to its close; call it before `start`.

        What it raises is logged with its traceback and counted in the metrics; then it begins again, after 1 s that
        doubles to 60 s with each failure, and is 1 s again after 60 s without one.
        """
        self._tasks.append((name, body))

    def start(self) -> None:
        """Listen and answer in a background thread."""
        if self.identity is not None:
            self._tls = self.identity.server_context()
        self._listener = listen(self.host, self.port)
        self.port = self._listener.getsockname()[1]
        ready = threading.Event()
        self._thread = SupervisedThread(lambda: asyncio.run(self._serve(ready)), "http-server").start()
        if not ready.wait(START_S):
            self.close()
            raise NetworkError(f"server: no event loop within {START_S:g} s on {self.address}; see the log.")
        _servers.add(self)
        if self.identity is not None:
            self._trust = TrustWatch(
                self.identity, Client(self.identity), known=self._known, discovery=self._discovery,
                address=self.address, on_change=lambda: self.run_soon(self._core.sweep),
            ).start()  # fmt: skip
        log.info("listening: address=%s tls=%s", self.address, "yes" if self._tls is not None else "no")

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's loop, from another thread, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def run_soon(self, callback: Callable[[], object]) -> None:
        """Call something in the server's loop, from another thread; nothing where it does not run."""
        if self._is_running():
            with contextlib.suppress(RuntimeError):  # the loop failed and has not begun again
                self._loop.call_soon_threadsafe(callback)

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Take no more requests; let those being answered finish. Returns whether all did in the time given."""
        if not self._is_running() or self._loop.is_closed():
            return True
        return self.call(self._drain(timeout_s))

    def close(self) -> None:
        """Stop at once: end every connection and the thread."""
        if self._trust is not None:
            self._trust.close()
        with self._lock:
            if self._thread is not None:
                self._thread.stop()
                self.run_soon(lambda: self._stop.set())
                self._thread.join(THREAD_JOIN_S)
                assert self._listener is not None
                self._listener.close()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive

    async def _serve(self, ready: threading.Event) -> None:
        """The loop's life. One that fails ends its connections; the next one accepts on the same listener."""
        core = self._core
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        core.bind(self._loop)
        self._accepting = self._loop.create_task(self._supervise("accept", self._accept))
        tasks = [
            self._accepting,
            self._loop.create_task(self._supervise("sweep", self._sweep)),
            *(self._loop.create_task(self._supervise(name, body)) for name, body in self._tasks),
        ]
        ready.set()
        try:
            await self._stop.wait()
            core.is_draining = True
            self._close_listener()
        finally:
            for task in tasks:
                task.cancel()
            for connection in core.connections.all():
                connection.abort()
            core.connections.cancel_handshakes()
            for task in list(core.state.tasks):
                task.cancel()
            await asyncio.gather(*tasks, *core.state.tasks, return_exceptions=True)

    async def _drain(self, timeout_s: float) -> bool:
        core, deadline = self._core, self._loop.time() + timeout_s
        core.is_draining = True
        self._close_listener()
        core.connections.cancel_handshakes()
        for connection in core.connections.all():
            connection.shutdown()
        while core.requests.num_active and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
        return core.requests.num_active == 0

    def _close_listener(self) -> None:
        self._accepting.cancel()
        assert self._listener is not None
        if self._listener.fileno() != -1:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def _supervise(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        pause_s = FIRST_WAIT_S
        while True:
            began = self._loop.time()
            try:
                await body()
                return
            except Exception:
                self._core.task_failures[name] += 1
                if self._loop.time() - began > MAX_WAIT_S:
                    pause_s = FIRST_WAIT_S
                log.exception("server %s: task %s failed; it goes on in %g s", self.address, name, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_WAIT_S, 2 * pause_s)

    async def _sweep(self) -> None:
        limits, connections, trimmed, due_at = self._core.limits, self._core.connections, 0, 0.0
        for turn in itertools.count():
            await asyncio.sleep(min(4.0, limits.idle_s / 4, limits.head_s / 4) / SWEEP_PARTS)
            self._core.sweep(turn % SWEEP_PARTS, SWEEP_PARTS)
            if connections.num_added >= trimmed + TRIM_AFTER and self._loop.time() >= due_at:
                trimmed, due_at = connections.num_added, self._loop.time() + TRIM_EVERY_S
                await asyncio.to_thread(_trim_heap)

    async def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, address = await self._loop.sock_accept(self._listener)
            except ConnectionAbortedError:
                continue  # it ended before it was accepted
            except OSError as error:
                log.warning("server %s: accept failed, trying again: %s", self.address, error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            with contextlib.suppress(OSError):  # gone again
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host = str(address[0])
            if not self._core.connections.has_room(host):
                sock.close()
                continue
            task = self._loop.create_task(self._handshake(sock, host))
            # One that is cancelled before its first step never runs.
            task.add_done_callback(lambda done, sock=sock: sock.close() if done.cancelled() else None)  # type: ignore[misc]
            self._core.connections.add_handshake(task, host)

    async def _handshake(self, sock: socket.socket, host: str) -> None:
        core, limits = self._core, self._core.limits
        try:
            if self._tls is not None:
                async with asyncio.timeout(limits.handshake_s):
                    sock = await handshake(self._loop, sock, self._tls)
            SocketTransport(self._loop, sock, PeerProtocol(core, host))
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError: strangers, resets
            log.debug("server %s: refused a connection from %s: %s", self.address, host, error)
            core.connections.num_refused += 1
            if isinstance(error, ssl.SSLError) and self.identity is not None:
                self.identity.record_event("stranger", address=host, reason=str(error))
            sock.close()
        except BaseException:  # cancelled, to make room; or a fault of ours, which the task's owner logs
            sock.close()
            raise


def _trim_heap() -> None:
    """Gives the system what finished handshakes left in fragments: 5 KiB a connection. Only glibc keeps them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that does not block."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise NetworkError(
                f"server: port {port} is in use on {host}. "
                "Stop what holds it, or choose another port (0 takes a free one)."
            ) from error
        raise NetworkError(f"server: cannot listen on {host}:{port}: {error}") from error
    return listener


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _after_fork() -> None:
    """Closes copies of listeners in a child: who connects after the parent's end would wait for nobody."""
    for server in list(_servers):
        if server._listener is not None:
            server._listener.close()
    _servers.clear()


os.register_at_fork(after_in_child=_after_fork)
