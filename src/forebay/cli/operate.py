"""Commands around a run: plan and simulate before it; top, dashboard, ledger, launch."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import (
    add_settings,
    address,
    file,
    folder,
    positive,
    print_result,
    public_key,
    rate,
    seconds,
    share,
    show,
    size,
    validate,
)
from forebay.cli.running import check_plain_http, load_identity, log, ready, stop_event, until_stopped
from forebay.errors import MALFORMED, StateError, UsageError
from forebay.launch import KINDS, render, write
from forebay.machine import memory_bytes
from forebay.storage.retry import log_while_waiting
from forebay.toml import read_toml

if TYPE_CHECKING:
    from forebay.dataset.documents import Documents
    from forebay.ledger.index import LedgerIndex
    from forebay.observe.ledger_queries import BatchShare
    from forebay.observe.plan import DatasetSpec, RunSpec
    from forebay.observe.sources import Source
    from forebay.order.mixture import Weights

_TARGET = (
    "HOST:PORT of a scheduler, coordinator or data node; http://HOST:PORT; or a folder: a record, or prepare's output"
)


def _open(args: Namespace, stack: ExitStack, command: str) -> Source:
    from forebay.network.client import Client
    from forebay.observe.sources import open_source

    def client() -> Client:
        return stack.enter_context(Client(load_identity(args, command, "viewer")))

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
                f"top: the views of {args.target} are not of this version ({type(error).__name__}: {error})."
            ) from error


def _dashboard(args: Namespace) -> None:
    from forebay.observe.dashboard import Dashboard
    from forebay.observe.record import RunRecord

    stop = stop_event()
    with ExitStack() as stack:
        source = _open(args, stack, "dashboard")
        source.poll()  # What cannot be shown is an error here.
        host, port = address(args.listen)
        check_plain_http(args, host, "read the page", "Use 127.0.0.1 and an SSH tunnel")
        record = None if args.record is None else RunRecord(args.record)
        page = stack.enter_context(Dashboard(source, host, port, record=record).start())
        ready(args, role="dashboard", url=page.url)
        until_stopped(stop)


def _reported(read: Callable[[Namespace], Any]) -> Callable[[Namespace], Any]:
    """Return a command that reads a ledger, which may take minutes, and says so."""

    def run(args: Namespace) -> Any:
        with log_while_waiting(log, lambda: f"the end of {args.file}"):
            return read(args)

    return run


@_reported
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
    root = args.identity and args.identity / "root-cert.pem"
    certify = partial(verify_certificate, root=der_of(read_certs(root)[0])) if root else partial(peer_of)
    replayed = replay if args.samples else None
    report = verify_ledger(args.file, args.key, verify, replayed, args.max_set_aside, certify)
    success = f"chain, signatures and coverage hold; signed by scheduler {report.scheduler} (--key HEX demands a key)"
    success += "; workers are certified" if root else "; keys were not checked against a network (--identity)"
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
    failure = "NOT ok"
    if not report["problems"] and not any(epoch["repeated"] for epoch in report["epochs"]):
        failure += ": samples are not used. While the job runs this is no fault: verify again at its end"
    print_result(args, report, *lines, f"ok: {success}" if report["ok"] else failure)
    return not report["ok"]


@_reported
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


@_reported
def _export(args: Namespace) -> None:
    from forebay.ledger.index import open_index
    from forebay.observe.ledger_queries import export_uses

    count = export_uses(open_index(args.file), args.out, sample_ids=args.sample_ids)
    print_result(args, {"uses": count, "out": str(args.out)}, f"{count:,} uses to {args.out}")


def _launch(args: Namespace) -> None:
    values = {}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"launch: --set: expected KEY=VALUE, such as name=train, got {text!r}.")
        values[key] = value
    settings = KINDS[args.kind].settings
    filled = {key: setting.default or "" for key, setting in settings.items()} | values
    for key, setting in settings.items():
        if setting.is_path and filled[key] and not Path(filled[key]).is_absolute():
            values[key] = f"./{os.path.relpath(filled[key], args.directory)}"
    paths = write(args.directory, render(args.kind, values, args.command))
    words = {key: shlex.quote(value) for key, value in filled.items()} | {"out": shlex.quote(str(args.directory))}
    steps = [step.format(**words) for step in KINDS[args.kind].next_steps]
    files = list(map(str, paths))
    print_result(args, {"files": files, "next": steps}, *files, *(f"next: {step}" for step in steps))


def _settings() -> str:
    lines = []
    for kind, about in KINDS.items():
        lines += ["", f"settings of {kind}:"]
        defaults = {key: f"{key}={item.default or ''}" for key, item in about.settings.items()}
        lines += [f"  {defaults[key]:<34}{item.about}" for key, item in about.settings.items()]
    return "\n".join(lines)


_BYTES_PER_ID = 512  # of tokens, of which a sample has 2048 of two bytes


def _plan_shards(args: Namespace) -> bool:
    """Plan `SharedShardedDatasetManager`: the shard in use, the next, and a third while ranks release the old one."""
    from forebay.load.shard_files import SharedShards, num_requests
    from forebay.load.shards import COMMON_SHARDS
    from forebay.order.shard_windows import STEPS_PER_SHARD
    from forebay.units import format_bytes, format_seconds, numbered

    if args.dataset is None and (args.bytes is None or args.slice_bytes is None):
        raise UsageError("plan --shards: expected their URL, or --bytes of all and --slice-bytes of one. Give them.")
    if args.dataset is None:
        sizes = [(args.slice_bytes, args.slice_bytes // _BYTES_PER_ID)] * -(-args.bytes // args.slice_bytes)
        num_names = 2
        all_bytes, shard_bytes = args.bytes, args.slice_bytes
    else:
        shards = SharedShards.open(args.dataset).shards
        sizes = [(shard.tokens.num_bytes, shard.ids.num_bytes) for shard in shards]
        num_names = 2 + shards[0].ids.name.endswith(".bin")
        all_bytes, shard_bytes = sum(map(sum, sizes)), max(map(sum, sizes))
    count, num_nodes = len(sizes), args.world_size // min(args.ranks_per_node, args.world_size)
    passes = args.epochs if count > 2 else 1  # Two stay on the disk.
    num_steps = args.steps_per_shard or STEPS_PER_SHARD
    start_bytes = min(3, count) * shard_bytes
    fetch_s = shard_bytes / args.bandwidth if args.bandwidth else None
    stall_s = None if fetch_s is None or args.step_s is None else max(0.0, fetch_s - num_steps * args.step_s)
    plan = {
        "shards": count, "shard_bytes": shard_bytes, "steps_per_shard": num_steps,
        "in_use_bytes": min(2, count) * shard_bytes,
        "fetched_bytes": passes * all_bytes,
        "requests": num_nodes * passes * num_requests(sizes, num_names),
        "start_bytes": start_bytes, "shard_fetch_s": fetch_s, "swap_stall_s": stall_s, "refused": [], "warnings": [],
    }  # fmt: skip
    free = None if args.disk is None else _free_bytes(args.disk)
    if free is not None and free < start_bytes:
        plan["refused"].append(f"disk: expected {start_bytes} bytes for {min(3, count)} shards, got {free} bytes.")
    elif free is not None and free < COMMON_SHARDS * shard_bytes and count > 3:
        plan["warnings"].append(f"disk: {format_bytes(free)}; runs like this have {COMMON_SHARDS:.1f} shards.")
    plan["ok"] = not plan["refused"]
    lines = [
        f"shards         {count} of {format_bytes(shard_bytes)}",
        f"disk           {format_bytes(plan['in_use_bytes'])}: the shard in use and the next",
        f"at the start   {format_bytes(start_bytes)}, with a third while ranks release the old one",
        f"fetched        {format_bytes(plan['fetched_bytes'])} by a node in {numbered(args.epochs, 'epoch')}",
        f"requests       about {plan['requests']:,} by all nodes",
    ]
    if fetch_s is not None:
        lines += [f"shard comes in {format_seconds(fetch_s)}: training waits at a swap if it lasts less"]
    if stall_s is not None:
        lines += [f"swap waits     {format_seconds(stall_s)}, with {num_steps} steps a shard"]
    lines += [f"{kind.rstrip('s')}: {text}" for kind in ("warnings", "refused") for text in plan[kind]]
    print_result(args, plan, *lines, "ok" if plan["ok"] else "NOT ok: this run cannot work as requested")
    return not plan["ok"]


def _plan(args: Namespace) -> bool:
    if args.shards:
        return _plan_shards(args)
    from forebay.observe.plan import format_model, format_plan, make_plan, plan_model

    result, lines = dict[str, Any](ok=True), []
    if args.model_size is None or args.dataset is not None or args.bytes is not None:
        plan = make_plan(_job(args))
        result, lines = plan.to_json(), [format_plan(plan)]
    if args.model_size is not None:
        model = plan_model(args.model_size, args.seq_len, _GPT2_VOCABULARY, args.memory or memory_bytes())
        result |= {"ok": result["ok"] and model["largest_batch"] > 0, "model": model}
        lines.append(format_model(model))
    print_result(args, result, *lines)
    return not result["ok"]


_GPT2_VOCABULARY = 50257


def _job(args: Namespace) -> RunSpec:
    from forebay.observe.plan import RunSpec

    if (args.dataset is None) == (args.bytes is None):
        raise UsageError("plan: expected a dataset, or --bytes and --slice-bytes of a future one. Give one of them.")
    datasets, seq_len, weights = _read_datasets(args) if args.dataset else ([_from_sizes(args)], args.seq_len, None)
    return RunSpec(
        datasets, args.global_batch_size, seq_len, weights, args.world_size,
        min(args.ranks_per_node, args.world_size), epochs=args.epochs, cache_bytes=args.cache_bytes,
        volume_bytes=None if args.disk is None else _free_bytes(args.disk), mem_bytes=args.memory or memory_bytes(),
        bandwidth=args.bandwidth, step_s=args.step_s, whole_in_memory=args.disk == "ram",
    )  # fmt: skip


def _read_datasets(args: Namespace) -> tuple[list[DatasetSpec], int | None, Weights | None]:
    from forebay.load.samples import plan_samples
    from forebay.load.sources import as_mixture, open_datasets
    from forebay.observe.plan import DatasetSpec

    mixture = as_mixture(args.dataset)
    if mixture is None:
        datasets = open_datasets({"": args.dataset}, args.identity)
    else:
        datasets = open_datasets(
            mixture.datasets, args.identity, allow_different_tokenizers=mixture.allow_different_tokenizers
        )
    seq_len = args.seq_len if next(iter(datasets.values())).manifest.layout == "tokens" else None
    specs = [
        DatasetSpec(of.table.bytes, plan_samples(of, seq_len).counts, of.table.chunk_bytes, name or of.name)
        for name, of in datasets.items()
    ]
    return specs, seq_len, None if mixture is None else mixture.plan


def _from_sizes(args: Namespace) -> DatasetSpec:
    import numpy as np

    from forebay.observe.plan import DatasetSpec

    if args.slice_bytes is None:
        raise UsageError("plan: expected --slice-bytes beside --bytes. Give the size of a slice.")
    full, rest = divmod(args.bytes, args.slice_bytes)
    sizes = np.array([args.slice_bytes] * full + [rest] * (rest > 0), np.int64)
    return DatasetSpec(sizes, sizes // 2 // args.seq_len)


def _free_bytes(text: str) -> int:
    """The free bytes of a directory's disk or of memory (`ram`); a size stands for itself."""
    if text == "ram":
        return min(shutil.disk_usage("/dev/shm").free, memory_bytes())
    path = Path(text)
    if not path.exists() and text[:1].isdigit():
        return size(text)
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _simulate(args: Namespace) -> bool:
    from forebay.observe.progress import bar
    from forebay.simulate import Scenario, simulate

    options = ("workers", "slices", "churn", "seed")
    values = read_toml(args.scenario) if args.scenario else {}
    values |= {name: value for name in options if (value := getattr(args, name)) is not None}
    scenario = validate(Scenario, values, "simulate")
    with bar("simulate", scenario.num_samples, "sample", enabled=not args.json and not args.quiet) as advance:
        result = simulate(scenario, advance)
    show(args, result.to_json())
    if not result.ok:
        settings = ", ".join(f"{k} = {v}" for k, v in scenario.model_dump(exclude_defaults=True).items())
        print(f"simulate: failed with seed {scenario.seed}. Repeat it with: {settings}", file=sys.stderr)
    return not result.ok


def add_verbs(verb: Any, group: Any) -> None:
    p = verb("top", _top, "show a job, a node, a run or a preparation in the terminal, live")
    p.add("target", _TARGET, "TARGET")
    p.add_flag("--replay", "play the record of a run from its start")
    p = verb("dashboard", _dashboard, "serve a page that shows it in a browser, live", log_level="info")
    p.add("target", _TARGET, "TARGET")
    p.add("--listen", "address of the page; port 0: a free one", "HOST:PORT", "127.0.0.1:7480")
    p.add("--record", "record the run; `top --replay DIR` opens it later (default: none)", folder)
    p.add_flag("--allow-plain-http", "allow plain HTTP beyond this machine")

    verbs = group("ledger", "verify and query which worker used which samples")
    p = verb("verify", _verify, "verify that each sample of an epoch was used exactly once", verbs)
    p.add("file", "a ledger, or a coordinator's state", Path)
    p.add("--key", "the scheduler's public key (default: the one in the file)", public_key)
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
    p.add("--out", "the file to write: .parquet, or else JSON lines (required)", file, required=True)
    p.add_flag("--sample-ids", "add a column with the ids of the samples")

    p = verb("launch", _launch, "write the files that run Forebay on a cluster or in containers, filled in")
    p.takes_command, p.usage = True, "forebay launch KIND [DIR] [OPTIONS] [-- COMMAND ARG ...]"
    p.epilog = f"COMMAND: the program of every rank or worker, such as `python train.py`\n{_settings()}"
    p.add("kind", ", ".join(KINDS), "KIND", choices=list(KINDS))
    p.add("directory", "for the files (default: here)", folder, Path(), nargs="?")
    add_settings(p, "name=train")

    about = "compute the disk, time and memory that a run needs, before it starts; exit 1 if it cannot work"
    p = verb("plan", _plan, about)
    p.add("dataset", "a directory or URL, or a mixture's TOML file; only descriptions are read", nargs="?")
    p.add("--bytes", "size of a future dataset: 2TB (default: of DATASET)", size)
    p.add("--slice-bytes", "size of its slices: 1GB (required with --bytes)", size)
    p.add_flag("--shards", "plan SharedShardedDatasetManager: DATASET is the URL of shards")
    p.add("--steps-per-shard", "with --shards: steps of a shard (default: 455)", positive)
    p.add("--seq-len", "tokens per sample", positive, 2048, metavar="L")
    p.add("--global-batch-size", "samples of all ranks per step", positive, 512)
    p.add("--world-size", "number of ranks", positive, 1)
    p.add("--ranks-per-node", "ranks that share a cache", positive, 1)
    p.add("--epochs", "passes over the dataset", positive, 1)
    p.add("--cache-bytes", "budget of a node's cache (default: as needed)", size)
    p.add("--disk", "disk for the cache, or its free bytes (default: any)", "DIR|SIZE|ram")
    p.add("--memory", "memory of a node or device (default: this machine's)", size)
    p.add("--model-size", "plan the batch of a model (default: none)", ["tiny", "small", "medium"])
    p.add("--bandwidth", "of a node: 1Gb/s, 125MB/s (default: not known)", rate)
    p.add("--step-s", "seconds of a training step (default: not known)", seconds)

    p = verb("simulate", _simulate, "run a whole network in virtual time, on the real code; exit 1 if a sample is lost")
    p.add("--workers", "machines that train (default: 1000)", positive)
    p.add("--slices", "slices of the dataset (default: 10000)", positive)
    p.add("--churn", "share of the workers that are killed and replaced (default: 0)", share)
    p.add("--seed", "seed of all random choices (default: 0)", int)
    p.add("--scenario", "TOML with further settings: epochs, links, faults (default: none)", file)
