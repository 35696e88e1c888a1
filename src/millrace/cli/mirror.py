"""`millrace mirror`: a dataset copied to a directory or a bucket of one's own."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.cli.arguments import positive
from millrace.sizes import words_of_bytes


def _mirror(args: argparse.Namespace) -> int:
    from millrace.observe.progress import bytes_bar
    from millrace.store.mirror import mirror
    from millrace.store.remote import open_remote
    from millrace.store.targets import open_target

    dataset = open_remote(args.source, dataset_id=args.id, identity=args.network)
    start, stop = args.slices or (0, dataset.num_slices)
    stop = dataset.num_slices if stop is None else stop
    temporary = (args.tmp_dir or Path(tempfile.gettempdir())) / f"millrace-mirror-{dataset.id[:16]}"
    target = open_target(args.target, temporary)
    total = int(dataset.table.bytes[start:stop].sum())
    try:
        with bytes_bar("mirror", total, enabled=not args.quiet) as advance:
            report = mirror(dataset, target, start=start, stop=stop, connections=args.connections, on_progress=advance)
    finally:
        target.close()
    if args.json:
        print(json.dumps(report.to_json()))
        return 0
    print(f"copied {report.copied:,} slices, {words_of_bytes(report.copied_bytes)}; {report.skipped:,} were there")
    if report.complete:
        print(f"ok: {report.target} is the dataset {report.id}")
    else:
        print(f"{report.missing:,} slices are still to be copied; then it gets its manifest")
    return 0


def _slices(text: str) -> tuple[int, int | None]:
    """`A:B`, from A until before B; either may be left out."""
    first, colon, last = text.partition(":")
    if not colon or not all(part == "" or part.isdigit() for part in (first, last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of slices: try 0:100")
    return int(first or 0), int(last) if last else None


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    del group
    p = verb("mirror", _mirror, "copy a dataset to a directory or a bucket; run it again to go on")
    p.add_argument("source", metavar="SRC", help="any URL of a dataset")
    p.add_argument("target", metavar="DST", help="a directory, s3://, r2://, gs:// or az://")
    p.add_argument("--slices", type=_slices, metavar="A:B", help="only these, from 0")
    p.add_argument("--id", help="the dataset's id: refuse any other")
    p.add_argument("--connections", type=positive, default=16)
    p.add_argument("--tmp-dir", type=Path, metavar="DIR", help="for slices on their way to a bucket")
    p.add_argument("--network", metavar="DIR", help="for millrace:// URLs: the node's directory")
    p.add_argument("--json", action="store_true")
    p.add_argument("--quiet", action="store_true")
