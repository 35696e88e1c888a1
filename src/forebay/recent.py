"""A dict that stays small: it forgets what was set longest ago."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentDict(OrderedDict[K, V]):
    """The `max_items` entries that were set last, the oldest first; setting an entry again renews it."""

    def __init__(self, max_items: int) -> None:
        super().__init__()
        self._max_items = max_items

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._max_items:
            self.popitem(last=False)
