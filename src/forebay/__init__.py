"""Forebay: raw text in, a GPU that never waits.

    batches = forebay.Loader("my-dataset", seq_len=2048, batch_size=8)

Importing this package imports nothing else of it but the error's root: each name is loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forebay.errors import ForebayError

if TYPE_CHECKING:
    from forebay.load.loader import Loader
    from forebay.load.packing import DocumentSubset
    from forebay.load.shards import SharedShardedDatasetManager
    from forebay.load.sources import Mixture, open_dataset
    from forebay.prepare.documents import text_filter
    from forebay.prepare.driver import prepare_dataset
    from forebay.stream.text_stream import TextStream

__version__ = "0.1.0"
__all__ = [
    "DocumentSubset",
    "ForebayError",
    "Loader",
    "Mixture",
    "SharedShardedDatasetManager",
    "TextStream",
    "__version__",
    "open_dataset",
    "prepare_dataset",
    "text_filter",
]  # fmt: skip

_HOME = {
    "DocumentSubset": "forebay.load.packing",
    "Loader": "forebay.load.loader",
    "Mixture": "forebay.load.sources",
    "SharedShardedDatasetManager": "forebay.load.shards",
    "TextStream": "forebay.stream.text_stream",
    "open_dataset": "forebay.load.sources",
    "prepare_dataset": "forebay.prepare.driver",
    "text_filter": "forebay.prepare.documents",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
