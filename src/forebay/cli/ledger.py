"""`forebay ledger`: verify a ledger or a proof, look up who used which samples, export the uses."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import positive, share
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.dataset.documents import Documents
    from forebay.ledger.index import LedgerIndex
    from forebay.observe.blame import BatchShare


def _verify(args: argparse.Namespace) -> int:
    from forebay.ledger.verify import verify_ledger
    from forebay.network.pki.identity import verify
    from forebay.observe.blame import replay
    from forebay.observe.steps import is_roster, verify_steps

    if args.proof:
        return _verify_proof(args)
    if is_roster(args.file):
        steps = verify_steps(args.file)
        _print_verified(args, steps.to_json(), "each sample was used once by the steps that counted")
        return 0 if steps.ok else 1
    report = verify_ledger(args.file, _key(args), verify, replay if args.samples else None, args.max_set_aside)
    _print_verified(args, report.to_json(), "chain, signatures and coverage hold")
    return 0 if report.ok else 1


def _key(args: argparse.Namespace) -> bytes | None:
    if args.key is None:
        return None
    try:
        key = bytes.fromhex(args.key)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise UsageError(f"--key: expected a public key of 64 hex digits, got {args.key!r:.80}.")
    return key


def _print_verified(args: argparse.Namespace, report: dict[str, Any], success: str) -> None:
    if args.json:
        print(json.dumps(report))
        return
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


def _verify_proof(args: argparse.Namespace) -> int:
    from forebay.ledger.proof import check_proof
    from forebay.network.pki.identity import verify

    try:
        proof = json.loads(args.file.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"verify: cannot read the proof {args.file}: {error}.") from error
    report = check_proof(proof, verify, key=_key(args), root=args.root)
    if args.json:
        print(json.dumps(report.to_json()))
        return 0 if report.ok else 1
    used = ", ".join(f"[{start:,}, {stop:,})" for start, stop in report.used) or "none"
    workers = "1 worker" if len(report.workers) == 1 else f"{len(report.workers):,} workers"
    signed = "signed by the scheduler" if report.recorded else "not yet in a signed entry"
    print(f"epoch {report.epoch}, slice {report.slice}: samples {used} used by {workers}")
    print(f"root {report.root}, {signed}")
    for problem in report.problems:
        print(f"problem: {problem}")
    print("ok: the slice is under the root" if report.ok else "NOT ok")
    return 0 if report.ok else 1


def _blame(args: argparse.Namespace) -> int:
    from forebay.ledger.index import open_index
    from forebay.observe.blame import blame_step
    from forebay.observe.steps import is_roster

    selected = [args.step is not None, args.document is not None, args.slice is not None or args.tokens is not None]
    if sum(selected) != 1:
        raise UsageError("blame: expected one of --step N, --document ID and --slice I --tokens A:B.")
    if args.step is None:
        return _blame_document(args)
    if args.file == "-" or is_roster(Path(args.file)):
        parts, fields = _blame_order(args)
        result = {**fields, "parts": [asdict(part) for part in parts], "more": 0, "around": []}
        more, around = 0, []
    else:
        index = open_index(args.file)
        documents = _documents(args, index)
        blame = blame_step(index, args.step, worker=args.worker, documents=documents, text=not args.no_text)
        result = {"mode": "lease", "step": args.step, **asdict(blame)}
        parts, more, around = blame.parts, blame.more, blame.around
    if args.json:
        print(json.dumps(result))
        return 0
    for part in parts:
        _print_share(part)
    if more:
        print(f"and {more:,} more workers; select one with --worker")
    for part in around:
        print(f"around: {_headline(part)}")
    return 0


def _documents(args: argparse.Namespace, index: LedgerIndex) -> dict[str, Documents]:
    """The documents of the datasets of --dataset, by dataset id."""
    from forebay.dataset.documents import Documents
    from forebay.dataset.reader import open_dataset

    documents = {dataset.id: Documents(dataset) for dataset in map(open_dataset, args.dataset or [])}
    for id, of_dataset in documents.items():
        if id not in index.job.dataset_ids:
            raise UsageError(
                f"blame: {of_dataset.dataset.path} is not a dataset of this job, which has {index.job.dataset_ids}."
            )
    return documents


def _blame_order(args: argparse.Namespace) -> tuple[list[BatchShare], dict[str, Any]]:
    """The shares of a step from a coordinator's record, if there is one, and the order."""
    from forebay.dataset.documents import Documents
    from forebay.dataset.reader import open_dataset
    from forebay.load.loader import Loader
    from forebay.observe.blame import BatchShare, blame_order
    from forebay.observe.steps import open_log

    record, config = None, {}
    if args.file != "-":
        with open_log(Path(args.file)) as log:
            record, config = log.step(args.step), log.config()
        if record is None:
            raise UsageError(f"blame: step {args.step} is not finished in {args.file}.")
    fields = {"mode": "order", "step": args.step, "record": record}
    workers = [str(part["worker_id"]) for part in record["parts"]] if record else []
    if not args.dataset:
        if record is None:
            raise UsageError("blame: expected --dataset DIR, and the run's --seq-len, --global-batch-size and --seed.")
        first, world = int(record["first_sample"]), len(workers)
        samples = [list(range(first + r, first + int(record["count"]), world)) for r in range(world)]
        return [
            BatchShare(name, name, rank, first_step=args.step, last_step=args.step, samples=of_rank)
            for rank, (name, of_rank) in enumerate(zip(workers, samples))
        ], fields
    dataset = open_dataset(args.dataset[0])
    seq_len = args.seq_len or config.get("seq_len")
    batch = args.global_batch_size or (record or {}).get("count")
    if not batch or (dataset.manifest.layout == "tokens" and not seq_len):
        raise UsageError("blame: expected the Loader's --global-batch-size and, for tokens, --seq-len.")
    seed = args.seed if args.seed is not None else int(config.get("seed", 0))
    with Loader(
        args.dataset[0], seq_len=seq_len, global_batch_size=int(batch), seed=seed, rank=0, world_size=1, epochs=None
    ) as loader:
        run = loader.run
    parts = blame_order(
        run, args.step, world_size=args.world_size or len(workers) or 1, workers=workers,
        documents=Documents(dataset), seq_len=seq_len, text=not args.no_text,
    )  # fmt: skip
    return [part for part in parts if args.worker in ("", part.worker)], fields


def _blame_document(args: argparse.Namespace) -> int:
    from forebay.ledger.index import open_index
    from forebay.observe.blame import who_saw

    index = open_index(args.file)
    ranges: list[tuple[int, int, int]] = []
    if args.slice is not None and args.tokens is not None:
        ranges = [(args.slice, *args.tokens)]
    elif args.document is not None and args.dataset:
        for id, documents in _documents(args, index).items():
            first = index.job.bounds[index.job.dataset_ids.index(id)]
            for number in documents.find(args.document):
                ranges += [(first + slice_, start, stop) for slice_, start, stop in documents.token_ranges(number)]
    else:
        raise UsageError("blame: expected --document ID --dataset DIR, or --slice I --tokens A:B.")
    parts = [part for token_range in ranges for part in who_saw(index, *token_range)]
    if args.json:
        places = [{"slice": slice_, "start": start, "stop": stop} for slice_, start, stop in ranges]
        print(json.dumps({"places": places, "uses": [asdict(part) for part in parts]}))
        return 0
    for slice_, start, stop in ranges:
        print(f"slice {slice_}, tokens [{start:,}, {stop:,})")
    for part in parts:
        print(f"{_headline(part)}: samples {', '.join(map(str, part.samples))}")
    if not parts:
        print("no worker used it")
    return 0


def _headline(part: BatchShare) -> str:
    from datetime import datetime

    worker = f"rank {part.rank}" if part.rank >= 0 else part.name or "worker"
    worker += f" ({part.worker})" if part.worker and part.worker != worker else ""
    steps = f"step {part.first_step}"
    if part.first_step != part.last_step:
        steps = f"one of steps {part.first_step} to {part.last_step}"
    text = f"{worker}, {steps}, epoch {part.epoch}"
    if part.slice >= 0:
        text += f", slice {part.slice}, order [{part.start:,}, {part.stop:,})"
    if part.recorded_at:
        text += f", {datetime.fromtimestamp(part.recorded_at).astimezone().isoformat(timespec='seconds')}"
    return text + (f", entry {part.entry}" if part.entry >= 0 else "")


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


def _export(args: argparse.Namespace) -> int:
    from forebay.files import atomic_write
    from forebay.ledger.index import open_index
    from forebay.ledger.proof import prove
    from forebay.observe.ledger_export import export_uses

    index = open_index(args.file)
    if args.proof is not None:
        epoch, slice_index = args.proof
        atomic_write(args.out, json.dumps(prove(index, epoch, slice_index)).encode() + b"\n")
        result = {"epoch": epoch, "slice": slice_index, "out": str(args.out)}
        print(json.dumps(result) if args.json else f"proof of slice {slice_index} in epoch {epoch} to {args.out}")
        return 0
    count = export_uses(index, args.out, args.format, sample_ids=args.sample_ids)
    print(json.dumps({"uses": count, "out": str(args.out)}) if args.json else f"{count:,} uses to {args.out}")
    return 0


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition(":")
    if not (first.isdigit() and second.isdigit()):
        raise argparse.ArgumentTypeError(f"expected two numbers A:B, got {text!r}")
    return int(first), int(second)


def _token_range(text: str) -> tuple[int, int]:
    start, stop = _pair(text)
    if start >= stop:
        raise argparse.ArgumentTypeError(f"expected A:B with A below B, got {text!r}")
    return start, stop


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    verbs = group("ledger", "verify and query which worker used which samples")
    p = verb("verify", _verify, "verify that each sample of an epoch was used exactly once", verbs)
    p.add_argument("file", type=Path, help="a ledger, or a coordinator's state; with --proof a proof")
    p.add_argument("--key", metavar="HEX", help="the scheduler's public key (default: the one in the file)")
    p.add_argument(
        "--max-set-aside", type=share, default=0.0, metavar="SHARE",
        help="share of an epoch's samples that may be set aside, 0 to 1 (default: 0)",
    )  # fmt: skip
    p.add_argument("--samples", action="store_true", help="also verify sample ids: recompute the order of every use")
    p.add_argument("--proof", action="store_true", help="verify a proof made by `forebay ledger export --proof`")
    p.add_argument("--root", metavar="HEX", help="with --proof: the epoch's root from another source")

    p = verb("blame", _blame, "from a step to its samples and documents, or from a document to its workers", verbs)
    p.add_argument("file", help="a ledger; a coordinator's state; - for a Loader's run, which needs no record")
    p.add_argument("--step", type=int, metavar="N", help="a step of the worker, or of the run")
    p.add_argument("--document", metavar="ID", help="a document: its source id, or #NUMBER in the dataset")
    p.add_argument("--slice", type=int, metavar="I", help="with --tokens: a slice, by its index in the job")
    p.add_argument("--tokens", type=_token_range, metavar="A:B", help="tokens of the slice; of a row dataset, rows")
    p.add_argument("--worker", default="", metavar="P", help="only this worker: its name, or a prefix of its peer id")
    p.add_argument("--dataset", action="append", metavar="DIR", help="the job's dataset; may be repeated")
    p.add_argument("--seed", type=int, help="the Loader's, for a run without a record")
    p.add_argument("--seq-len", type=positive, metavar="L", help="the Loader's, likewise")
    p.add_argument("--global-batch-size", type=positive, metavar="N", help="the Loader's, likewise")
    p.add_argument("--world-size", type=positive, metavar="W", help="number of ranks, likewise")
    p.add_argument("--no-text", action="store_true", help="print no text of documents")

    p = verb("export", _export, "write the uses as a table, or the proof of a slice", verbs)
    p.add_argument("file", type=Path, help="the ledger")
    p.add_argument("--out", required=True, type=Path, metavar="FILE", help="the file to write")
    p.add_argument("--format", choices=["jsonl", "csv", "parquet"], default="jsonl", help="format of the table")
    p.add_argument("--sample-ids", action="store_true", help="add a column with the ids of the samples")
    p.add_argument("--proof", type=_pair, metavar="EPOCH:SLICE", help="write the proof that this slice was used")
