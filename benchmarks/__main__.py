"""Run every benchmark, or those named: `python -m benchmarks [order loader transfer prepare]`."""

from __future__ import annotations

import sys
from importlib import import_module

from benchmarks.measure import show

NAMES = ("order", "loader", "transfer", "prepare")


def main(names: list[str]) -> int:
    """Print one table of all figures."""
    unknown = set(names) - set(NAMES)
    if unknown:
        print(f"benchmarks: expected some of {', '.join(NAMES)}, got {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    figures = []
    for name in names or NAMES:
        print(f"measuring {name} …", file=sys.stderr)
        figures += import_module(f"benchmarks.{name}").measure()
    show("Forebay beside the bare yardsticks", figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
