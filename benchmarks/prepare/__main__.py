"""Every part of preparation beside its peers, and in the end one table of ratios beside what they should be.

    python -m benchmarks.prepare [whole filters dedup decontaminate tokens clean personal_data language leftovers
        extract]

Without names all, in a quarter of an hour on two cores. Peers run with the interpreter in FOREBAY_PEERS; without it
scripts/peers.sh makes .venv-peers. Real text is found by FOREBAY_TEST_DATA.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module

from benchmarks.loading.fleet import ROOT, install
from benchmarks.measure import Figure

PARTS = (
    "whole", "filters", "dedup", "decontaminate", "tokens", "clean", "personal_data", "language", "leftovers",
    "extract",
)  # fmt: skip
TARGETS = {
    "Gopher filters / datatrove": 10.0,
    "Gopher decisions alike": 99.5,
    "MinHash / datasketch": 20.0,
    "MinHash / rensa": 1.0,
    "MinHash / rensa, hashes given": 1.0,
    "forebay / datatrove": 5.0,
    "forebay, tokenizers as coder / datatrove": 5.0,
    "language / fastText library": 2.0,
    "contaminated found": 100.0,
    "decontaminate / datatrove": 25.0,
    "encode / tokenizers": 0.9,
    "encode, tokenizers as coder / tokenizers": 0.9,
}
"""At least."""


def print_table(figures: Sequence[Figure]) -> None:
    """The ratios, and whether each reaches its target."""
    width = max(len(figure.name) for figure in figures)
    print(f"\n{'In the end':<{width + 2}}{'measured':>10} {'unit':<10}{'target':>10}")
    for figure in figures:
        target = TARGETS.get(figure.name)
        verdict = f"{target:>10g}  {'reached' if figure.value >= target else 'MISSED'}" if target else f"{'':>10}"
        print(f"  {figure.name:<{width}}{figure.value:>10.4g} {figure.unit:<10}{verdict}  {figure.detail}".rstrip())


def main(names: Sequence[str]) -> int:
    """Measure, and print the table; 1 if a target is missed, 2 for a name that is none."""
    if unknown := [name for name in names if name not in PARTS]:
        print(f"benchmarks: expected {', '.join(PARTS)}; got {', '.join(unknown)}", file=sys.stderr)
        return 2
    install("prepare", "FOREBAY_PEERS")
    os.environ.setdefault("FOREBAY_PEERS", str(ROOT / ".venv-peers/bin/python"))
    figures: list[Figure] = []
    for name in names or PARTS:
        started = time.perf_counter()
        print(f"\n== {name}", flush=True)
        figures += import_module(f"benchmarks.prepare.{name}").measure()
        print(f"({name}: {time.perf_counter() - started:.0f} s)", flush=True)
    if figures:
        print_table(figures)
    return int(any(figure.value < TARGETS.get(figure.name, 0) for figure in figures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
