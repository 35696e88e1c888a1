"""Commands on a ledger: what it proves, and who used what."""

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
    from forebay.observe.blame import BatchShare


def _ledger_verify(args: argparse.Namespace) -> int:
    from forebay.ledger.verify import verify_ledger
    from forebay.network.pki.identity import verify
    from forebay.observe.blame import replay
    from forebay.observe.steps import is_roster, verify_steps

    if is_roster(args.file):
        steps = verify_steps(args.file)
        _print_verified(args, steps.to_json(), "each sample once, in the steps that count")
        return 0 if steps.ok else 1
    report = verify_ledger(args.file, _key(args), verify, replay if args.samples else None, args.allow_aside)
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


def _print_verified(args: argparse.Namespace, report: dict[str, Any], holds: str) -> None:
    if args.json:
        print(json.dumps(report))
        return
    for problem in report["problems"]:
        print(f"problem: {problem}")
    for e in report["epochs"]:
        line = "epoch {epoch}: {samples:,} samples used, {missing:,} missing, {repeated:,} repeated".format(**e)
        print(line + "".join(f", {e[key]:,} {key.replace('_', ' ')}" for key in ("set_aside", "redone") if key in e))
    for kind in ("missing", "repeated"):
        found = report.get(kind, [])
        for at in found[:10]:
            print(f"{kind}: epoch {at['epoch']}, slice {at['slice']}, samples [{at['start']:,}, {at['stop']:,})")
        if len(found) > 10:
            print(f"{kind}: and {len(found) - 10:,} intervals more; --json has them")
    print(f"ok: {holds}" if report["ok"] else "NOT ok")


def _ledger_prove(args: argparse.Namespace) -> int:
    from forebay.ledger.index import open_index
    from forebay.ledger.proof import check_proof, prove
    from forebay.network.pki.identity import verify

    if args.check is None:
        if args.file is None or args.epoch is None or args.slice is None:
            raise UsageError("prove: expected FILE --epoch E --slice I, or --check PROOF.")
        print(json.dumps(prove(open_index(args.file), args.epoch, args.slice)))
        return 0
    try:
        proof = json.loads(args.check.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"prove: cannot read {args.check}: {error}.") from error
    report = check_proof(proof, verify, key=_key(args), root=args.root)
    if args.json:
        print(json.dumps(report.to_json()))
    else:
        used = ", ".join(f"[{start:,}, {stop:,})" for start, stop in report.used) or "none"
        who = "1 worker" if len(report.workers) == 1 else f"{len(report.workers):,} workers"
        signed = "signed by the scheduler" if report.recorded else "not yet in a signed entry"
        print(f"epoch {report.epoch}, slice {report.slice}: samples {used} used by {who}")
        print(f"root {report.root}, {signed}")
        for problem in report.problems:
            print(f"problem: {problem}")
        print("ok: the slice is under the root" if report.ok else "NOT ok")
    return 0 if report.ok else 1


def _ledger_blame(args: argparse.Namespace) -> int:
    from forebay.dataset.documents import by_dataset_id
    from forebay.dataset.reader import open_dataset
    from forebay.ledger.index import open_index
    from forebay.observe.blame import Blame, blame_step
    from forebay.observe.steps import is_roster

    if args.file == "-" or is_roster(Path(args.file)):
        blame, facts = _blame_order(args)
    else:
        index = open_index(args.file)
        documents = by_dataset_id([open_dataset(path) for path in args.dataset or []])
        unknown = [known.dataset.path for id, known in documents.items() if id not in index.job.dataset_ids]
        if unknown:
            raise UsageError(f"blame: {unknown[0]} is not a dataset of this job, which has {index.job.dataset_ids}.")
        blame = blame_step(index, args.step, worker=args.worker, documents=documents, text=not args.no_text)
        facts = {"mode": "lease", "step": args.step}
    if args.json:
        print(json.dumps({**facts, **asdict(blame)}))
        return 0
    assert isinstance(blame, Blame)
    for part in blame.parts:
        _print_part(part)
    if blame.more:
        print(f"and {blame.more:,} more workers; name one with --worker")
    for part in blame.around:
        print(f"around: {_headline(part)}")
    return 0


def _blame_order(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Order mode: the coordinator's record, if there is one, and the order as a function."""
    from forebay.dataset.documents import Documents
    from forebay.dataset.reader import open_dataset
    from forebay.observe.blame import BatchShare, Blame, blame_order
    from forebay.observe.steps import open_log

    record, config = None, {}
    if args.file != "-":
        with open_log(Path(args.file)) as log:
            record, config = log.step(args.step), log.config()
        if record is None:
            raise UsageError(f"blame: step {args.step} is not finished in {args.file}.")
    facts = {"mode": "order", "step": args.step, "record": record}
    workers = [str(part["worker_id"]) for part in record["parts"]] if record else []
    if not args.dataset:
        if record is None:
            raise UsageError("blame: expected --dataset DIR, and the run's --seq-len, --global-batch and --seed.")
        first, world = int(record["first_sample"]), len(workers)
        dealt = [list(range(first + r, first + int(record["count"]), world)) for r in range(world)]
        parts = [
            BatchShare(name, name, rank, first_step=args.step, last_step=args.step, samples=samples)
            for rank, (name, samples) in enumerate(zip(workers, dealt))
        ]
        return Blame(parts), facts
    dataset = open_dataset(args.dataset[0])
    seq_len = args.seq_len or config.get("seq_len")
    batch = args.global_batch or (record or {}).get("count")
    if not batch or (dataset.manifest.layout == "tokens" and not seq_len):
        raise UsageError("blame: expected --global-batch and, for tokens, --seq-len: what the Loader was given.")
    seed = args.seed if args.seed is not None else int(config.get("seed", 0))
    from forebay.load.loader import Loader

    with Loader(
        args.dataset[0], seq_len=seq_len, global_batch_size=int(batch), seed=seed, rank=0, world_size=1, epochs=None
    ) as loader:
        run = loader.run
    parts = blame_order(
        run, args.step, world_size=args.world_size or len(workers) or 1, workers=workers,
        documents=Documents(dataset), seq_len=seq_len, text=not args.no_text,
    )  # fmt: skip
    return Blame([part for part in parts if args.worker in ("", part.worker)]), facts


def _headline(part: BatchShare) -> str:
    from datetime import datetime

    who = f"rank {part.rank}" if part.rank >= 0 else part.name or "worker"
    who += f" ({part.worker})" if part.worker and part.worker != who else ""
    steps = f"step {part.first_step}" if part.first_step == part.last_step else (
        f"one of steps {part.first_step} to {part.last_step}"
    )  # fmt: skip
    where = f", slice {part.slice}, order [{part.start:,}, {part.stop:,})" if part.slice >= 0 else ""
    at = (
        f", {datetime.fromtimestamp(part.recorded_at).astimezone().isoformat(timespec='seconds')}"
        if part.recorded_at
        else ""
    )
    entry = f", entry {part.entry}" if part.entry >= 0 else ""
    return f"{who}, {steps}, epoch {part.epoch}{where}{at}{entry}"


def _print_part(part: BatchShare) -> None:
    print(_headline(part))
    shown = ", ".join(map(str, part.samples[:16])) + (", …" if len(part.samples) > 16 else "")
    print(f"  {len(part.samples):,} samples: {shown}")
    for piece in part.documents:
        source = f"  {piece.id}" + (f" of {piece.source}" if piece.source else "") if piece.id else ""
        print(f"  document #{piece.document}  slice {piece.slice} tokens [{piece.start:,}, {piece.stop:,}){source}")
        if piece.text:
            print(f"    {piece.text}")


def _ledger_who(args: argparse.Namespace) -> int:
    from forebay.dataset.documents import by_dataset_id
    from forebay.dataset.reader import open_dataset
    from forebay.ledger.index import open_index
    from forebay.observe.blame import who_saw

    index = open_index(args.file)
    places: list[tuple[int, int, int]] = []
    if args.slice is not None and args.tokens is not None:
        places = [(args.slice, *args.tokens)]
    elif args.document is not None and args.dataset:
        for id, documents in by_dataset_id([open_dataset(path) for path in args.dataset]).items():
            if id not in index.job.dataset_ids:
                raise UsageError(f"who: {documents.dataset.path} is not a dataset of this job.")
            first = index.job.bounds[index.job.dataset_ids.index(id)]
            for number in documents.find(args.document):
                places += [(first + at, start, stop) for at, start, stop in documents.token_ranges(number)]
    else:
        raise UsageError("who: expected --document ID --dataset DIR, or --slice I --tokens A:B.")
    parts = [part for place in places for part in who_saw(index, *place)]
    if args.json:
        found = [{"slice": at, "start": start, "stop": stop} for at, start, stop in places]
        print(json.dumps({"places": found, "uses": [asdict(part) for part in parts]}))
        return 0
    for at, start, stop in places:
        print(f"slice {at}, tokens [{start:,}, {stop:,})")
    for part in parts:
        print(f"{_headline(part)}: samples {', '.join(map(str, part.samples))}")
    if not parts:
        print("nobody saw it")
    return 0


def _ledger_export(args: argparse.Namespace) -> int:
    from forebay.ledger.index import open_index
    from forebay.observe.ledger_export import export_uses

    count = export_uses(open_index(args.file), args.out, args.format, sample_ids=args.sample_ids)
    print(json.dumps({"uses": count, "out": str(args.out)}) if args.json else f"{count:,} uses to {args.out}")
    return 0


def _tokens(text: str) -> tuple[int, int]:
    start, _, stop = text.partition(":")
    if not (start.isdigit() and stop.isdigit() and int(start) < int(stop)):
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, two numbers of tokens")
    return int(start), int(stop)


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    verbs = group("ledger", "who used which samples")
    p = verb("verify", _ledger_verify, "prove that each sample of an epoch was used exactly once", verbs)
    p.add_argument("file", type=Path, help="a ledger, or a coordinator's state")
    p.add_argument("--key", metavar="HEX", help="the scheduler's public key (default: the one the ledger names)")
    p.add_argument(
        "--allow-aside",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="of an epoch's samples that may be set aside, 0 to 1 (default: 0)",
    )
    p.add_argument("--samples", action="store_true", help="by sample ids, too: recompute the order of every use")

    p = verb("prove", _ledger_prove, "prove a slice's use to somebody without the ledger, or check that", verbs)
    p.add_argument("file", type=Path, nargs="?", help="the ledger")
    p.add_argument("--epoch", type=int, metavar="E", help="from 0")
    p.add_argument("--slice", type=int, metavar="I", help="index in the job, from 0")
    p.add_argument("--check", type=Path, metavar="PROOF", help="a file with what this command printed")
    p.add_argument("--root", metavar="HEX", help="a root from elsewhere, that the proof must lead to")
    p.add_argument("--key", metavar="HEX", help="the scheduler's public key (default: the one the proof names)")

    p = verb("blame", _ledger_blame, "from a step to its samples, documents and workers", verbs)
    p.add_argument("file", help="a ledger; a coordinator's state; - for a Loader's run, which needs no record")
    p.add_argument("step", type=int, help="of the worker, or of the run")
    p.add_argument("--worker", default="", metavar="P", help="a worker's name, or the beginning of its peer id")
    p.add_argument("--dataset", action="append", metavar="DIR", help="for documents; of a mixture, each")
    p.add_argument("--seed", type=int, help="of the Loader")
    p.add_argument("--seq-len", type=positive, metavar="L", help="of the Loader")
    p.add_argument("--global-batch", type=positive, metavar="N", help="of the Loader")
    p.add_argument("--world-size", type=positive, metavar="W", help="ranks among which the batch is shared")
    p.add_argument("--no-text", action="store_true", help="no previews")

    p = verb("who", _ledger_who, "from a document to every step and worker that saw it", verbs)
    p.add_argument("file", type=Path, help="the ledger")
    p.add_argument("--document", metavar="ID", help="its source id, or #NUMBER in the dataset")
    p.add_argument("--dataset", action="append", metavar="DIR", help="to find the document in; may be repeated")
    p.add_argument("--slice", type=int, metavar="I", help="index in the job, with --tokens")
    p.add_argument("--tokens", type=_tokens, metavar="A:B", help="of the slice; of a row dataset, rows")

    p = verb("export", _ledger_export, "its uses as a table", verbs)
    p.add_argument("file", type=Path, help="the ledger")
    p.add_argument("--format", choices=["jsonl", "csv", "parquet"], default="jsonl", help="of the table")
    p.add_argument("--out", required=True, type=Path, metavar="FILE", help="where it goes")
    p.add_argument("--sample-ids", action="store_true", help="a column with the ids of the samples")
