"""Preparation beside its peers: `python -m benchmarks.prepare [NAME…]`; each part is a program of its own as well."""

from __future__ import annotations

from benchmarks.measure import Figure


def measure() -> list[Figure]:
    """What `python -m benchmarks prepare` prints: the whole of preparation beside the tokenizer alone."""
    from benchmarks.prepare.alone import measure as alone

    return alone()
