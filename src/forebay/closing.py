"""Base class of what is closed at the end of a `with` block."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Adds `with` to a class that has `close`."""

    @abstractmethod
    def close(self) -> None:
        """Free what the object holds. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
