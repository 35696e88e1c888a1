"""Streaming a hub's dataset, beside Hugging Face `datasets`: `python -m benchmarks.hub [PART…]`.

    stream  the first batch from process start, text MB/s after it, what was fetched, CPU s for a GB of text;
            at full speed, with 30 ms before each answer, and at 50 MB/s for all connections together
    resume  a state saved in mid-epoch: how soon a fresh process goes on, and whether with the same batches
    ranks   four files for 2 and for 6 ranks: what each rank is given, and what it fetches

The hub is the tests' server, on this machine; the repository is written from a seed. scripts/peers.sh interop makes
the environment of `datasets` in .venv-peers-loaders/hf, or where FOREBAY_LOADER_PEERS says. About ten minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.hub import corpus, parts
from benchmarks.measure import show, working_folder
from benchmarks.server_process import ServerProcess

PARTS = ("stream", "resume", "ranks")


def arguments(arguments_list: Sequence[str]) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *PARTS], help=", ".join(PARTS))
    parser.add_argument("--files", type=int, default=8, help="of the repository (8)")
    parser.add_argument("--mb", type=int, default=60, help="of text in each file (60); about 0.6 of it as Parquet")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured, in turns (3)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of streaming after the first batch (6)")
    parser.add_argument("--subjects", default="stream,datasets,guide,datasets+,collected", help="for stream, by commas")
    parser.add_argument("--networks", default=",".join(parts.NETWORKS), help="for stream, by commas")
    parser.add_argument("--folder", type=Path, help="keep the repository here (a temporary folder)")
    args = parser.parse_args(arguments_list)
    args.parts = args.parts or list(PARTS)
    return args


def main(arguments_list: Sequence[str]) -> int:
    """Run the requested parts."""
    ask = arguments(arguments_list)
    with working_folder(ask.folder) as folder:
        for part in ask.parts:
            began = time.perf_counter()
            files, size = (4, 4_000_000) if part == "ranks" else (ask.files, ask.mb * 1_000_000)
            directory = corpus.make_hub(folder, files, size)
            stored = sum(path.stat().st_size for path in directory.rglob("*.parquet"))
            print(
                f"{part}: {files} Parquet files, {stored / 1e6:.0f} MB, {files * size / 1e6:.0f} MB of text", flush=True
            )
            with ServerProcess(directory, "hub") as hub:
                measured = {"stream": parts.stream, "resume": parts.resume, "ranks": parts.ranks}[part]
                for title, figures in measured(hub, folder, ask):
                    show(title, figures)
                    sys.stdout.flush()
            print(f"({part}: {time.perf_counter() - began:.0f} s, {time.strftime('%Y-%m-%d')})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
