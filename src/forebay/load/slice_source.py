"""How the slices of a run come: from their datasets' origins, or as members of their swarms steer each other.

Who shares serves what lies in the cache, from the first fetch until `close`: what is evicted is offered no longer,
and nothing is kept for the sake of others. Every process that shares is a member of its own; those of one machine
share a cache and a node's identity, and each slice still comes to it once. One server a process and identity.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
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


class Fetches:
    """Begins and ends transfers, in the process that made it, until `close`.

    `share`: whether this process serves its slices to peers, or the `HOST:PORT` to serve at; it then fetches from
    peers as well.
    """

    def __init__(self, datasets: Sequence[Dataset], cache: SliceCache, connections: int, share: bool | str) -> None:
        self.pid = os.getpid()
        self._cache = cache
        self._transfers = Transfers(connections=connections)
        self._shares: dict[str, SliceShare | None] = {}  # by node
        self._members: dict[str, SwarmMember] = {}  # by dataset id
        try:
            for dataset in datasets if share else ():
                if dataset.id not in self._members:
                    self._members[dataset.id] = self._join(dataset, share, connections)
        except BaseException:
            self.close()
            raise

    def start(self, dataset: Dataset, index: int, part: Path) -> Transfer:
        """Begin to fetch a slice into its partial file."""
        if (member := self._members.get(dataset.id)) is not None:
            return member.reader.fetch(index, part)
        origin = getattr(dataset, "origin", None)
        origin = origin if origin is not None else open_origin(str(dataset.path))
        return self._transfers.start(dataset.table.row(index), part, [origin])

    def evicted(self, dataset: Dataset, index: int) -> None:
        """A slice is here no longer."""
        if (member := self._members.get(dataset.id)) is not None:
            member.reader.report_lost(index)

    def stats(self) -> dict[str, int]:
        """Slices by where they came from, and bytes that others took from here; empty if nothing is shared."""
        if not self._members:
            return {}
        found = [member.reader.stats() for member in self._members.values()]
        sent = sum(share.bytes_sent for share in self._shares.values() if share is not None)
        names = ("from_origins", "from_peers")
        return {name: sum(int(one[name]) for one in found) for name in names} | {"shared_bytes": sent}

    def close(self) -> None:
        """Leave the swarms and cancel what is under way. Nothing, in a child made by a fork. May be repeated."""
        if os.getpid() != self.pid:
            return
        for member in self._members.values():
            member.close()
        for share in self._shares.values():
            if share is not None:
                share.close()
        self._transfers.close()

    def _join(self, dataset: Dataset, share: bool | str, connections: int) -> SwarmMember:
        from forebay.storage.remote_dataset import RemoteDataset
        from forebay.swarm.reader import SwarmMember

        assert isinstance(dataset, RemoteDataset)
        server = self._server(dataset, share)
        held = _held(self._cache, [row.tobytes().hex() for row in dataset.table.sha256])
        return SwarmMember(
            dataset,
            self._cache,
            held,
            share=server or False,
            downloads=_DOWNLOADS,
            connections=connections,
        )

    def _server(self, dataset: Any, share: bool | str) -> SliceShare | None:
        from forebay.swarm.reader import open_share

        node = dataset.origin.identity.peer_id
        if node not in self._shares:
            try:
                self._shares[node] = open_share(dataset.origin, self._cache, share)
            except NetworkError as error:
                if not isinstance(share, str):
                    raise
                log.warning("this process gets and does not share: %s", error)  # The machine's first has the port.
                self._shares[node] = None
        return self._shares[node]


def _held(cache: SliceCache, sha256s: list[str]) -> Callable[[], NDArray[np.bool_]]:
    keys: Mapping[str, int] = {sha256: index for index, sha256 in enumerate(sha256s)}

    def held() -> NDArray[np.bool_]:
        flags = np.zeros(len(sha256s), np.bool_)
        flags[[keys[sha256] for sha256 in cache.list_slices() if sha256 in keys]] = True
        return flags

    return held
