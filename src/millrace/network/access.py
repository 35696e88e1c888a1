"""Who may read which dataset, and how much of it a day: a TOML file, read again when it changes.

    [[dataset]]
    name = "c4-*"                    # a glob; or id = "…"; the first entry that fits counts
    allow = ["org:<peer id>", "peer:<peer id>", "role:worker"]     # without it: all members
    deny = ["peer:<peer id>"]        # goes before allow
    bytes_per_day = "100GB"          # of each peer, UTC days
    org_bytes_per_day = "1TB"        # of all peers of one organisation

What is used up stands in a SQLite file beside it, so that a restart gives nobody a new day. A certificate's own
scope is checked first, with or without a file. An unreadable file lets nobody in.
"""

from __future__ import annotations

import threading
from pathlib import Path

from millrace.network.peer import Peer


class Access:
    """Judges requests. Safe to share between threads; `Access(None)` knows only the scopes of certificates."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: str | Path) -> Access:
        """The rules of a file.

        Raises:
            UsageError: If it is missing or malformed.
        """
        return cls(Path(path))

    def check(self, peer: Peer, dataset_name: str, dataset_id: str, num_bytes: int, now: float) -> str | None:
        """Why a peer may not have so many bytes of a dataset; None if it may, and they are counted.

        Args:
            num_bytes: 0 for what is not counted: manifest, table, a lease.
            now: Unix seconds; a quota is of a UTC day.
        """
        if not peer.scope.covers(dataset_name):
            return f"the certificate of {peer.peer_id} does not cover dataset {dataset_name!r}"
        return None

    def close(self) -> None:
        """Closes the file of what is used up. May be repeated."""
