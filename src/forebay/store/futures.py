"""What live processes will read next, told to each other through files, so that any of them may evict for all.

A process writes `DIR/PID-RANDOM.json` and holds its lock for as long as it lives. The first line is of fixed length
and says where the process stands; it is rewritten as it goes. The rest changes as the process looks further ahead.
Whoever reads does so under the cache's room lock, as does whoever writes the rest.

What it costs: about 90 bytes a slice told; a reader parses a file again only when its version has changed.
"""

import json
import math
import os
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forebay.store.locks import EXCLUSIVE, Lock, take, try_take

_HEADER = 96
Use = tuple[int, int, int | None]  # First and last run step of the next uses, and the first one after them.


@dataclass
class Future:
    """What one live process will read. Steps are counted by that process.

    Attributes:
        birth: Elder processes have the lower one.
        now: The step it stands before.
        starved_at: `time.monotonic()` since when it waits for room in vain, or 0.
        uses: By sha256.
        released: Slices that it does not ask others to keep, though it may read them again.
    """

    birth: int = 0
    now: int = 0
    version: int = -1
    starved_at: float = 0.0
    uses: Mapping[str, Use] = field(default_factory=dict)
    released: Collection[str] = ()

    def steps_to(self, sha256: str) -> float:
        """Steps from now until it reads a slice; infinite if it does not say that it will."""
        use = self.uses.get(sha256)
        if use is None:
            return math.inf
        first, last, after = use
        if self.now <= last:
            return max(first - self.now, 0)
        return math.inf if after is None else max(after - self.now, 0)

    def keeps(self, sha256: str) -> bool:
        """Whether it asks others not to delete a slice for tidiness."""
        return sha256 not in self.released and self.steps_to(sha256) < math.inf


class Futures:
    """The futures in a directory, this process's own among them once it was published.

    Args:
        directory: Exists.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.birth = time.monotonic_ns()
        self._own: Path | None = None
        self._lock: Lock | None = None
        self._version = 0
        self._stands: tuple[int, float] = (0, 0.0)
        self._read: dict[str, Future] = {}

    def publish(self, uses: Mapping[str, Use], released: Collection[str]) -> None:
        """Say what this process will read; under the room lock."""
        if self._lock is None:
            self._own = self.directory / f"{os.getpid()}-{secrets.token_hex(4)}.json"
            self._lock = take(self._own)
        body = json.dumps({"uses": uses, "released": list(released)}, separators=(",", ":")).encode()
        os.ftruncate(self._lock.descriptor, _HEADER)
        os.pwrite(self._lock.descriptor, body, _HEADER)
        self._version += 1
        self.stand(*self._stands)

    def stand(self, now: int, starved_at: float = 0.0) -> None:
        """Say where this process stands; needs no lock."""
        self._stands = (now, starved_at)
        if self._lock is not None and self._lock.descriptor >= 0:
            text = f"{self.birth} {now} {self._version} {starved_at!r}"
            os.pwrite(self._lock.descriptor, text.ljust(_HEADER - 1).encode() + b"\n", 0)

    def others(self) -> list[Future]:
        """What the other live processes will read; under the room lock. Files of dead ones are removed."""
        found = {}
        for item in os.scandir(self.directory):
            path = Path(item.path)
            if path == self._own:
                continue
            try:
                gone = try_take(path, EXCLUSIVE)
                if gone is not None:
                    path.unlink(missing_ok=True)
                    gone.release()
                    continue
                found[item.name] = _read(path, self._read.get(item.name))
            except (OSError, ValueError):
                continue  # removed as its process closed, or read while its first line was being written
        self._read = found
        return list(found.values())

    def close(self) -> None:
        """Take back what was published. May be called twice."""
        if self._lock is not None and self._own is not None:
            if self._lock.descriptor >= 0:
                self._own.unlink(missing_ok=True)
            self._lock.release()
        self._lock = self._own = None


def _read(path: Path, known: Future | None) -> Future:
    with path.open("rb") as file:
        birth, now, version, starved_at = file.read(_HEADER).split()
        if known is not None and known.birth == int(birth) and known.version == int(version):
            known.now, known.starved_at = int(now), float(starved_at)
            return known
        told = json.loads(file.read() or b'{"uses": {}, "released": []}')
    uses = {sha256: (first, last, after) for sha256, (first, last, after) in told["uses"].items()}
    return Future(int(birth), int(now), int(version), float(starved_at), uses, set(told["released"]))
