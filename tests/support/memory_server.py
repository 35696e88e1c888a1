"""A server without sockets, threads or real time: a test passes it bytes, and its clock moves when the test says so.

It has the connections, limits, sweeps and tasks of a real `Server`; only the listener, the handshake and the transport
are replaced. `run_ready` runs what is ready; a wait, however long, costs nothing.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

from forebay.network.limits import ServerLimits
from forebay.network.peer import Peer
from forebay.network.server import Server
from forebay.network.server_connections import PeerProtocol
from support.handlers import Request, application
from support.wire import Answer, parse_answers, request_bytes

PIECE_BYTES = 1 << 16  # of what a client sends, as a transport receives it


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time advances only where nothing is ready; its executor runs a call at once."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(SimpleSelector(self))

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, function: Callable, *args: Any) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(function(*args))
        except Exception as error:  # noqa: BLE001 - the caller of the executor receives it
            done.set_exception(error)
        return done

    def run_ready(self) -> None:
        """Run what is ready, and what that makes ready; no time passes."""
        while self._ready:
            self.call_soon(self.stop)
            self.run_forever()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.call_at(self.now + seconds, self.stop)
        self.run_forever()
        self.run_ready()


class SimpleSelector(selectors.DefaultSelector):
    """Advances the loop's clock instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list:
        assert timeout is not None, "nothing is left that could happen"
        self._loop.now += max(0.0, timeout)
        return super().select(0)


class Members:
    """Stands for an identity: a member's certificate is its name, "ORGANISATION/NAME" or "NAME"."""

    def __init__(self) -> None:
        self.refusals = {}  # by peer id
        self.revocations = SimpleNamespace(digest=lambda: "0" * 16)
        self.events = []

    def peer(self, der: bytes) -> Peer:
        org, _, name = der.decode().rpartition("/")
        return Peer(name, b"", name, org)

    def refusal(self, peer: Peer) -> tuple[str, str] | None:
        return self.refusals.get(peer.peer_id)

    def record_event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))


class MemoryServer:
    """Owns the loop; a context manager.

    Args:
        app: An application, or a function that answers every GET and POST; it may be a coroutine function.
        identity: None: a server over plain HTTP.
        limits: Settings of `ServerLimits`.
    """

    def __init__(self, app: FastAPI | Callable[[Request], Any], identity: Members | None = None, **limits: Any) -> None:
        app = app if isinstance(app, FastAPI) else application(app)
        self.server = Server(app, None, "127.0.0.1", 0, limits=ServerLimits(**limits))
        self.core = self.server._core
        self.core.identity = identity
        self.loop = self.server._loop = VirtualLoop()
        self.core.bind(self.loop)
        self.add_task("sweep", self.server._sweep)

    def __enter__(self) -> MemoryServer:
        return self

    def __exit__(self, *exc: object) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_ready()
        self.loop.close()

    def add_task(self, name: str, body: Callable[[], Any]) -> None:
        """Start a background task, supervised as one of `Server.add_task`."""
        self.loop.create_task(self.server._supervise(name, body))

    def knock(self, address: str = "127.0.0.1") -> asyncio.Task[None] | None:
        """Accept a connection that does not finish its handshake; None if there is no room for it."""
        if not self.core.connections.has_room(address):
            return None
        task = self.loop.create_task(asyncio.sleep(float("inf")))
        self.core.connections.add_handshake(task, address, self.core.time())
        self.loop.run_ready()
        return task

    def connect(self, member: str = "", address: str = "127.0.0.1") -> MemoryConnection:
        """A connection after its handshake; it is closed if there is no room for it, or the member is refused."""
        created = MemoryConnection(self, member, address)
        if self.core.connections.has_room(address):
            created.open()
        return created

    def ask(self, method: str, path: str, body: Any = None, member: str = "", **headers: str) -> Answer:
        """The response to one request on a connection of its own; `body` is sent as JSON."""
        connection = self.connect(member)
        connection.send(request_bytes(method, path, body, **headers))
        (answer,) = connection.answers()
        connection.hang_up()
        return answer

    def metric(self, name: str, label: str = "") -> float:
        """A figure of the server; 0 if it has none."""
        for family in self.core.metrics():
            for sample in family.samples:
                if sample.name == name and (not label or label in sample.labels.values()):
                    return float(sample.value)
        return 0.0


class MemoryConnection(asyncio.Transport):
    """A client and its connection.

    Attributes:
        is_open: Neither side has closed it.
        is_reading: Whether the client reads; False keeps what is written to it.
    """

    def __init__(self, server: MemoryServer, member: str, address: str) -> None:
        super().__init__()
        self.server, self.loop, self.address = server, server.loop, address
        self.member = member
        self.is_open, self.is_reading = False, True
        self.received, self.num_consumed = bytearray(), 0
        self._unsent, self._is_paused = bytearray(), False
        self._unread = []

    def open(self) -> None:
        """Finish the handshake."""
        self.is_open = True
        self.protocol = PeerProtocol(self.server.core, self.address)
        self.protocol.connection_made(self)
        self.loop.run_ready()

    # The client's side.

    def send(self, *pieces: bytes) -> None:
        """Send pieces, each in a packet of its own, and run the server until it has done what it can."""
        for piece in pieces:
            self._unsent += piece
            self._feed()
            self.loop.run_ready()

    def answers(self) -> list[Answer]:
        """The whole responses that came since the last call."""
        result, rest = parse_answers(bytes(self.received))
        self.received[:] = rest
        return result

    def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> Answer:
        """The response to one request."""
        self.send(request_bytes(method, path, body, **headers))
        (answer,) = self.answers()
        return answer

    def read(self) -> int:
        """Read what was kept back; return its length."""
        data, self._unread = b"".join(self._unread), []
        self.received += data
        self.protocol.resume_writing()
        self.loop.run_ready()
        return len(data)

    @property
    def num_unread(self) -> int:
        """Bytes that the client has not read."""
        return sum(map(len, self._unread))

    def hang_up(self) -> None:
        """Close the connection."""
        self.abort()
        self.loop.run_ready()

    def _feed(self):
        while self._unsent and self.is_open and not self._is_paused:
            piece = bytes(self._unsent[:PIECE_BYTES])
            del self._unsent[:PIECE_BYTES]
            self.num_consumed += len(piece)
            self.protocol.data_received(piece)

    # The server's transport.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See asyncio.BaseTransport."""
        tls = self.server.core.identity is not None
        info = {"peername": (self.address, 1), "sockname": ("127.0.0.1", 2), "sslcontext": tls or None}
        if tls:
            info["ssl_object"] = SimpleNamespace(getpeercert=lambda binary_form: self.member.encode())
        return info.get(name, default)

    def is_closing(self) -> bool:
        return not self.is_open

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.loop.call_soon(self._feed)

    def write(self, data: Any) -> None:
        if not self.is_open:
            return
        if self.is_reading:
            self.received += data
        else:
            self._unread.append(bytes(data))
            self.protocol.pause_writing()

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if self.is_open:
            self.is_open = False
            self.loop.call_soon(self.protocol.connection_lost, None)
