"""Transfers the slices of a run, from their datasets' origins or from peers of a swarm.

With `share`, this process serves the slices in its cache until `close`, and fetches from peers. Evicted slices are no
longer offered; nothing is retained for peers. Every process that shares is a member of its own; processes of one
machine share a cache and a node's identity, and each slice is fetched once. One server a process and identity.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from forebay.cache.cache import SliceCache
from forebay.dataset.reader import Dataset
from forebay.errors import NetworkError
from forebay.storage.origins import open_origin
from forebay.storage.transfer_state import Transfer
from forebay.storage.transfers import Transfers

if TYPE_CHECKING:
    from forebay.swarm.reader import SwarmMember
    from forebay.swarm.share import SliceShare

_DOWNLOADS = 8
log = logging.getLogger("forebay.swarm")


class SliceSource:
    """Starts and cancels transfers in the process that made it, until `close`.

    `share`: whether to serve slices to peers, or the `HOST:PORT` to listen at; it then fetches from peers as well.
    """

    def __init__(self, datasets: Sequence[Dataset], cache: SliceCache, connections: int, share: bool | str) -> None:
        self.pid = os.getpid()
        self._cache, self._connections, self._share = cache, connections, share
        self._transfers = Transfers(connections=connections)
        self._shares: dict[str, SliceShare | None] = {}  # By node.
        self._members: dict[str, SwarmMember] = {}  # By dataset id.
        try:
            for dataset in datasets if share else ():
                if dataset.id not in self._members:
                    self._members[dataset.id] = self._join(dataset)
        except BaseException:
            self.close()
            raise

    def start(self, dataset: Dataset, index: int, part: Path) -> Transfer:
        """Start to fetch a slice into its partial file."""
        if (member := self._members.get(dataset.id)) is not None:
            return member.reader.fetch(index, part)
        origin = getattr(dataset, "origin", None) or open_origin(str(dataset.path))
        return self._transfers.start(dataset.table.row(index), part, [origin])

    def stats(self) -> dict[str, int]:
        """Slices by where they came from, and bytes sent to peers; empty if nothing is shared."""
        if not self._members:
            return {}
        stats = [member.reader.stats() for member in self._members.values()]
        sent = sum(share.bytes_sent for share in self._shares.values() if share is not None)
        names = ("from_origins", "from_peers")
        return {name: sum(int(counts[name]) for counts in stats) for name in names} | {"shared_bytes": sent}

    def close(self) -> None:
        """Leave the swarms and cancel transfers. Does nothing in a forked child. May be repeated."""
        if os.getpid() != self.pid:
            return
        for member in self._members.values():
            member.close()
        for share in self._shares.values():
            if share is not None:
                share.close()
        self._transfers.close()

    def _join(self, dataset: Any) -> SwarmMember:
        from forebay.swarm.reader import SwarmMember

        cache = self._cache
        indexes = {row.tobytes().hex(): index for index, row in enumerate(dataset.table.sha256)}

        def available() -> NDArray[np.bool_]:
            flags = np.zeros(len(dataset.table), np.bool_)
            flags[[indexes[sha256] for sha256 in cache.list_slices() if sha256 in indexes]] = True
            return flags

        server = self._server(dataset) or False
        return SwarmMember(dataset, cache, available, share=server, downloads=_DOWNLOADS, connections=self._connections)

    def _server(self, dataset: Any) -> SliceShare | None:
        from forebay.swarm.reader import open_share

        node = dataset.origin.identity.peer_id
        if node not in self._shares:
            try:
                self._shares[node] = open_share(dataset.origin, self._cache, self._share)
            except NetworkError as error:
                if not isinstance(self._share, str):
                    raise
                log.warning("this process fetches from peers and does not share: %s", error)  # The port is in use.
                self._shares[node] = None
        return self._shares[node]
