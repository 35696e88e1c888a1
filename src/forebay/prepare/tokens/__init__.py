"""Kept text to slices: tokenizers and what runs them, subsets, the shuffle of all documents, slices, rows."""
