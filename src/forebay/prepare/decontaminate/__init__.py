"""Finds documents that hold instances of evaluation sets."""
