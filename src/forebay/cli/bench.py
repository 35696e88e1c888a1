"""Commands that measure: `bench loader`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from forebay.cli.arguments import positive


def _bench_loader(args: argparse.Namespace) -> int:
    from forebay.load.sources import open_dataset
    from forebay.observe.bench import bench_loader, table

    report = bench_loader(
        open_dataset(args.dataset), args.seq_len, args.batch_size, rounds=args.rounds, max_steps=args.steps
    )
    print(json.dumps(report.to_json()) if args.json else table(report))
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
