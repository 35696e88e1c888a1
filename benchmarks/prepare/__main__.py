"""Every part of preparation beside its peers, and in the end one table of ratios beside what they should be.

    python -m benchmarks.prepare [whole] [filters] [dedup] [copies] [decontaminate] [tokens] [clean]
        [personal_data] [language] [leftovers] [extract]

Without names all, in a quarter of an hour on two cores. Peers run with the interpreter in FOREBAY_PEERS; without it
scripts/peers.sh makes .venv-peers. Real text is found by FOREBAY_TEST_DATA.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.measure import Figure

ROOT = Path(__file__).resolve().parents[2]
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


def prepare_peers() -> None:
    """Make the peers' environment, unless one is named."""
    if "FOREBAY_PEERS" in os.environ:
        return
    folder = ROOT / ".venv-peers"
    result = subprocess.run(["bash", str(ROOT / "scripts/peers.sh")], env={**os.environ, "PEERS": str(folder)})
    if result.returncode:
        print("benchmarks: the peers could not be installed; what needs them is left out", file=sys.stderr)
    os.environ["FOREBAY_PEERS"] = str(folder / "bin/python")


def parts() -> dict[str, Callable[[], Sequence[Figure]]]:
    """What can be measured, by name. Imported late: the modules read FOREBAY_PEERS when they are."""
    from benchmarks.prepare import (
        clean,
        copies,
        decontaminate,
        dedup,
        extract,
        filters,
        language,
        leftovers,
        personal_data,
        tokens,
        whole,
    )  # fmt: skip

    def plain(main: Callable[[], object]) -> Callable[[], Sequence[Figure]]:
        def run() -> Sequence[Figure]:
            main()
            return []

        return run

    return {
        "whole": whole.measure,
        "filters": filters.measure,
        "dedup": dedup.measure,
        "decontaminate": decontaminate.measure,
        "tokens": lambda: tokens.measure(rounds=2),
        "clean": plain(clean.main),
        "copies": plain(copies.main),
        "personal_data": plain(personal_data.main),
        "language": language.measure,
        "leftovers": plain(leftovers.main),
        "extract": plain(extract.main),
    }


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
    prepare_peers()
    available = parts()
    if unknown := [name for name in names if name not in available]:
        print(f"benchmarks: expected {', '.join(available)}; got {', '.join(unknown)}", file=sys.stderr)
        return 2
    figures: list[Figure] = []
    for name in names or available:
        started = time.perf_counter()
        print(f"\n== {name}", flush=True)
        figures += available[name]()
        print(f"({name}: {time.perf_counter() - started:.0f} s)", flush=True)
    if figures:
        print_table(figures)
    return int(any(figure.value < TARGETS.get(figure.name, 0) for figure in figures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
