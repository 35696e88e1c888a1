"""Which documents are copies of others: exact, by paragraph or line, and near ones by MinHash.

A text task signs its documents with a `Signer`; `deduplicate` compares all parts' signatures in tasks of bounded
memory; whoever reads the parts again leaves out what `DedupResult.drop` marks and cuts with a `Cutter`.
`store_signatures` keeps what later data is compared against.

All but the settings is imported when it is first asked for: the compiled loops need numba, which preparation without
deduplication does without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forebay.prepare.dedup.config import Dedup

if TYPE_CHECKING:
    from forebay.prepare.dedup.corpus import (
        Cutter,
        DedupResult,
        Flags,
        Mapper,
        Part,
        deduplicate,
        find_stored,
        store_signatures,
    )
    from forebay.prepare.dedup.signer import Signer

__all__ = [
    "Cutter", "Dedup", "DedupResult", "Flags", "Mapper", "Part", "Signer", "deduplicate", "find_stored",
    "store_signatures",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'signer' if name == 'Signer' else 'corpus'}"), name)
