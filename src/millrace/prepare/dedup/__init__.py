"""Which documents are copies of others: exact, by paragraph or line, and near ones by MinHash.

A text task signs its documents with a `Signer`; `deduplicate` compares all parts' signatures in tasks of bounded
memory; whoever reads the parts again leaves out what `DedupResult.drop` marks and cuts with a `Cutter`.
`store_signatures` keeps what later data is compared against.
"""

from millrace.prepare.dedup.config import Dedup
from millrace.prepare.dedup.corpus import DedupResult, Flags, Mapper, Part, deduplicate
from millrace.prepare.dedup.cut import Cutter
from millrace.prepare.dedup.signer import Signer
from millrace.prepare.dedup.store import store_signatures

__all__ = [
    "Cutter",
    "Dedup",
    "DedupResult",
    "Flags",
    "Mapper",
    "Part",
    "Signer",
    "deduplicate",
    "store_signatures",
]
