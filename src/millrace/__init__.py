"""Millrace: raw text in, a GPU that never waits out.

    batches = millrace.Loader("my-dataset", seq_len=2048, batch_size=8)

Importing this package imports nothing else of it but the error's root: each name is loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from millrace.errors import MillraceError

if TYPE_CHECKING:
    from millrace.load.loader import Loader
    from millrace.load.packing import DocumentFilter
    from millrace.load.shards import SharedShardedDatasetManager
    from millrace.load.sources import Mixture, open_dataset
    from millrace.stream.text_stream import TextStream

__version__ = "0.1.0"
__all__ = [
    "DocumentFilter", "Loader", "MillraceError", "Mixture", "SharedShardedDatasetManager", "TextStream", "__version__",
    "open_dataset",
]  # fmt: skip

_HOME = {
    "DocumentFilter": "millrace.load.packing",
    "Loader": "millrace.load.loader",
    "Mixture": "millrace.load.sources",
    "SharedShardedDatasetManager": "millrace.load.shards",
    "TextStream": "millrace.stream.text_stream",
    "open_dataset": "millrace.load.sources",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'millrace' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
