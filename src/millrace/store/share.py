"""The server in every worker: hands out, by hash, the slices that its cache holds, to members of its network.

What the cache lost meanwhile is answered 404; what was evicted while it is sent is sent to the end, as its file is open.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.network.https import Request, Response, Server, error_response, file_response
from millrace.network.identity import Identity
from millrace.network.limits import Throttle
from millrace.network.peer import Peer
from millrace.store.cache import SliceCache


class SliceShare:
    """Serves from construction until `close`.

    Args:
        cache: Where the slices lie. Stays the caller's.
        hashes: Bytes of each slice that may be handed out, by hash; looked at anew at each request, so that the
            caller may add to it.
        port: TCP; 0 takes a free one.

    Raises:
        NetworkError: If it cannot listen.
    """

    def __init__(
        self,
        identity: Identity,
        cache: SliceCache,
        hashes: Mapping[str, int],
        host: str,
        port: int,
        throttle: Throttle | None = None,
        *,
        max_connections: int = 256,
    ) -> None:
        self.cache = cache
        self.hashes = hashes
        self._sent = 0
        self._server = Server(identity, host, port, self._handle, max_connections, self._count, throttle=throttle)
        self._server.start()

    @property
    def address(self) -> str:
        """`host:port`."""
        return self._server.address

    @property
    def bytes_sent(self) -> int:
        """Of slices and answers, since it was made."""
        return self._sent

    def close(self, timeout_s: float = 0.0) -> bool:
        """Take no more requests, let uploads finish for so long, then cut. May be repeated.

        Returns:
            Whether every upload finished.
        """
        drained = self._server.drain(timeout_s)
        self._server.close()
        return drained

    def __enter__(self) -> SliceShare:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _count(self, peer: Peer, num_bytes: int) -> None:
        self._sent += num_bytes

    def _handle(self, request: Request) -> Response:
        match request.method, request.path.split("/")[1:]:
            case "GET", ["v1", "slices", sha256]:
                return self._slice(request, sha256)
        return error_response(404, "unknown_path", "nothing is served at this path")

    def _slice(self, request: Request, sha256: str) -> Response:
        size = self.hashes.get(sha256)
        path = self.cache.get(sha256) if size is not None else None
        if size is None or path is None:
            return error_response(404, "unknown_slice", "this node has no slice of this hash now")
        return file_response(request, path, size)
