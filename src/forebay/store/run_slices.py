"""The slices of one run, over all of its datasets, by key; and when they are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.store.room import part_bytes
from forebay.store.uses import I64, UsesOf

Keep = Literal["budget", "window", "all"]


@dataclass(frozen=True)
class RunSlices:
    """The slices of one run.

    Attributes:
        sha256s: Hex, by key.
        sizes: Bytes, by key.
        uses: Run steps [start, stop) to (steps, keys), by step, then in order of first use; the first of its keys
            stands for a slice that has several.
        num_steps: Where the run ends; None for never.
        keys: First key of each slice.
        same: First key of the slice of each key.
    """

    sha256s: Sequence[str]
    sizes: Sequence[int]
    uses: UsesOf
    num_steps: int | None
    keys: Mapping[str, int]
    same: Sequence[int]

    @classmethod
    def of(
        cls, sha256s: Sequence[str] | NDArray[np.uint8], sizes: I64, uses: UsesOf, num_steps: int | None
    ) -> RunSlices:
        """From hex or uint8 [S, 32], and int64 [S]. Raises UsageError if their lengths differ."""
        names = [row if isinstance(row, str) else row.tobytes().hex() for row in sha256s]
        lengths: list[int] = np.asarray(sizes, np.int64).tolist()
        if len(names) != len(lengths):
            raise UsageError(f"slices: expected a size for each of {len(names)}, got {len(lengths)}.")
        keys: dict[str, int] = {}
        same = np.array([keys.setdefault(sha256, key) for key, sha256 in enumerate(names)], np.int64)

        def first_keys(start: int, stop: int) -> tuple[I64, I64]:
            steps, used = uses(start, stop)
            return steps, same[used]

        return cls(names, lengths, uses if len(keys) == len(same) else first_keys, num_steps, keys, same.tolist())

    def num_bytes(self) -> int:
        """Of all slices, each once."""
        return sum(self.sizes[key] for key in self.keys.values())

    def check(self, keep: str, budget_bytes: int) -> None:
        """Refuse what could never be brought. Raises UsageError."""
        if keep not in ("budget", "window", "all"):
            raise UsageError(f"keep: expected 'budget', 'window' or 'all', got {keep!r}.")
        largest = max(self.sizes, default=0)
        if part_bytes(largest) > budget_bytes:
            raise UsageError(
                f"cache: the largest slice takes {part_bytes(largest)} bytes as it is fetched, the budget is "
                f"{budget_bytes}. Raise the budget: to two slices at least, to fetch one while another is read."
            )
        whole = self.num_bytes() + part_bytes(largest) - largest
        if keep == "all" and whole > budget_bytes:
            raise UsageError(
                f"cache: to keep all slices takes {whole} bytes, the budget is {budget_bytes}. Raise the budget, or "
                "let the cache evict (keep='budget')."
            )
