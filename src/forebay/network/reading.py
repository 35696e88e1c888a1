"""Requests off a connection that does not block, how long it may be waited for, and what became of each."""

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

from forebay.network.exchange import Pending, Request, Response
from forebay.network.heads import Head, RefusedError
from forebay.network.limits import Bounds
from forebay.network.parking import READ, WRITE, Connection

PIECE_BYTES = 64 << 10
SHORT_BYTES = 8 << 10  # an answer that goes into a socket with room at once
Asked = tuple[Head, bytes] | RefusedError
_Guard = Callable[[Request, Callable[[], Response | Pending]], Response | Pending]


@dataclass
class Heard:
    """A request that was handed over, and its answer. `request`: None if it was none.

    Attributes:
        keep: Whether the client may ask again.
        discard: Bytes that it may go on sending if not.
    """

    request: Request | None
    answer: Response | Pending
    keep: bool
    discard: int

    @property
    def is_short(self) -> bool:
        """Whether the answer is there, and small."""
        body = self.answer.body if isinstance(self.answer, Response) else None
        return isinstance(body, bytes) and len(body) <= SHORT_BYTES

    def settle(self, guard: _Guard) -> None:
        """Wait for the answer, if it is still to come."""
        while isinstance(self.answer, Pending):
            assert self.request is not None  # what was none is refused at once
            self.answer = guard(self.request, self.answer.settle)


def read_request(connection: Connection, bounds: Bounds) -> Asked | None:
    """The next whole request, or what is wrong with it; None: not yet, and it may wait until its deadline.

    Reads until nothing is left, in the TLS layer's buffer neither: the selector would not tell of that.

    Raises:
        OSError: If the connection has ended.
    """
    connection.events = READ
    try:
        while True:
            if connection.ending:
                piece = connection.socket.recv(PIECE_BYTES)
                connection.to_discard -= len(piece)
                if not piece or connection.to_discard < 0:
                    raise ConnectionResetError("ended after its last answer")
                continue
            if (whole := connection.incoming.next()) is not None:
                return whole
            set_deadline(connection, bounds)
            piece = connection.socket.recv(PIECE_BYTES)
            if not piece:
                raise ConnectionResetError("the peer closed")
            connection.incoming.feed(piece)
    except RefusedError as error:
        return error
    except (ssl.SSLWantReadError, BlockingIOError):
        return None
    except ssl.SSLWantWriteError:
        connection.events = WRITE
        return None


def set_deadline(connection: Connection, bounds: Bounds) -> None:
    """Once for each thing it waits for: a first byte, the rest of a head, a body."""
    phase = connection.incoming.phase
    if phase != connection.phase:
        rest_s = bounds.head_s + connection.incoming.missing_bytes / bounds.body_bytes_per_s
        connection.deadline = time.monotonic() + (bounds.idle_s if phase == "rest" else rest_s)
        connection.phase = phase
