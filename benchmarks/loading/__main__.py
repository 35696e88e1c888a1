"""The loader beside its peers, and in the end one table: `python -m benchmarks.loading [PART…]`.

    speed    tokens a second in one process
    torch    the same with two helper processes: torch's DataLoader, or what the peer has in its place
    cold     from starting an interpreter to the first batch
    resume   going on in mid-epoch in a fresh process
    elastic  another world size in mid-epoch

Without names all: half an hour for the 200 M tokens on two cores. scripts/peers.sh loaders makes the peers'
environments in .venv-peers-loaders, or where FOREBAY_LOADER_PEERS says.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.loading import cold, corpus, elastic, fleet, peers, resume, speed
from benchmarks.measure import Figure, show

PARTS = ("speed", "torch", "cold", "resume", "elastic")


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--tokens", type=float, default=200e6, help="of the corpus (200e6)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured, in turns (5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, for speeds (2)")
    parser.add_argument("--peers", default=",".join(peers.NAMES), help="names, by commas")
    parser.add_argument("--folder", type=Path, help="keep the corpus and the peers' formats here (a temporary folder)")
    found = parser.parse_args(given)
    found.peers = found.peers.split(",")
    for what, names, known in (("part", found.parts, PARTS), ("peer", found.peers, peers.NAMES)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"{what}: expected {', '.join(known)}; got {', '.join(unknown)}")
    found.parts = found.parts or list(PARTS)
    return found


def prepare_peers() -> None:
    """Make the peers' environments, unless a place of them is named."""
    if "FOREBAY_LOADER_PEERS" not in os.environ:
        made = subprocess.run(["bash", str(fleet.ROOT / "scripts/peers.sh"), "loaders"], cwd=fleet.ROOT)
        if made.returncode:
            print("benchmarks: not all peers could be installed; those are left out", file=sys.stderr)


@contextlib.contextmanager
def place(folder: Path | None) -> Iterator[Path]:
    """The folder that is named, or one that goes afterwards."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="forebay-loading-") as name:
        yield Path(name)


def measure(ask: argparse.Namespace, folder: Path) -> None:
    """Write the formats, measure the parts, print a table of each."""
    large = folder / f"corpus-{int(ask.tokens)}"
    corpus.make(large, int(ask.tokens) // corpus.SEQ_LEN)
    entries = fleet.prepare(ask.peers, large)
    for entry in (entry for entry in entries if not entry.failed):
        print(f"  {entry.label}: {entry.versions}, {entry.stored_bytes / 1e6:.0f} MB", flush=True)
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)

    def changed() -> list[Figure]:
        small = folder / "elastic"
        corpus.make(small, elastic.NUM_SAMPLES)
        asked = [entry.name for entry in entries if entry.elastic]
        written = {entry.name: entry for entry in fleet.prepare(asked, small)}
        return elastic.measure(small, [written.get(entry.name, entry) for entry in entries], scratch)

    parts: dict[str, Callable[[], list[Figure]]] = {
        "speed": lambda: speed.measure(large, entries, ask.rounds, ask.seconds),
        "torch": lambda: speed.measure(large, entries, ask.rounds, ask.seconds, workers=2),
        "cold": lambda: cold.measure(large, entries, ask.rounds),
        "resume": lambda: resume.measure(large, entries, ask.rounds, scratch),
        "elastic": changed,
    }
    for name in ask.parts:
        begun = time.perf_counter()
        figures = parts[name]()
        title = f"{name}: {ask.tokens / 1e6:.0f} M tokens, seq_len {corpus.SEQ_LEN}, batch 8, shuffled"
        if name == "elastic":
            title = f"elastic: {elastic.NUM_SAMPLES} samples, global batch {elastic.GLOBAL_BATCH}, shuffled"
        show(title, [figure for figure in figures if not math.isnan(figure.value)])
        for figure in figures:
            if math.isnan(figure.value):
                print(f"  {figure.name}: {figure.note}")
        print(f"({name}: {time.perf_counter() - begun:.0f} s, {time.strftime('%Y-%m-%d')})", flush=True)


def main(given: Sequence[str]) -> int:
    """Measure what was asked for."""
    ask = arguments(given)
    prepare_peers()
    with place(ask.folder) as folder:
        measure(ask, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
