"""A lease in a worker's hand, and what one exchange says of all of them."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forebay.order.shard_windows import receipt
from forebay.worker.answers import Grant


@dataclass(eq=False)
class Held:
    """A lease in hand. Of its samples [start, stop) those before `acked` are on record, those before `used` are used,
    those before `taken` are used or in the step under way, and none from `limit` on may be taken now.

    Attributes:
        path: The verified slice, pinned, once it is here.
        read: int64 [stop - start of the grant], the global ids of the samples that were read, as far as `used`.
        over: Nothing more of it is used: it was lost, failed or given up.
        reason: Why it failed; empty if it did not.
    """

    grant: Grant
    stop: int
    acked: int
    used: int
    taken: int
    limit: int
    step: int = 0
    path: Path | None = None
    read: NDArray[np.int64] | None = None
    fetching: bool = False
    training: bool = False
    over: bool = False
    reason: str = ""
    refusals: int = 0

    @property
    def is_spent(self) -> bool:
        """Whether the worker has no more to use of it."""
        return self.over or self.used >= self.stop


@dataclass(frozen=True)
class Use:
    """Samples [start, stop) of a lease that were used, the last of them in a step of this worker's."""

    held: Held
    start: int
    stop: int
    step: int

    @property
    def digest(self) -> str:
        """The receipt of the sample ids that were read: it is over what was used, not over what should have been."""
        read, start = self.held.read, self.held.grant.start
        return receipt(read[self.start - start : self.stop - start].view(np.uint64))[0] if read is not None else ""


@dataclass(frozen=True)
class Bad:
    """A provider that was left out for a slice; `wrong`: its bytes were wrong, not only late."""

    peer_id: str
    sha256: str
    reason: str
    wrong: bool


@dataclass(frozen=True)
class Statement:
    """What one exchange says; the horizons bind until its answer came."""

    held: tuple[str, ...]
    uses: tuple[Use, ...]
    horizons: dict[str, int]
    release: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]
    bad: tuple[Bad, ...]
    want: int


@dataclass
class Tally:
    """What became of the leases: samples used for nothing, leases lost after they were begun, seconds waited."""

    wasted: int = 0
    lost: int = 0
    waited_s: float = 0.0
    bad: list[Bad] = field(default_factory=list)
