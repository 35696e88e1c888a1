"""Commands around a run: top, dashboard, ledger, launch."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import (
    add_identity,
    add_settings,
    address,
    file,
    folder,
    is_loopback,
    print_result,
    public_key,
    share,
)
from forebay.cli.running import load_identity, ready, stop_event, until_stopped
from forebay.errors import MALFORMED, StateError, UsageError
from forebay.launch import KINDS, render, write

if TYPE_CHECKING:
    from forebay.dataset.documents import Documents
    from forebay.ledger.index import LedgerIndex
    from forebay.observe.dashboard import Dashboard
    from forebay.observe.ledger_queries import BatchShare
    from forebay.observe.sources import Source

_TARGET = (
    "HOST:PORT of a scheduler, coordinator or data node; http://HOST:PORT; or a folder: a record, or prepare's output"
)


def _open(args: Namespace, stack: ExitStack, command: str) -> Source:
    from forebay.network.client import Client
    from forebay.observe.sources import open_source

    def client() -> Client:
        identity = load_identity(args)
        identity.check_role(command, "viewer")
        return stack.enter_context(Client(identity))

    return open_source(args.target, client)


def _top(args: Namespace) -> None:
    from forebay.observe.top import show_top

    with ExitStack() as stack:
        source = _open(args, stack, "top")
        if args.replay and not source.times():
            raise UsageError(f"top --replay: expected a folder with the record of a run, got {args.target}.")
        if args.json:
            import orjson

            print(orjson.dumps(source.poll()).decode())
            return
        try:
            show_top(source, replay=args.replay)
        except MALFORMED as error:
            raise StateError(
                f"top: expected views of this version from {args.target}, got others ({type(error).__name__}: {error})."
            ) from error


def open_page(listen: str, source: Source, record: Path | None = None, *, is_open: bool = False) -> Dashboard:
    """A dashboard that serves at `listen`; beyond loopback only if `is_open`."""
    from forebay.observe.dashboard import Dashboard
    from forebay.observe.record import RunRecord

    host, port = address(listen)
    if not is_loopback(host):
        if not is_open:
            raise UsageError(
                f"dashboard: expected an address of this machine only, got {host}: any host that reaches it could read "
                "the page. Use 127.0.0.1 and an SSH tunnel, or `forebay dashboard --allow-plain-http`."
            )
        print(f"forebay: plain HTTP on {listen}: any host that reaches it can read the page.", file=sys.stderr)
    recorded = None if record is None else RunRecord(record)
    return Dashboard(source, host, port, record=recorded).start()


def _dashboard(args: Namespace) -> None:
    stop = stop_event()
    with ExitStack() as stack:
        source = _open(args, stack, "dashboard")
        source.poll()  # What cannot be shown is an error here.
        page = stack.enter_context(open_page(args.listen, source, args.record, is_open=args.allow_plain_http))
        ready(args, role="dashboard", url=page.url)
        until_stopped(stop)


def _verify(args: Namespace) -> bool:
    from forebay.ledger.verify import verify_ledger
    from forebay.network.pki.certificates import der_of, peer_of, verify_certificate
    from forebay.network.pki.files import read_certs
    from forebay.network.pki.identity import verify
    from forebay.observe.ledger_queries import is_roster, replay, verify_steps

    if is_roster(args.file):
        return _print_verified(
            args, vars(verify_steps(args.file)), "each sample was used once by the steps that counted"
        )
    root = args.root or (args.identity and args.identity / "root-cert.pem")
    certify = partial(verify_certificate, root=der_of(read_certs(root)[0])) if root else partial(peer_of)
    replayed = replay if args.samples else None
    report = verify_ledger(args.file, args.key, verify, replayed, args.max_set_aside, certify)
    success = f"chain, signatures and coverage hold; signed by scheduler {report.scheduler} (--key HEX demands a key)"
    success += "; workers are certified" if root else "; keys were not checked against a network (--identity, --root)"
    return _print_verified(args, {**vars(report), "certified": bool(root)}, success)


def _print_verified(args: Namespace, report: dict[str, Any], success: str) -> bool:
    lines = [f"problem: {problem}" for problem in report["problems"]]
    for e in report["epochs"]:
        line = "epoch {epoch}: {samples:,} samples used, {missing:,} missing, {repeated:,} repeated".format(**e)
        lines += [line + "".join(f", {e[k]:,} {k.replace('_', ' ')}" for k in ("set_aside", "redone") if k in e)]
    for kind in ("missing", "repeated"):
        intervals = report.get(kind, [])
        lines += [
            f"{kind}: epoch {part['epoch']}, slice {part['slice']}, samples [{part['start']:,}, {part['stop']:,})"
            for part in intervals[:10]
        ]
        if len(intervals) > 10:
            lines += [f"{kind}: and {len(intervals) - 10:,} more intervals; --json prints them"]
    print_result(args, report, *lines, f"ok: {success}" if report["ok"] else "NOT ok")
    return not report["ok"]


def _blame(args: Namespace) -> None:
    from forebay.ledger.index import open_index
    from forebay.observe.ledger_queries import blame_step, who_saw

    if (args.step is None) == (args.document is None):
        raise UsageError("ledger blame: expected one of --step N and --document ID.")
    index = open_index(args.file)
    documents = _documents(args, index)
    if args.step is not None:
        parts = blame_step(index, args.step, worker=args.worker, documents=documents)
        print_result(args, {"step": args.step, "parts": list(map(asdict, parts))}, *map(_describe_share, parts))
        return
    if documents is None:
        raise UsageError("ledger blame: expected --dataset DIR beside --document, got none.")
    ranges = [item for number in documents.find(args.document) for item in documents.token_ranges(number)]
    parts = [part for token_range in ranges for part in who_saw(index, *token_range)]
    tokens = [{"slice": slice_, "start": start, "stop": stop} for slice_, start, stop in ranges]
    lines = ["slice {slice}, tokens [{start:,}, {stop:,})".format(**piece) for piece in tokens]
    lines += [f"{_headline(part)}: samples {', '.join(map(str, part.samples))}" for part in parts]
    uses = list(map(asdict, parts))
    print_result(args, {"tokens": tokens, "uses": uses}, *lines, *([] if parts else ["no worker used it"]))


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


def _describe_share(part: BatchShare) -> str:
    samples = ", ".join(map(str, part.samples[:16])) + (", …" if len(part.samples) > 16 else "")
    lines = [_headline(part), f"  {len(part.samples):,} samples: {samples}"]
    for document in part.documents:
        source = f"  {document.id}" + (f" of {document.source}" if document.source else "") if document.id else ""
        tokens = f"slice {document.slice} tokens [{document.start:,}, {document.stop:,})"
        lines += [f"  document #{document.document}  {tokens}{source}"]
        lines += [f"    {document.text}"] if document.text else []
    return "\n".join(lines)


def _export(args: Namespace) -> None:
    from forebay.ledger.index import open_index
    from forebay.observe.ledger_queries import export_uses

    index = open_index(args.file)
    count = export_uses(index, args.out, args.format, sample_ids=args.sample_ids)
    print_result(args, {"uses": count, "out": str(args.out)}, f"{count:,} uses to {args.out}")


def _launch(args: Namespace) -> None:
    values = {}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"launch: --set: expected KEY=VALUE, such as name=train, got {text!r}.")
        values[key] = value
    paths = write(args.directory, render(args.kind, values, args.command))
    name = values.get("name", KINDS[args.kind].settings["name"].default)
    steps = [step.format(out=shlex.quote(str(args.directory)), name=name) for step in KINDS[args.kind].next_steps]
    files = list(map(str, paths))
    print_result(args, {"files": files, "next": steps}, *files, *(f"next: {step}" for step in steps))


def _settings() -> str:
    lines = []
    for kind, about in KINDS.items():
        lines += ["", f"settings of {kind}:"]
        lines += [f"  {f'{key}={item.default}':<34}{item.about}" for key, item in about.settings.items()]
    return "\n".join(lines)


def add_verbs(verb: Any, group: Any) -> None:
    p = verb("top", _top, "show a job, a node, a run or a preparation in the terminal, live")
    p.add("target", _TARGET, "TARGET")
    p.add_flag("--replay", "play the record of a run from its start")
    add_identity(p)
    p = verb("dashboard", _dashboard, "serve a page that shows it in a browser, live", log_level="info")
    p.add("target", _TARGET, "TARGET")
    p.add("--listen", "address of the page; port 0: a free one", "HOST:PORT", "127.0.0.1:7480")
    p.add("--record", "record the run; `top --replay DIR` opens it later (default: none)", folder)
    p.add_flag("--allow-plain-http", "allow other addresses than this machine's")
    add_identity(p)

    verbs = group("ledger", "verify and query which worker used which samples")
    p = verb("verify", _verify, "verify that each sample of an epoch was used exactly once", verbs)
    p.add("file", "a ledger, or a coordinator's state", Path)
    p.add("--key", "the scheduler's public key (default: the one in the file)", public_key)
    add_identity(p)
    p.add("--root", "root certificate of the network (default: of --identity)", file)
    p.add("--max-set-aside", "allowed of an epoch's samples (default: 0)", share, 0.0)
    p.add_flag("--samples", "also verify sample ids: recompute the order of every use")

    p = verb("blame", _blame, "from a step to its samples and documents, or from a document to its workers", verbs)
    p.add("file", "the ledger", Path)
    p.add("--step", "step of the worker (this or --document)", int, metavar="N")
    p.add("--document", "source id, or #NUMBER in the dataset (this or --step)", "ID")
    p.add("--worker", "its name, or a prefix of its peer id (default: all)", "NAME", "")
    p.add("--dataset", "the job's dataset (default: none)", "DIR")

    p = verb("export", _export, "write the uses as a table", verbs)
    p.add("file", "the ledger", Path)
    p.add("--out", "the file to write (required)", file, required=True)
    p.add("--format", "format of the table", ["jsonl", "parquet"], "jsonl")
    p.add_flag("--sample-ids", "add a column with the ids of the samples")

    p = verb("launch", _launch, "write the files that run Forebay on a cluster or in containers, filled in")
    p.takes_command, p.usage = True, "forebay launch KIND [DIR] [OPTIONS] [-- COMMAND ARG ...]"
    p.epilog = f"COMMAND: the program of every rank or worker, such as `python train.py`\n{_settings()}"
    p.add("kind", ", ".join(KINDS), "KIND", choices=list(KINDS))
    p.add("directory", "for the files (default: here)", folder, Path(), nargs="?")
    add_settings(p, "name=train")
