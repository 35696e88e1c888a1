"""Commands on data: prepare, inspect, verify, adopt, ledger, demo."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.cli.arguments import positive, show, size


def _prepare(args: argparse.Namespace) -> int:
    from millrace.observe.progress import PrepareBar
    from millrace.prepare.recipe import prepare

    with PrepareBar(enabled=not args.quiet) as bar:
        summary = prepare(
            args.inputs,
            args.out,
            tokenizer=args.tokenizer,
            name=args.name,
            slice_bytes=args.slice_bytes,
            workers=args.workers,
            seed=args.seed,
            keep_ids=args.keep_ids,
            text_key=args.text_key,
            max_bad_fraction=args.max_bad,
            on_progress=bar.update,
        )
    result = summary.to_json()
    if not args.json:
        dropped = ", ".join(f"{n} {reason}" for reason, n in result["dropped"].items()) or "none"
        print(
            f"{result['documents_out']:,} of {result['documents_in']:,} documents, {result['tokens']:,} tokens "
            f"in {result['slices']:,} slices (dropped: {dropped})\n{args.out}  id {result['id']}"
        )
    else:
        print(json.dumps(result))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from millrace.dataset.reader import open_dataset

    show(open_dataset(args.dataset).describe(), args.json)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from millrace.dataset.reader import verify_dataset
    from millrace.observe.progress import bytes_bar

    with bytes_bar("verify", None, enabled=not args.quiet) as advance:
        report = verify_dataset(args.dataset, on_progress=advance)
    if args.json:
        print(json.dumps({"ok": report.ok, "bad": report.bad}))
    elif report.ok:
        print(f"ok: every file of {args.dataset} matches its hash")
    else:
        for name in report.bad:
            print(f"bad: {name}")
        print("Fetch or prepare these again; until then nothing should train on this dataset.", file=sys.stderr)
    return 0 if report.ok else 1


def _adopt(args: argparse.Namespace) -> int:
    from millrace.dataset.adopt import adopt

    show(adopt(args.directory, name=args.name).describe(), args.json)
    return 0


def _ledger_verify(args: argparse.Namespace) -> int:
    from millrace.ledger import verify_ledger
    from millrace.network.identity import verify

    report = verify_ledger(args.file, verify=verify)
    if args.json:
        print(json.dumps(report.to_json()))
    else:
        for e in report.epochs:
            print("epoch {epoch}: {samples:,} samples used, {missing:,} missing, {repeated:,} repeated".format(**e))
        for problem in report.problems:
            print(f"problem: {problem}")
        print("ok: chain, signatures and coverage hold" if report.ok else "NOT ok")
    return 0 if report.ok else 1


def _demo(args: argparse.Namespace) -> int:
    from millrace.demo import run_demo

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
    p.add_argument("--trainer", choices=["auto", "gpt", "count", "none"], default="auto")
    p.add_argument("--max-bytes", type=size, default=None, help="use at most this much of the default text")
    p.add_argument("--tokenizer", default="train:4096")

    p = verb("prepare", _prepare, "raw text to a dataset")
    p.add_argument("inputs", nargs="+", metavar="INPUT", help="JSONL (.gz, .zst), Parquet, text files, directories")
    p.add_argument("--out", required=True, type=Path, metavar="DIR")
    p.add_argument(
        "--tokenizer",
        required=True,
        metavar="T",
        help="a tokenizer.json, a hub name, `bytes` or `train:VOCAB`",
    )
    p.add_argument("--name", help="the dataset's name (default: the directory's)")
    p.add_argument("--slice-bytes", type=size, default=64 << 20, metavar="N")
    p.add_argument("--workers", type=positive, default=None, metavar="N")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--keep-ids", type=Path, metavar="FILE", help="write each kept document's source id here")
    p.add_argument("--text-key", default="text", help="the field or column that holds the text")
    p.add_argument("--max-bad", type=float, default=0.05, metavar="FRACTION", help="more bad records than this: stop")
    p.add_argument("--quiet", action="store_true")
    p.add_argument("--json", action="store_true")

    for name, run, about in (
        ("inspect", _inspect, "what is in a dataset"),
        ("verify", _verify, "is a dataset whole"),
    ):
        p = verb(name, run, about)
        p.add_argument("dataset")
        p.add_argument("--json", action="store_true")
        p.add_argument("--quiet", action="store_true")
    p = verb("adopt", _adopt, "give a directory of SafeTensors files a manifest")
    p.add_argument("directory", type=Path)
    p.add_argument("--name")
    p.add_argument("--json", action="store_true")

    p = verb(
        "verify",
        _ledger_verify,
        "prove that each sample of an epoch was used exactly once",
        group("ledger", "who used which samples"),
    )
    p.add_argument("file", type=Path)
    p.add_argument("--json", action="store_true")
