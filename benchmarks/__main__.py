"""A summary of ratios, without peers: `python -m benchmarks [order loader transfer prepare]`."""

from __future__ import annotations

import sys
from importlib import import_module

from benchmarks.measure import show

PARTS = {
    "order": ("micro", "measure_order"),
    "loader": ("machine", "measure"),
    "transfer": ("transfer", "measure"),
    "prepare": ("prepare.whole", "measure_ours"),
}


def main(names: list[str]) -> int:
    """Print one table of all figures."""
    if unknown := set(names) - set(PARTS):
        print(f"benchmarks: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    figures = []
    for name in names or PARTS:
        print(f"measuring {name} …", file=sys.stderr)
        module, function = PARTS[name]
        figures += getattr(import_module(f"benchmarks.{module}"), function)()
    show("Forebay beside the bare yardsticks", figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
