"""What is known of the shards of a directory: which were fetched here, and which pairs were judged and not changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forebay.errors import UsageError
from forebay.storage.atomic import atomic_write


class Marks:
    """One small file a shard, `.train_000003.mark`; where none can be written, what this process knows."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder = folder
        self._prefix = prefix
        self._known: dict[int, list[int]] = {}

    def path(self, index: int) -> Path:
        """Of a shard's mark."""
        return self._folder / f".{self._prefix}_{index:06d}.mark"

    def read(self, index: int) -> dict[str, Any]:
        """`fetched`, `judged`; empty if there is none."""
        try:
            found = json.loads(self.path(index).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def begin(self, index: int) -> None:
        """What will lie there was fetched here."""
        atomic_write(self.path(index), json.dumps({"fetched": True}).encode())

    def set_judged(self, index: int, tokens: Path, ids: Path, fetched: bool) -> None:
        """The pair is right. Raises OSError where that cannot be written; it is known even then."""
        self._known[index] = _state(tokens, ids)
        mark = {"fetched": fetched, "judged": self._known[index]}
        atomic_write(self.path(index), json.dumps(mark).encode())

    def is_judged(self, index: int, tokens: Path, ids: Path) -> bool:
        """Whether the pair is there, was judged, and has not changed since."""
        state = _state(tokens, ids)
        return bool(state) and state in (self.read(index).get("judged"), self._known.get(index))


def unwritable(folder: Path, error: OSError) -> UsageError:
    """The error of a directory that cannot be written."""
    return UsageError(
        f"{folder}: expected a directory to write shards to, got: {error.strerror}. Choose another folder, or with "
        "shards that lie there already give it as url, too."
    )


def _state(tokens: Path, ids: Path) -> list[int]:
    """Sizes and times of change; empty if one is missing."""
    try:
        found = [tokens.stat(), ids.stat()]
    except OSError:
        return []
    return [number for one in found for number in (one.st_size, one.st_mtime_ns, one.st_ino)]
