"""`forebay ledger`: verify a ledger, look up who used which samples, export the uses."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import file, print_result, share
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.dataset.documents import Documents
    from forebay.ledger.index import LedgerIndex
    from forebay.observe.ledger_queries import BatchShare


def _verify(args: Namespace) -> int:
    from forebay.ledger.verify import verify_ledger
    from forebay.network.pki.identity import verify
    from forebay.observe.ledger_queries import is_roster, replay, verify_steps

    if is_roster(args.file):
        return _print_verified(
            args, vars(verify_steps(args.file)), "each sample was used once by the steps that counted"
        )
    report = verify_ledger(args.file, _key(args), verify, replay if args.samples else None, args.max_set_aside)
    return _print_verified(args, vars(report), "chain, signatures and coverage hold")


def _key(args: Namespace) -> bytes | None:
    if args.key is None:
        return None
    try:
        key = bytes.fromhex(args.key)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise UsageError(f"--key: expected a public key of 64 hex digits, got {args.key!r:.80}.")
    return key


def _print_verified(args: Namespace, report: dict[str, Any], success: str) -> int:
    if args.json:
        print(json.dumps(report))
        return 0 if report["ok"] else 1
    for problem in report["problems"]:
        print(f"problem: {problem}")
    for e in report["epochs"]:
        line = "epoch {epoch}: {samples:,} samples used, {missing:,} missing, {repeated:,} repeated".format(**e)
        print(line + "".join(f", {e[key]:,} {key.replace('_', ' ')}" for key in ("set_aside", "redone") if key in e))
    for kind in ("missing", "repeated"):
        intervals = report.get(kind, [])
        for part in intervals[:10]:
            print(
                f"{kind}: epoch {part['epoch']}, slice {part['slice']}, samples [{part['start']:,}, {part['stop']:,})"
            )
        if len(intervals) > 10:
            print(f"{kind}: and {len(intervals) - 10:,} more intervals; --json prints them")
    print(f"ok: {success}" if report["ok"] else "NOT ok")
    return 0 if report["ok"] else 1


def _blame(args: Namespace) -> None:
    from forebay.ledger.index import open_index
    from forebay.observe.ledger_queries import blame_step

    if (args.step is None) == (args.document is None):
        raise UsageError("ledger blame: expected one of --step N and --document ID.")
    if args.step is None:
        return _blame_document(args)
    index = open_index(args.file)
    parts = blame_step(index, args.step, worker=args.worker, documents=_documents(args, index))
    if args.json:
        print(json.dumps({"step": args.step, "parts": [asdict(part) for part in parts]}))
        return
    for part in parts:
        _print_share(part)


def _documents(args: Namespace, index: LedgerIndex) -> Documents | None:
    """The documents of --dataset."""
    from forebay.dataset.documents import Documents
    from forebay.dataset.reader import open_dataset

    if args.dataset is None:
        return None
    dataset = open_dataset(args.dataset)
    if dataset.id != index.job.dataset_id:
        raise UsageError(f"blame: {dataset.url} is not the dataset of this job, which has {index.job.dataset_id}.")
    return Documents(dataset)


def _blame_document(args: Namespace) -> None:
    from forebay.ledger.index import open_index
    from forebay.observe.ledger_queries import who_saw

    index = open_index(args.file)
    documents = _documents(args, index)
    if documents is None:
        raise UsageError("ledger blame: expected --dataset DIR beside --document, got none.")
    ranges = [item for number in documents.find(args.document) for item in documents.token_ranges(number)]
    parts = [part for token_range in ranges for part in who_saw(index, *token_range)]
    if args.json:
        tokens = [{"slice": slice_, "start": start, "stop": stop} for slice_, start, stop in ranges]
        print(json.dumps({"tokens": tokens, "uses": [asdict(part) for part in parts]}))
        return
    for slice_, start, stop in ranges:
        print(f"slice {slice_}, tokens [{start:,}, {stop:,})")
    for part in parts:
        print(f"{_headline(part)}: samples {', '.join(map(str, part.samples))}")
    if not parts:
        print("no worker used it")


def _headline(part: BatchShare) -> str:
    from datetime import datetime

    steps = f"step {part.first_step}"
    if part.first_step != part.last_step:
        steps = f"one of steps {part.first_step} to {part.last_step}"
    recorded_at = datetime.fromtimestamp(part.recorded_at).astimezone().isoformat(timespec="seconds")
    return (
        f"{part.name or 'worker'} ({part.worker}), {steps}, epoch {part.epoch}, slice {part.slice}, "
        f"order [{part.start:,}, {part.stop:,}), {recorded_at}, entry {part.entry}"
    )


def _print_share(part: BatchShare) -> None:
    print(_headline(part))
    samples = ", ".join(map(str, part.samples[:16])) + (", …" if len(part.samples) > 16 else "")
    print(f"  {len(part.samples):,} samples: {samples}")
    for document in part.documents:
        source = f"  {document.id}" + (f" of {document.source}" if document.source else "") if document.id else ""
        tokens = f"slice {document.slice} tokens [{document.start:,}, {document.stop:,})"
        print(f"  document #{document.document}  {tokens}{source}")
        if document.text:
            print(f"    {document.text}")


def _export(args: Namespace) -> None:
    from forebay.ledger.index import open_index
    from forebay.observe.ledger_queries import export_uses

    index = open_index(args.file)
    count = export_uses(index, args.out, args.format, sample_ids=args.sample_ids)
    print_result(args, {"uses": count, "out": str(args.out)}, f"{count:,} uses to {args.out}")


def add_verbs(verb: Any, group: Any) -> None:
    verbs = group("ledger", "verify and query which worker used which samples")
    p = verb("verify", _verify, "verify that each sample of an epoch was used exactly once", verbs)
    p.add("file", "a ledger, or a coordinator's state", type=Path)
    p.add("--key", "the scheduler's public key (default: the one in the file)", metavar="HEX")
    p.add("--max-set-aside", "allowed of an epoch's samples (default: 0)", type=share, default=0.0)
    p.add_flag("--samples", "also verify sample ids: recompute the order of every use")

    p = verb("blame", _blame, "from a step to its samples and documents, or from a document to its workers", verbs)
    p.add("file", "the ledger", type=Path)
    p.add("--step", "step of the worker (this or --document)", type=int, metavar="N")
    p.add("--document", "source id, or #NUMBER in the dataset (this or --step)", metavar="ID")
    p.add("--worker", "its name, or a prefix of its peer id (default: all)", default="", metavar="NAME")
    p.add("--dataset", "the job's dataset (default: none)", metavar="DIR")

    p = verb("export", _export, "write the uses as a table", verbs)
    p.add("file", "the ledger", type=Path)
    p.add("--out", "the file to write (required)", required=True, type=file)
    p.add("--format", "format of the table", choices=["jsonl", "parquet"], default="jsonl")
    p.add_flag("--sample-ids", "add a column with the ids of the samples")
