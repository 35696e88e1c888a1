"""The type of JSON objects, and the base class of what is closed."""

from abc import ABC, abstractmethod
from typing import Any, Self

Json = dict[str, Any]
"""A JSON object: manifests, messages and reports are made of them."""


class Closing(ABC):
    """Adds `with` to a class that has `close`."""

    @abstractmethod
    def close(self) -> None:
        """Free what the object holds. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
