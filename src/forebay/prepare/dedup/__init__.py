"""Deduplication of documents (exact, near by MinHash, or a method of your own), and of lines.

A text task signs its documents with a `Signer`, `deduplicate` compares all signatures in tasks of bounded memory, and
later tasks leave out what `DedupResult.drop` marks. `settings` and `methods` import no numba.
"""
