"""HTTP/1.1 server over mutual TLS 1.3 for a FastAPI application: its socket, thread, event loop and tasks.

`app.py` creates the application, `server_connections.py` handles connections and requests.

Without an identity the server does no authentication, over plain HTTP or over TLS without client certificates: for
loopback, or for what its owner opens knowingly. It refuses requests that a browser sends for a page of another site.

Cost: one thread with one event loop for all connections; some 35 KiB per idle TLS connection.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self

from fastapi import FastAPI

from forebay.base import Closing
from forebay.errors import NetworkError
from forebay.network import log
from forebay.network.app import add_trust_routes
from forebay.network.client import Client
from forebay.network.discovery import Discovery
from forebay.network.limits import ServerLimits
from forebay.network.peer import Peer
from forebay.network.pki.identity import Identity
from forebay.network.revocation_sync import TrustWatch
from forebay.network.server_connections import PeerProtocol, ServerCore
from forebay.network.tls import SocketTransport, handshake
from forebay.storage.hosts import join_address
from forebay.storage.locks import at_fork
from forebay.storage.retry import log_while_waiting
from forebay.threads import FIRST_WAIT_S, MAX_WAIT_S, SupervisedThread

BACKLOG = 1024
ACCEPT_PAUSE_S = 0.1  # after a failure, such as no free descriptor
THREAD_JOIN_S = 10.0
START_S = 30.0
Task = Callable[[], Awaitable[None]]


@dataclass(eq=False)
class Server(Closing):
    """Serves an application to the members of one network; with identity None to any client.

    Owns its thread and sockets from `start` to `close`; both may be called from any thread, `close` more than once.

    Args:
        on_bytes: Called in the server's thread for each piece of a file that was sent.
        tls: Without an identity: TLS with this context, otherwise plain HTTP.
        discovery, peers: Find nodes that serve CRLs: see `TrustWatch`.
        faults: Returns why this process cannot do its job now, each as `WHAT: why; what to do` or ""; they are logged
            while they last.
    """

    app: FastAPI
    identity: Identity | None
    host: str
    port: int
    limits: ServerLimits | None = None
    on_bytes: Callable[[Peer, int], None] | None = None
    tls: ssl.SSLContext | None = None
    discovery: Discovery | None = None
    peers: Callable[[], Sequence[str]] = tuple
    faults: Callable[[], Sequence[str]] = tuple

    def __post_init__(self) -> None:
        self._core = ServerCore(self.app, self.identity, self.limits or ServerLimits(), self.on_bytes, self.host)
        self._trust: TrustWatch | None = None
        if self.identity is not None:
            add_trust_routes(self.app, self.identity)
        self._thread: SupervisedThread | None = None
        self._tasks: list[tuple[str, Task]] = [("accept", self._accept), ("sweep", self._sweep)]
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """`host:port` where it listens; IPv6 in brackets."""
        return join_address(self.host, self.port)

    @property
    def draining(self) -> bool:
        return self._core.is_draining

    def find_faults(self) -> list[str]:
        """Return the faults of this process, of its certificate, and of its DHT."""
        own = self.identity.refusal(self.identity.as_peer) if self.identity is not None else None
        fault = own and f"a valid certificate: {own[1]}; renew it (forebay network renew) or join again"
        dht_fault = self.discovery.fault if self.discovery is not None else ""
        return list(filter(None, [fault, dht_fault, *self.faults()]))

    @property
    def num_connections(self) -> int:
        """Open connections, handshakes included."""
        return len(self._core.connections)

    @property
    def refused_connections(self) -> int:
        """Connections closed because of a missing certificate or a limit."""
        return self._core.connections.num_refused

    def add_task(self, name: str, body: Task) -> None:
        """Add a background task of the server's loop; call it before `start`.

        An exception is logged with its traceback and counted; the task restarts after 1 s, doubled to 60 s with each
        failure and reset after 60 s without one.
        """
        self._tasks.append((name, body))

    def start(self) -> Self:
        """Listen, and serve in a background thread. Raises NetworkError."""
        if self.identity is not None:
            self.tls = self.identity.server_context()
        self._listener = listen(self.host, self.port)
        self.port = self._listener.getsockname()[1]
        ready = threading.Event()
        self._thread = SupervisedThread(lambda: asyncio.run(self._serve(ready)), "http-server").start()
        if not ready.wait(START_S):
            self.close()
            raise NetworkError(f"server: no event loop within {START_S:g} s on {self.address}; see the log.")
        at_fork(self)
        if self.identity is not None:
            self._trust = TrustWatch(
                self.identity, Client(self.identity), peers=self.peers, discovery=self.discovery,
                address=self.address, on_change=lambda: self.run_soon(self._core.sweep),
            ).start()  # fmt: skip
        log.info("listening: address=%s tls=%s", self.address, "yes" if self.tls is not None else "no")
        return self

    def run_soon(self, callback: Callable[[], object]) -> None:
        """Schedule a call in the server's loop from another thread; does nothing if the server does not run."""
        if self._is_running():
            with contextlib.suppress(RuntimeError):  # the loop failed and has not restarted
                self._loop.call_soon_threadsafe(callback)

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Stop accepting and let requests in progress finish; whether all did within `timeout_s`."""
        if not self._is_running() or self._loop.is_closed():
            return True
        return asyncio.run_coroutine_threadsafe(self._drain(timeout_s), self._loop).result()

    def close(self) -> None:
        """Stop at once: end all connections and the thread."""
        if self._trust is not None:
            self._trust.close()
        with self._lock:
            if self._thread is not None:
                self._thread.stop()
                self.run_soon(lambda: self._stop.set())
                self._thread.join(THREAD_JOIN_S)
                self._listener.close()

    def after_fork(self) -> None:
        """In a forked child: close the listener, else clients would connect to it after the parent's end."""
        self._listener.close()

    def __enter__(self) -> Self:
        return self.start()

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive

    async def _serve(self, ready: threading.Event) -> None:
        """Run until `close`. After a failure the next loop accepts on the same listener; connections end."""
        core = self._core
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        core.bind(self._loop)
        tasks = [self._loop.create_task(self._supervise(name, body)) for name, body in self._tasks]
        self._accepting = tasks[0]
        ready.set()
        try:
            with log_while_waiting(log, lambda: " | ".join(self.find_faults())):
                await self._stop.wait()
            core.is_draining = True
            self._close_listener()
        finally:
            tasks += core.state.tasks
            for task in tasks:
                task.cancel()
            for connection in core.connections.all():
                connection.abort()
            core.connections.cancel_handshakes()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, timeout_s: float) -> bool:
        core = self._core
        deadline = self._loop.time() + timeout_s
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
        if self._listener.fileno() != -1:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def _supervise(self, name: str, body: Task) -> None:
        pause_s = FIRST_WAIT_S
        while True:
            started = self._loop.time()
            try:
                await body()
                return
            except Exception:  # noqa: BLE001 - logged with its traceback
                self._core.task_failures[name] += 1
                if self._loop.time() - started > MAX_WAIT_S:
                    pause_s = FIRST_WAIT_S
                log.exception("task failed: server=%s name=%s restart_in_s=%g", self.address, name, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_WAIT_S, 2 * pause_s)

    async def _sweep(self) -> None:
        core = self._core
        limits = core.limits
        while True:
            period_s = min(4.0, limits.idle_s / 4, limits.head_s / 4, limits.handshake_s / 2, limits.send_s / 4)
            due = self._loop.time() + period_s
            await asyncio.sleep(period_s)
            core.stalled_s += max(0.0, self._loop.time() - due)
            core.sweep()

    async def _accept(self) -> None:
        while True:
            try:
                sock, address = await self._loop.sock_accept(self._listener)
            except ConnectionAbortedError:
                continue  # ended before it was accepted
            except OSError as error:
                log.warning("server %s: accept failed, trying again: %s", self.address, error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            with contextlib.suppress(OSError):  # already closed
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host = str(address[0])
            if not self._core.connections.has_room(host):
                sock.close()
                continue
            task = self._loop.create_task(self._handshake(sock, host))
            # A task that is cancelled before its first step never runs.
            task.add_done_callback(lambda done, sock=sock: sock.close() if done.cancelled() else None)  # type: ignore[misc]
            self._core.connections.add_handshake(task, host, self._core.time())

    async def _handshake(self, sock: socket.socket, host: str) -> None:
        core = self._core
        try:
            if self.tls is not None:
                sock = await handshake(self._loop, sock, self.tls)
            SocketTransport(self._loop, sock, PeerProtocol(core, host))
        except OSError as error:  # ssl.SSLError is an OSError: strangers, resets
            log.debug("server %s: refused a connection from %s: %s", self.address, host, error)
            core.connections.num_refused += 1
            if isinstance(error, ssl.SSLError) and self.identity is not None:
                self.identity.record_event("stranger", address=host, reason=str(error))
            sock.close()
        except BaseException:  # cancelled, or an internal error that the loop logs
            sock.close()
            raise


def listen(host: str, port: int) -> socket.socket:
    """A non-blocking listening socket. Raises NetworkError."""
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
                "Stop the process that uses it, or choose another port (0 takes a free one)."
            ) from error
        raise NetworkError(f"server: cannot listen on {host}:{port}: {error}") from error
    return listener
