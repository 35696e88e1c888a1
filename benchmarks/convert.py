"""Tokens converted by `forebay convert`, beside pyarrow and safetensors: `python -m benchmarks.convert [FORMAT…]`.

CPU seconds for a GB of random tokens U16 in documents of 1000 tokens, in turns. Forebay reads its own
dataset, hashes every token, syncs files and reads the output again; the libraries write arrays that are in memory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from benchmarks.data import make_dataset
from benchmarks.measure import Figure, interleaved, median, show, working_folder
from forebay.convert import convert
from forebay.dataset.reader import open_dataset
from forebay.formats.conversion import ConvertOptions

SLICE_TOKENS = 4 << 20  # 8 MiB
FORMATS = ("megatron", "parquet", "forebay")


def measure(folder: Path, num_tokens: int, rounds: int, formats: Sequence[str] = FORMATS) -> list[Figure]:
    """The figures of each format."""
    dataset, out = (
        make_dataset(folder / "dataset", "benchmark", -(-num_tokens // SLICE_TOKENS), SLICE_TOKENS),
        folder / "out",
    )
    data = open_dataset(dataset)
    slices = [data.open_slice(index) for index in range(data.num_slices)]
    shards = [(np.array(item.tokens), np.array(item.document_ends)) for item in slices]
    num_tokens = sum(len(tokens) for tokens, _ in shards)

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)

    def write_parquet() -> None:
        clear()
        out.mkdir()
        for number, (tokens, document_ends) in enumerate(shards):
            rows = pa.ListArray.from_arrays(pa.array(np.append(0, document_ends).astype(np.int32)), pa.array(tokens))
            path = out / f"{number:05d}.parquet"
            pq.write_table(pa.table({"input_ids": rows}), path, compression="zstd", row_group_size=4096)

    def write_safetensors() -> None:
        clear()
        out.mkdir()
        for number, (tokens, document_ends) in enumerate(shards):
            save_file({"tokens": tokens, "document_ends": document_ends}, out / f"{number:05d}.safetensors")

    libraries: dict[str, tuple[str, Callable[[], None]]] = {
        "parquet": ("pyarrow", write_parquet),
        "forebay": ("safetensors", write_safetensors),
    }
    figures = []
    for name in formats:

        def ours(name: str = name) -> None:
            clear()
            convert(dataset, out, name, ConvertOptions())

        library, theirs = libraries.get(name, ("", None))
        costs = interleaved(rounds, ours, *([theirs] if theirs else []))
        cpu = [median([cost.cpu_s for cost in row]) / num_tokens * 5e8 for row in costs]
        figures.append(Figure(f"{name}: forebay convert", cpu[0], "CPU s/GB"))
        if theirs:
            figures.append(Figure(f"{name}: {library}", cpu[1], "CPU s/GB", f"forebay takes {cpu[0] / cpu[1]:.2f}x"))
    clear()
    return figures


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"{', '.join(FORMATS)} or any that is written")
    parser.add_argument("--tokens", type=float, default=100e6, help="(100e6)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    args = parser.parse_args(argv)
    with working_folder(None) as folder:
        figures = measure(folder, int(args.tokens), args.rounds, args.formats or FORMATS)
        show(f"convert: {args.tokens / 1e6:.0f} M tokens", figures)


if __name__ == "__main__":
    main(sys.argv[1:])
