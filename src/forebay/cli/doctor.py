"""`forebay doctor`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import plain, positive

if TYPE_CHECKING:
    from forebay.formats.report import Report


def _doctor(args: argparse.Namespace) -> int:
    from forebay.doctor import CheckOptions, examine
    from forebay.formats.external import token_dtype

    dtype = token_dtype(args.dtype) if args.dtype is not None else None
    reports = examine(args.paths, CheckOptions(dtype, args.vocab_size or 0, args.full))
    ok = all(report.ok for report in reports)
    if args.json:
        print(json.dumps({"ok": ok, "reports": [report.to_json() for report in reports]}))
        return 0 if ok else 1
    for report in reports:
        _show(report)
    wrong = sum(bool(report.findings) for report in reports)
    unchecked = sum(report.depth == "none" for report in reports)
    if wrong:
        print(f"NOT ok: {wrong} of {len(reports)} have something wrong")
    elif unchecked:
        print(f"NOT checked: {unchecked} of {len(reports)} are of a format that doctor does not examine")
    else:
        is_part = any(report.depth == "part" for report in reports)
        print(f"ok: nothing wrong found{' in the part that was read' if is_part else ''}")
    return 0 if ok else 1


def _show(report: Report) -> None:
    depths = {"all": "read all of it", "none": "not checked"}
    depth = depths.get(report.depth, f"read {report.read_bytes:,} bytes; --full reads all")
    print(f"{report.path}: {report.kind}, {report.total_bytes:,} bytes ({depth})")
    for name, value in report.metadata.items():
        print(f"    {name.replace('_', ' ')}: {plain(value)}")
    for finding in report.findings:
        print(f"  WRONG {finding.fault} at {finding.location} of {finding.path}")
        print(f"      {finding.evidence}")
        print(f"      {finding.advice}")


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    p = verb("doctor", _doctor, "what a training-data file is, what is wrong with it, and what to do")
    p.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files, directories, or a pattern in quotes")
    p.add_argument("--dtype", metavar="TYPE", help="of tokens that no header tells: uint16, uint32, int64")
    p.add_argument("--vocab-size", type=positive, metavar="N", help="every id is below it")
    p.add_argument("--full", action="store_true", help="read every byte (default: 256 MiB of each, 1 GiB of all)")
