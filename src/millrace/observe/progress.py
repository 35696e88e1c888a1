"""Progress bars for long work, on stderr; silent where there is no terminal and nobody would look."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tqdm import tqdm


class StageProgress(Protocol):
    """How far one stage has come; `total` may grow while the stage finds more to do."""

    @property
    def stage(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def unit(self) -> str: ...


@contextmanager
def bytes_bar(label: str, total: int | None, *, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes (None: not known); yields a function that takes the bytes done since its last call."""

    def advance(delta: int) -> None:
        bar.update(delta)

    with _bar(label, total, "B", enabled) as bar:
        yield advance


class PrepareBar:
    """One bar a stage of `prepare`, made when the stage first reports."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._bars: dict[str, Any] = {}

    def __enter__(self) -> PrepareBar:
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self._bars.values():
            bar.close()

    def update(self, progress: StageProgress) -> None:
        bar = self._bars.get(progress.stage)
        if bar is None:
            bar = self._bars[progress.stage] = _bar(progress.stage, progress.total, progress.unit, self._enabled)
        bar.total = progress.total
        bar.update(progress.done - bar.n)


def _bar(label: str, total: int | None, unit: str, enabled: bool) -> Any:
    return tqdm(
        total=total,
        desc=f"{label:<10}",
        unit=unit,
        unit_scale=True,
        unit_divisor=1000,
        file=sys.stderr,
        disable=not enabled or not sys.stderr.isatty(),
        leave=True,
    )
