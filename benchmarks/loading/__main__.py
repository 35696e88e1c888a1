"""The loader beside its peers: `python -m benchmarks.loading [PART…]`.

    speed    tokens a second in one process
    torch    the same with two helper processes: torch's DataLoader, or the peer's own
    cold     from starting an interpreter to the first batch
    resume   a state loaded in mid-epoch by a fresh process
    elastic  a change of world size in mid-epoch
    documents  our loader alone: document masks, packing and a filter beside the default

All parts by default: half an hour for 200 M tokens on two cores. scripts/peers.sh loaders installs the peers in
.venv-peers-loaders; set FOREBAY_LOADER_PEERS to use another folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.loading import cold, corpus, documents, elastic, fleet, peers, resume, speed
from benchmarks.measure import Figure, show, working_folder

PARTS = ("speed", "torch", "cold", "resume", "elastic", "documents")


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--tokens", type=float, default=200e6, help="of the corpus (200e6)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured, in turns (5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, for speeds (2)")
    parser.add_argument("--peers", default=",".join(peers.NAMES), help="names, by commas")
    parser.add_argument("--folder", type=Path, help="keep the corpus and the peers' formats here (a temporary folder)")
    args = parser.parse_args(argv)
    args.peers = args.peers.split(",")
    for what, names, allowed in (("part", args.parts, PARTS), ("peer", args.peers, peers.NAMES)):
        if unknown := [name for name in names if name not in allowed]:
            parser.error(f"{what}: expected {', '.join(allowed)}; got {', '.join(unknown)}")
    args.parts = args.parts or list(PARTS)
    return args


def prepare_peers() -> None:
    """Install the peers, unless FOREBAY_LOADER_PEERS names their folder."""
    if "FOREBAY_LOADER_PEERS" not in os.environ:
        result = subprocess.run(["bash", str(fleet.ROOT / "scripts/peers.sh"), "loaders"], cwd=fleet.ROOT)
        if result.returncode:
            print("benchmarks: not all peers could be installed; those are left out", file=sys.stderr)


def measure(ask: argparse.Namespace, folder: Path) -> None:
    """Write the formats, measure the parts, print a table of each."""
    large, entries = folder / f"corpus-{int(ask.tokens)}", []
    if ask.parts != ["documents"]:
        prepare_peers()
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
        "documents": lambda: documents.measure(
            documents.write(folder / f"documents-{int(ask.tokens)}", int(ask.tokens)), ask.rounds, ask.seconds
        ),
    }
    for name in ask.parts:
        started = time.perf_counter()
        figures = parts[name]()
        title = f"{name}: {ask.tokens / 1e6:.0f} M tokens, seq_len {corpus.SEQ_LEN}, batch 8, shuffled"
        if name == "elastic":
            title = f"elastic: {elastic.NUM_SAMPLES} samples, global batch {elastic.GLOBAL_BATCH}, shuffled"
        show(title, figures)
        print(f"({name}: {time.perf_counter() - started:.0f} s, {time.strftime('%Y-%m-%d')})", flush=True)


def main(argv: Sequence[str]) -> int:
    """Run the requested parts."""
    ask = arguments(argv)
    with working_folder(ask.folder) as folder:
        measure(ask, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
