"""Who is at the other end of a connection; known without the packages that prove it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """Who is at the other end of a connection, proven by its certificate; over plain HTTP `peer_id` is empty."""

    peer_id: str
    public_key: bytes
    name: str
