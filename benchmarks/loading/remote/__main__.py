"""The loader from a remote origin: `python -m benchmarks.loading.remote [PART…]`.

    throughput  an epoch through 256 MB of cache beside a plain parallel download
    moto        the same from moto's S3 server, if there is one, 256 MB
    first       the first batch, beside the peers' (scripts/peers.sh loaders)
    resume      going on in mid-epoch
    stall       a trainer that needs half, or four fifths, of the origin's bandwidth

The origin is the tests' server, with S3's dialect, on this machine. Without names all: a quarter of an hour; 5 GB.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.loading import corpus, fleet
from benchmarks.loading.remote import first, peers, resume, stall, throughput
from benchmarks.measure import Figure, show, working_folder
from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_token_slice

PARTS = ("throughput", "moto", "first", "resume", "stall")
_SLICE_TOKENS = 4 << 20  # 8 MiB
_FIRST_SLICES = 16
_MOTO_SLICES = 32


def make_slices(folder: Path, num_slices: int) -> Path:
    """A dataset of random tokens in slices of 8 MiB; an old one of as many slices is used again."""
    data = folder / f"slices-{num_slices}"
    if not (data / "manifest.json").exists():
        data.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        document_ends = np.append(np.arange(1000, _SLICE_TOKENS, 1000, dtype=np.uint64), np.uint64(_SLICE_TOKENS))
        for i in range(num_slices):
            tokens = rng.integers(0, corpus.VOCABULARY, _SLICE_TOKENS, dtype=np.uint16)
            write_token_slice(data / f"{i:06d}.safetensors", tokens, document_ends)
        import_slices(data, "benchmark")
    return data


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *PARTS], help=", ".join(PARTS))
    parser.add_argument("--slices", type=int, default=240, help="of 8 MiB (240: 2 GB)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured, in turns (3)")
    parser.add_argument("--rates", default="0,100,200", help="MB/s of the origin, for throughput; 0: no limit")
    parser.add_argument("--peers", default=",".join(peers.NAMES), help="for first, by commas")
    parser.add_argument("--worlds", default="1,4", help="processes, for first")
    parser.add_argument("--folder", type=Path, help="keep what is written here (a temporary folder)")
    args = parser.parse_args(argv)
    args.parts = args.parts or list(PARTS)
    return args


def measure(part: str, ask: argparse.Namespace, folder: Path, scratch: Path) -> list[Figure]:
    """One part's figures."""
    if part == "first":
        large = folder / "first"
        corpus.make(large, _FIRST_SLICES * corpus.SHARD_BYTES // (2 * corpus.SEQ_LEN))
        names = [name for name in ask.peers.split(",") if name]
        fleet.prepare(["forebay", *names], large)
        return first.measure(large, scratch, ask.rounds, names, [int(world) for world in ask.worlds.split(",")])
    if part == "moto":
        return throughput.measure_moto(make_slices(folder, _MOTO_SLICES), scratch, ask.rounds)
    data = make_slices(folder, ask.slices)
    if part == "throughput":
        return throughput.measure(data, scratch, ask.rounds, [1e6 * float(rate) for rate in ask.rates.split(",")])
    if part == "resume":
        return resume.measure(data, scratch, ask.rounds)
    return stall.measure(data, scratch, ask.rounds, steps=ask.slices * 20)


def main(argv: Sequence[str]) -> int:
    """Run the requested parts."""
    ask = arguments(argv)
    with working_folder(ask.folder) as folder:
        scratch = folder / "scratch"
        scratch.mkdir(exist_ok=True)
        for part in ask.parts:
            began = time.perf_counter()
            figures = measure(part, ask, folder, scratch)
            show(f"remote, {part}", figures)
            print(f"({part}: {time.perf_counter() - began:.0f} s, {time.strftime('%Y-%m-%d')})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
