"""What is on its way between the members of a swarm. No policy here."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

Pair = tuple[str, int]  # (asker, slice)


@dataclass(frozen=True)
class Download:
    """A slice on its way from a holder to an asker.

    Attributes:
        fresh: It comes from an origin.
        passed_on: The asker will give it to others.
    """

    holder: str
    since: float
    fresh: bool
    passed_on: bool


class UnderWay:
    """Downloads by asker and slice, the oldest first.

    Attributes:
        coming: [num_slices] downloads of each to somebody who passes it on.
        usual_s: How long one takes, the last ones weighing most; 0.0: not known.
    """

    def __init__(self, num_slices: int) -> None:
        self.coming = np.zeros(num_slices, np.int32)
        self.usual_s = 0.0
        self._downloads: OrderedDict[Pair, Download] = OrderedDict()
        self._of: dict[str, set[Pair]] = {}  # from or to a member

    def __len__(self) -> int:
        return len(self._downloads)

    def get(self, pair: Pair) -> Download | None:
        """The download of a slice by an asker; None if there is none."""
        return self._downloads.get(pair)

    def of(self, member: str) -> list[Pair]:
        """What is under way from or to a member."""
        return list(self._of.get(member, ()))

    def told(self, asker: str) -> list[int]:
        """The slices on their way to an asker."""
        return [index for who, index in self._of.get(asker, ()) if who == asker]

    def oldest(self) -> tuple[Pair, Download] | None:
        """What has been under way longest."""
        return next(iter(self._downloads.items()), None)

    def begin(self, pair: Pair, download: Download) -> None:
        """A download begins; there was none of this asker and slice."""
        asker, index = pair
        self._downloads[pair] = download
        for member in (asker, download.holder):
            self._of.setdefault(member, set()).add(pair)
        self.coming[index] += download.passed_on

    def end(self, pair: Pair) -> Download | None:
        """It is under way no more; None if it was not."""
        download = self._downloads.pop(pair, None)
        if download is None:
            return None
        for member in {pair[0], download.holder}:
            pairs = self._of[member]
            pairs.discard(pair)
            if not pairs:
                del self._of[member]
        self.coming[pair[1]] -= download.passed_on
        return download

    def took(self, seconds: float) -> None:
        """One that ended well took so long."""
        self.usual_s = seconds if not self.usual_s else self.usual_s + 0.1 * (seconds - self.usual_s)
