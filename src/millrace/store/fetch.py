"""Fetch one slice from whoever has it: ranged, resumed, retried, and verified before anybody sees it.

The hash is computed while the bytes arrive, so that verifying costs no second reading. Whose bytes are wrong is
known only if one provider gave them all; so a slice that came from several and is wrong is asked anew, whole, from
one after another, until a culprit is certain.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from millrace.errors import IntegrityError, NetworkError, ProtocolViolation, UsageError
from millrace.network.client import CHUNK_BYTES, Client, RemoteError
from millrace.store.cache import SliceCache

ROUNDS = 4
BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0


@dataclass(frozen=True)
class Provider:
    """Who may have a slice, and where to ask: `host:port`."""

    peer_id: str
    address: str


def fetch_slice(
    client: Client,
    cache: SliceCache,
    sha256: str,
    nbytes: int,
    providers: Sequence[Provider],
    on_bad: Callable[[Provider, str], None],
    *,
    rounds: int = ROUNDS,
    sleep: Callable[[float], object] = time.sleep,
    chance: random.Random | None = None,
) -> Path:
    """The verified file of a slice, from the cache or from a provider.

    Pin it if it must outlive the next fetch. A download broken off, even by a kill, goes on where it ended.

    Args:
        providers: Asked in random order, each up to `rounds` times.
        on_bad: Told of a provider that served wrong bytes or broke the protocol; it is not asked again here.
        sleep: Waits between rounds; an argument, as time is everywhere.

    Raises:
        NetworkError: If no provider gave the slice; names each and its reason.
        IntegrityError: If some did, and all gave wrong bytes.
        UsageError: If the slice cannot fit the budget, or the disk is full.
    """
    if (held := cache.get(sha256)) is not None:
        return held
    chance = chance or random.Random()
    with cache.fetching(sha256, nbytes) as part:
        if (held := cache.get(sha256)) is not None:
            return held  # another thread or process fetched it while this one waited
        try:
            attempt = _Attempt(client, sha256, nbytes, part, on_bad)
            attempt.run(list(providers), rounds, sleep, chance)
            return cache.commit(sha256)
        except OSError as error:
            raise _disk_error(cache.directory, nbytes, error) from error


class _Attempt:
    """One slice on its way into its partial file."""

    def __init__(
        self, client: Client, sha256: str, nbytes: int, part: Path, on_bad: Callable[[Provider, str], None]
    ) -> None:
        self.client = client
        self.sha256 = sha256
        self.nbytes = nbytes
        self.part = part
        self.on_bad = on_bad
        self.sources: set[str] = set()
        self.reasons: dict[str, str] = {}
        self.wrong = False

    def run(
        self,
        providers: list[Provider],
        rounds: int,
        sleep: Callable[[float], object],
        chance: random.Random,
    ) -> None:
        """Ask providers until the partial file is whole and verified."""
        chance.shuffle(providers)
        for turn in range(rounds):
            for provider in list(providers):
                verdict = self._ask(provider)
                if verdict == "whole":
                    return
                if verdict == "no":
                    providers.remove(provider)
            if not providers:
                break
            if turn + 1 < rounds:
                sleep(min(MAX_BACKOFF_S, BACKOFF_S * 2**turn) * (0.5 + chance.random()))
        told = "; ".join(f"{who}: {why}" for who, why in self.reasons.items()) or "none is known"
        kind = IntegrityError if self.wrong and not providers else NetworkError
        raise kind(
            f"slice {self.sha256[:12]}…: expected {self.nbytes} bytes from one of {len(self.reasons)} providers, "
            f"got none that verify. {told}. Start another data node that has it, or ask for the providers again."
        )

    def _ask(self, provider: Provider) -> str:
        """`whole`, `no` (do not ask it again) or `again`."""
        try:
            with self._open() as file:
                digest = self._resume(file)
                start = file.tell()
                self.sources |= {provider.peer_id} if start < self.nbytes else set()
                if start < self.nbytes:
                    path = f"/v1/slices/{self.sha256}"
                    self.client.download(
                        provider.address, path, file, start, self.nbytes, provider.peer_id, digest.update
                    )
                os.fsync(file.fileno())
                if digest.hexdigest() == self.sha256:
                    return "whole"
                file.truncate(0)
        except ProtocolViolation as error:
            return self._blame(provider, str(error))
        except RemoteError as error:
            self.reasons[provider.peer_id] = str(error)
            return "again" if error.status >= 500 else "no"  # refused or not there: asking again is no use
        except NetworkError as error:
            self.reasons[provider.peer_id] = str(error)
            return "again"
        certain = self.sources == {provider.peer_id}
        self.sources = set()
        if certain:
            self.wrong = True
            return self._blame(provider, f"served {self.nbytes} bytes that do not have the hash {self.sha256}")
        self.reasons[provider.peer_id] = "bytes from several sources did not verify together"
        return self._ask(provider)  # whole this time, from one alone

    def _blame(self, provider: Provider, reason: str) -> str:
        self.reasons[provider.peer_id] = reason
        self.on_bad(provider, reason)
        return "no"

    def _open(self) -> BinaryIO:
        descriptor = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return os.fdopen(descriptor, "r+b", buffering=0)

    def _resume(self, file: BinaryIO) -> hashlib._Hash:
        """The hash over what is already there; the file is left at its end."""
        digest = hashlib.sha256()
        file.seek(0, os.SEEK_END)
        if file.tell() > self.nbytes:
            file.truncate(0)
        file.seek(0)
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
        if file.tell() and not self.sources:
            self.sources.add("an earlier run")
        return digest


def _disk_error(directory: Path, nbytes: int, error: OSError) -> UsageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UsageError(
            f"cache: the disk of {directory} is full: {nbytes} bytes did not fit ({error.strerror}). "
            "Free space there, lower the cache's budget, or choose another directory."
        )
    return UsageError(f"cache: cannot write in {directory}: {error}. Check the directory and its permissions.")
