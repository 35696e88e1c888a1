"""`forebay doctor`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import plain, positive, whole_number

if TYPE_CHECKING:
    from forebay.formats.report import CheckOptions, Report


def _doctor(args: argparse.Namespace) -> int:
    from forebay.doctor import examine

    reports = examine(args.paths, _options(args))
    ok = all(report.ok for report in reports)
    if args.json:
        print(json.dumps({"ok": ok, "reports": [report.to_json() for report in reports]}))
    else:
        for report in reports:
            _show(report)
        wrong, unchecked = sum(report.is_wrong for report in reports), sum(report.depth == "none" for report in reports)
        if wrong:
            print(f"NOT ok: {wrong} of {len(reports)} have something wrong")
        elif unchecked:
            print(f"NOT checked: {unchecked} of {len(reports)} are of a format that doctor does not examine")
        else:
            is_part = any(report.depth == "part" for report in reports)
            print(f"ok: nothing wrong found{' in the part that was read' if is_part else ''}")
    return 0 if ok else 1


def _options(args: argparse.Namespace) -> CheckOptions:
    from forebay.formats.external import token_dtype
    from forebay.formats.report import CheckOptions

    vocab, eos, tokenizer = args.vocab_size or 0, args.eos_id, None
    if args.tokenizer is not None:
        from forebay.prepare.tokenize.tokenizers import AUTO, load_tokenizer, parse

        found = load_tokenizer(args.tokenizer, eos=AUTO)
        tokenizer = parse(found.data, found.description)
        vocab, eos = vocab or found.vocab_size, found.eos_id if eos is None else eos
    return CheckOptions(
        dtype=token_dtype(args.dtype) if args.dtype is not None else None,
        vocab_size=vocab,
        eos_id=eos,
        seq_len=args.seq_len or 0,
        tokenizer=tokenizer,
        full=args.full,
    )


def _show(report: Report) -> None:
    read, total = report.read_bytes, report.total_bytes
    seen = {"all": "read all of it", "none": "not checked", "part": f"read {read:,} bytes; --full reads all"}
    seen["structure"] = f"read {read:,} bytes: sizes, counts and offsets; the contents are of no type that is checked"
    print(f"{report.path}: {report.kind}, {total:,} bytes ({seen[report.depth]}; {report.seconds:.2f} s)")
    for name, value in report.metadata.items():
        print(f"    {name.replace('_', ' ')}: {repr(value) if name == 'first_text' else plain(value)}")
    for one in report.findings:
        print(
            f"  {'WRONG' if one.is_wrong else 'maybe'} {one.fault} ({one.confidence}) at {one.location} of {one.path}"
        )
        print(f"      {one.evidence}")
        print(f"      {one.advice}")


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    p = verb("doctor", _doctor, "what a training-data file is, what is wrong with it, and what to do")
    p.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files, directories, or a pattern in quotes")
    p.add_argument("--dtype", metavar="TYPE", help="of tokens that no header tells: uint16, uint32, int64")
    p.add_argument("--vocab-size", type=positive, metavar="N", help="every id is below it")
    p.add_argument("--tokenizer", metavar="T", help="its vocabulary and EOS; decodes the first tokens")
    p.add_argument("--seq-len", type=positive, metavar="N", help="tokens of a sample: finds samples that occur twice")
    p.add_argument("--eos-id", type=whole_number, metavar="N", help="ends each document")
    p.add_argument("--full", action="store_true", help="read every byte (default: 256 MiB of each, 1 GiB of all)")
