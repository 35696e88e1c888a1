"""Which documents are copies of others: exact, by paragraph or line, and near ones by MinHash.

A text task signs its documents with a `Signer`; `deduplicate` compares all parts' signatures in tasks of bounded
memory; whoever reads the parts again leaves out what `DedupResult.drop` marks and cuts with a `Cutter`.
`store_signatures` keeps what later data is compared against.

`config` holds the settings alone: the compiled loops need numba, which preparation without deduplication does without.
"""
