"""The same documents in each format: read in order, one read at random, size. `python -m benchmarks.formats -h`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.formats.figures import bench_formats, make_corpus, table
from forebay.cli.arguments import positive, size
from forebay.errors import UsageError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats", description=__doc__)
    parser.add_argument("--bytes", type=size, default=20_000_000, help="of text (default: 20MB)")
    parser.add_argument("--samples", type=positive, default=500, help="documents read at random (default: 500)")
    parser.add_argument("--rounds", type=positive, default=3, help="the best counts (default: 3)")
    parser.add_argument("--format", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--tmp-dir", type=Path, metavar="DIR", help="where the files go (default: the system's)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=args.tmp_dir) as folder:
        try:
            figures = bench_formats(
                Path(folder), args.bytes, samples=args.samples, rounds=args.rounds, only=args.format or ()
            )
        except UsageError as error:
            print(error, file=sys.stderr)
            return 2
    print(
        json.dumps([figure.to_json() for figure in figures])
        if args.json
        else table(figures, make_corpus(args.bytes).num_bytes)
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
