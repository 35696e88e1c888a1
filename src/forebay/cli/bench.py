"""Commands that measure: `bench loader`, `bench formats`."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.cli.arguments import positive, size


def _bench_loader(args: argparse.Namespace) -> int:
    from forebay.load.sources import open_dataset
    from forebay.observe.bench import bench_loader, table

    report = bench_loader(
        open_dataset(args.dataset), args.seq_len, args.batch_size, rounds=args.rounds, max_steps=args.steps
    )
    print(json.dumps(report.to_json()) if args.json else table(report))
    return 0


def _bench_formats(args: argparse.Namespace) -> int:
    from forebay.observe.formats_bench import bench_formats, make_corpus, table

    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=args.tmp_dir) as folder:
        figures = bench_formats(
            Path(folder), args.bytes, samples=args.samples, rounds=args.rounds, only=args.format or ()
        )
    if args.json:
        print(json.dumps([one.to_json() for one in figures]))
    else:
        print(table(figures, make_corpus(args.bytes).num_bytes))
    return 0


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    benches = group("bench", "measure on this machine")
    p = verb("loader", _bench_loader, "this machine's limits, and what the loader reaches of them", benches)
    p.add_argument("dataset", help="a local dataset")
    p.add_argument("--seq-len", type=positive, default=2048, help="tokens a sample")
    p.add_argument("--batch-size", type=positive, default=8, help="samples a step")
    p.add_argument("--steps", type=positive, default=2000, help="steps of a round (default: 2000)")
    p.add_argument("--rounds", type=positive, default=3, help="the median counts")
    p.add_argument("--json", action="store_true")

    p = verb("formats", _bench_formats, "the same documents in each format: read, read at random, size", benches)
    p.add_argument("--bytes", type=size, default=20_000_000, help="of text (default: 20MB)")
    p.add_argument("--samples", type=positive, default=500, help="documents read at random (default: 500)")
    p.add_argument("--rounds", type=positive, default=3, help="the best counts")
    p.add_argument("--format", action="append", metavar="NAME", help="only this one; may be repeated")
    p.add_argument("--tmp-dir", type=Path, metavar="DIR", help="where the files go (default: the system's)")
    p.add_argument("--json", action="store_true")
