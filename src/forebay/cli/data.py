"""Commands on data: inspect, verify, adopt, demo."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import show, size

if TYPE_CHECKING:
    from forebay.dataset.reader import VerifyReport


def _inspect(args: argparse.Namespace) -> int:
    from forebay.load.sources import open_dataset

    show(open_dataset(args.dataset, args.network).describe(), args.json)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from forebay.observe.progress import bytes_bar

    with bytes_bar("verify", None, enabled=not args.quiet) as advance:
        report = _verify_where_it_lies(args, advance)
    if args.json:
        print(json.dumps({"ok": report.ok, "bad": report.bad}))
    elif report.ok:
        print(f"ok: every file of {args.dataset} matches its hash")
    else:
        for name in report.bad:
            print(f"bad: {name}")
        print("Fetch or prepare these again; until then nothing should train on this dataset.", file=sys.stderr)
    return 0 if report.ok else 1


def _verify_where_it_lies(args: argparse.Namespace, advance: Callable[[int], None]) -> VerifyReport:
    """A directory of ours by its files, so that a damaged manifest is named; anything else by what opens it."""
    from forebay.dataset.manifest import MANIFEST_FILE
    from forebay.dataset.reader import local_path, verify_dataset
    from forebay.load.sources import open_dataset

    is_local = "://" not in args.dataset or args.dataset.startswith("file://")
    if is_local:
        folder = local_path(args.dataset)
        if (folder / MANIFEST_FILE).is_file() or not folder.exists():
            return verify_dataset(folder, on_progress=advance)
    return open_dataset(args.dataset, args.network).verify(on_progress=advance)


def _adopt(args: argparse.Namespace) -> int:
    from forebay.dataset.adopt import adopt

    show(adopt(args.directory, name=args.name).describe(), args.json)
    return 0


def _demo(args: argparse.Namespace) -> int:
    from forebay.demo import run_demo

    return run_demo(
        inputs=args.input,
        json_file=args.json,
        keep=args.keep,
        trainer=args.trainer,
        max_bytes=args.max_bytes,
        tokenizer=args.tokenizer,
    )


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    p = verb("demo", _demo, "the whole thing on this machine, in about a minute")
    p.add_argument("--input", nargs="+", type=Path, metavar="PATH", help="text to train on (default: Python's library)")
    p.add_argument("--json", type=Path, metavar="FILE", help="also write the summary here")
    p.add_argument("--keep", type=Path, metavar="DIR", help="keep everything it makes in this new directory")
    p.add_argument("--trainer", choices=["auto", "gpt", "count", "none"], default="auto", help="what learns")
    p.add_argument("--max-bytes", type=size, default=None, help="use at most this much of the default text")
    p.add_argument("--tokenizer", default="train:4096", metavar="T", help="as of `forebay prepare`")

    for name, run, about in (
        ("inspect", _inspect, "what is in a dataset"),
        ("verify", _verify, "is a dataset whole"),
    ):
        p = verb(name, run, about)
        p.add_argument("dataset", help="a directory or URL, of Forebay's format or one of docs/formats.md")
        p.add_argument("--network", metavar="DIR", help="for forebay:// URLs: the node's directory")
        p.add_argument("--json", action="store_true")
        p.add_argument("--quiet", action="store_true")
    p = verb("adopt", _adopt, "give a directory of SafeTensors files a manifest")
    p.add_argument("directory", type=Path, help="with slices/*.safetensors")
    p.add_argument("--name", help="the dataset's (default: the directory's)")
    p.add_argument("--json", action="store_true")
