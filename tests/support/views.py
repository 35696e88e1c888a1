"""Views of a run, as a loader records them."""

from typing import Any


def view(moment: float, rank: int = 0, **parts: Any) -> dict:
    row = {"name": f"rank {rank}", "wait_shares": {"network": 0.1 * (rank + 1)}}
    figures = {"throughput": [100.0 * (rank + 1), "tokens/s"], "waiting": [0.1, "share"]}
    return {
        "version": 1, "kind": "loader", "title": "run", "state": "working", "at": moment, "workers": [row],
        "figures": figures, **parts,
    }  # fmt: skip
