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
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.loading import corpus, documents, fleet, parts
from benchmarks.loading.peers import PEERS
from benchmarks.measure import Figure, show, working_folder

PARTS = ("speed", "torch", "cold", "resume", "elastic", "documents")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *PARTS], help=", ".join(PARTS))
    parser.add_argument("--tokens", type=float, default=200e6, help="of the corpus (200e6)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured, in turns (5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, for speeds (2)")
    parser.add_argument("--peers", default=",".join(PEERS), help="names, by commas")
    parser.add_argument("--folder", type=Path, help="keep the corpus and the peers' formats here (a temporary folder)")
    args = parser.parse_args(argv)
    args.peers = args.peers.split(",")
    if unknown := set(args.peers) - set(PEERS):
        parser.error(f"--peers: expected some of {', '.join(PEERS)}; got {', '.join(unknown)}")
    return args


def main(argv: Sequence[str]) -> int:
    """Write the formats, measure the requested parts, print a table of each."""
    args = parse_arguments(argv)
    with working_folder(args.folder) as folder:
        large, names = folder / f"corpus-{int(args.tokens)}", []
        scratch, small = folder / "scratch", folder / "elastic"
        scratch.mkdir(exist_ok=True)
        if args.parts != ["documents"]:
            fleet.install("loaders")
            corpus.make(large, int(args.tokens) // corpus.SEQ_LEN)
            names = list(fleet.prepare(args.peers, large))

        def measure_elastic() -> list[Figure]:
            corpus.make(small, parts.NUM_SAMPLES)
            return parts.measure_elastic(small, list(fleet.prepare(names, small)), scratch)

        def measure_documents() -> list[Figure]:
            data = documents.write(folder / f"documents-{int(args.tokens)}", int(args.tokens))
            return documents.measure(data, args.rounds, args.seconds)

        measures: dict[str, Callable[[], list[Figure]]] = {
            "speed": lambda: parts.measure_speed(large, names, args.rounds, args.seconds),
            "torch": lambda: parts.measure_speed(large, names, args.rounds, args.seconds, workers=2),
            "cold": lambda: parts.measure_cold(large, names, args.rounds),
            "resume": lambda: parts.measure_resume(large, names, args.rounds, scratch),
            "elastic": measure_elastic,
            "documents": measure_documents,
        }
        for name in args.parts or PARTS:
            started = time.perf_counter()
            figures = measures[name]()
            show(f"{name}: {args.tokens / 1e6:.0f} M tokens, seq_len {corpus.SEQ_LEN}, batch 8, shuffled", figures)
            print(f"({name}: {time.perf_counter() - started:.0f} s, {time.strftime('%Y-%m-%d')})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
