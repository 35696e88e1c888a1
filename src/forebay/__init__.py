"""Forebay: raw text in, a GPU that never waits.

    batches = forebay.Loader("my-dataset", seq_len=2048, batch_size=8)

Importing this package imports nothing else of it but the error's root: each name is loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forebay.errors import ForebayError, package_for

if TYPE_CHECKING:
    from forebay import callbacks
    from forebay.load.batch import RowBatch, TokenBatch
    from forebay.load.loader import Loader
    from forebay.load.options import CacheOptions, NetworkOptions, OrderOptions, SampleOptions
    from forebay.load.packing import DocumentSubset
    from forebay.load.shards import SharedShardedDatasetManager
    from forebay.load.sources import Mixture, open_dataset
    from forebay.observe.dashboard import serve_dashboard
    from forebay.prepare.documents import text_filter
    from forebay.prepare.driver import prepare_dataset
    from forebay.stream.text_stream import TextStream

__version__ = "0.1.0"
__all__ = [
    "CacheOptions",
    "DocumentSubset",
    "ForebayError",
    "Loader",
    "Mixture",
    "NetworkOptions",
    "OrderOptions",
    "RowBatch",
    "SampleOptions",
    "SharedShardedDatasetManager",
    "TextStream",
    "TokenBatch",
    "__version__",
    "callbacks",
    "open_dataset",
    "prepare_dataset",
    "serve_dashboard",
    "text_filter",
]  # fmt: skip

_HOME = dict(
    line.split()
    for line in """\
CacheOptions forebay.load.options
DocumentSubset forebay.load.packing
Loader forebay.load.loader
Mixture forebay.load.sources
NetworkOptions forebay.load.options
OrderOptions forebay.load.options
RowBatch forebay.load.batch
SampleOptions forebay.load.options
SharedShardedDatasetManager forebay.load.shards
TextStream forebay.stream.text_stream
TokenBatch forebay.load.batch
callbacks forebay.callbacks
formats forebay.formats
open_dataset forebay.load.sources
prepare_dataset forebay.prepare.driver
serve_dashboard forebay.observe.dashboard
text_filter forebay.prepare.documents""".splitlines()
)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    with package_for(f"forebay.{name}"):
        module = import_module(_HOME[name])
    value = getattr(module, name, module)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
