"""Whether what came wrong is wrong at its origin, or was damaged on its way: the same wrong bytes twice tell."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from forebay.errors import DatasetError, IntegrityError

_HEAD_BYTES = 12 << 10
_MOST_TRIES = 8
_MOST_DROPPED = 4 << 30


class Doubt:
    """Of one shard's two partial files, while it is fetched."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._wrong: dict[bytes, IntegrityError] = {}  # by the digest of the ids

    def again(self, error: IntegrityError | DatasetError, ids: Path, tokens: Path) -> bool:
        """Whether to fetch the ids again, and where a header was wrong, the tokens; what is in doubt is removed."""
        if not ids.exists() or len(self._seen) == _MOST_TRIES:
            return False
        digest = hashlib.blake2b(ids.read_bytes())
        header = isinstance(error, DatasetError) and tokens.exists()
        if header:
            with tokens.open("rb") as file:
                digest.update(file.read(_HEAD_BYTES))
        if digest.digest() in self._seen:
            return False
        self._seen.add(digest.digest())
        if isinstance(error, IntegrityError):
            self._wrong[digest.digest()] = error
        ids.unlink()
        if header and tokens.stat().st_blocks * 512 <= _MOST_DROPPED:  # it is found when the first bytes are there
            with contextlib.suppress(FileNotFoundError):
                tokens.unlink()
        return True

    def check(self, ids: Path) -> None:
        """Raise what was wrong before, if the ids that were fetched again are the same."""
        if self._wrong and (error := self._wrong.get(hashlib.blake2b(ids.read_bytes()).digest())) is not None:
            raise error
