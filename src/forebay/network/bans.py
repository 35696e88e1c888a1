"""Bans, in the audit log: each once, with whose report it was that made it one for all."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from forebay.network.identity import Identity

log = logging.getLogger("forebay.network")


class BanNotes:
    """What a node that steers swarms has noted of whom they ban; `identity` None: only in the program's log."""

    def __init__(self, identity: Identity | None) -> None:
        self._identity = identity
        self._noted: set[tuple[str, str]] = set()

    def know(self, dataset_id: str, banned: Iterable[str]) -> list[str]:
        """Takes them for noted; returns who is new."""
        new = [peer_id for peer_id in banned if (dataset_id, peer_id) not in self._noted]
        self._noted.update((dataset_id, peer_id) for peer_id in new)
        return new

    def look(self, dataset_id: str, banned: Iterable[str], by: str, reason: str = "") -> None:
        """Notes who is newly banned, after `by` reported."""
        for peer_id in self.know(dataset_id, banned):
            log.warning("nobody is sent to %s any more for slices of %s: %s", peer_id, dataset_id, reason)
            if self._identity is not None:
                facts = {"reason": reason} if reason else {}
                self._identity.note("ban", peer=peer_id, dataset=dataset_id, by=by, **facts)
