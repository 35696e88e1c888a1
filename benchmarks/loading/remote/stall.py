"""A trainer that needs half, or four fifths, of what the origin gives: how much of its time it waits for data.

Steps are slept. Waits are those for slices on their way; the making of batches is told apart, as are the first
seconds, in which all lanes open: no order of fetching makes these faster than the origin.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.loading.remote.task import Task
from benchmarks.measure import Figure, median
from benchmarks.server_process import ServerProcess
from forebay.load.resources import RunSpec, needs_of_nodes

RATE = 100e6
LANES = 4
BEGIN_S = 3.0
LOADER = {"seq_len": 2048, "batch_size": 64, "lanes": LANES, "seed": 1}


def open_windows_bytes(folder: Path) -> int:
    """The bytes that the lanes' windows have open at once."""
    import forebay

    loader = forebay.Loader(folder, seq_len=2048, batch_size=64, seed=1, order=forebay.OrderOptions(lanes=LANES))
    table, order = loader.dataset.table, loader.order
    spec = RunSpec(table.bytes, order.samples_per_slice, order.global_batch, chunk_bytes=table.chunk_bytes, lanes=LANES)
    return needs_of_nodes(spec, order)[0].open_bytes


def measure(folder: Path, scratch: Path, rounds: int, steps: int) -> list[Figure]:
    """The figures. Args: `steps` of each run."""
    cache = scratch / "cache"
    need = open_windows_bytes(folder)
    slice_bytes = max(path.stat().st_size for path in folder.glob("*.safetensors")) + 16
    budgets = {f"open windows + {n} slices": need + n * slice_bytes for n in (1, 3, 6)}
    budgets["2x the windows"] = 2 * need
    runs: dict[tuple[str, float], list[dict[str, float]]] = {}
    with ServerProcess(folder.parent, "bucket") as served:
        for _ in range(rounds):
            for name, budget in budgets.items():
                for share in (0.5, 0.8):
                    shutil.rmtree(cache, ignore_errors=True)
                    served.limit(bytes_per_s=RATE)
                    loader = LOADER | {"cache_bytes": budget, "steps": steps}
                    answer = Task(
                        "steps", served.environment, url=f"{served.s3_url}/{folder.name}", cache=str(cache),
                        loader=loader, bytes_per_s=share * RATE,
                    ).ready().begin().result()  # fmt: skip
                    late = [wait for time_s, wait in answer["waits"] if time_s >= BEGIN_S]
                    runs.setdefault((name, share), []).append(
                        {
                            "share": sum(late) / (answer["elapsed_s"] - BEGIN_S),
                            "begin_s": sum(wait for time_s, wait in answer["waits"] if time_s < BEGIN_S),
                            "longest_s": max(late, default=0.0),
                            "made": answer["made_s"] / answer["elapsed_s"],
                            "again": answer["refetched_chunks"],
                            "seconds": answer["elapsed_s"],
                        }
                    )
    figures = []
    for (name, share), mine in runs.items():
        middle = {key: median([run[key] for run in mine]) for key in mine[0]}
        detail = (
            f"longest {middle['longest_s']:.3f} s; {middle['begin_s']:.2f} s in the first {BEGIN_S:.0f} s; "
            f"{middle['again']:.0f} fetched again; making batches {middle['made']:.1%} "
            f"of {middle['seconds']:.0f} s; {budgets[name] / 1e6:.0f} MB"
        )
        figures.append(Figure(f"{share:.0%} of the bandwidth, {name}", 100 * middle["share"], "% waiting", detail))
    return figures
