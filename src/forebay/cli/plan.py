"""Commands before a run: plan (the disk, time and memory that it needs) and simulate (a network in virtual time)."""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import add_identity, file, positive, print_result, rate, seconds, share, show, size, validate
from forebay.errors import UsageError
from forebay.machine import memory_bytes
from forebay.toml import read_toml

if TYPE_CHECKING:
    from forebay.observe.plan import DatasetSpec, RunSpec
    from forebay.order.mixture import Weights


_BYTES_PER_ID = 512  # of tokens, of which a sample has 2048 of two bytes


def _plan_shards(args: Namespace) -> bool:
    """Plan `SharedShardedDatasetManager`: the shard in use, the next, and a third while ranks release the old one."""
    from forebay.load.shard_files import SharedShards, num_requests
    from forebay.load.shards import COMMON_SHARDS
    from forebay.order.shard_windows import STEPS_PER_SHARD
    from forebay.units import format_bytes, format_seconds

    if args.dataset is None and (args.bytes is None or args.slice_bytes is None):
        raise UsageError("plan --shards: expected their URL, or --bytes of all and --slice-bytes of one. Give them.")
    if args.dataset is None:
        sizes, num_names = (
            [(args.slice_bytes, args.slice_bytes // _BYTES_PER_ID)] * -(-args.bytes // args.slice_bytes),
            2,
        )
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
        f"fetched        {format_bytes(plan['fetched_bytes'])} by a node in {args.epochs} epoch"
        + "s" * (args.epochs > 1),
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

    model, result = None, dict[str, Any]()
    if args.model_size is not None:
        model = plan_model(args.model_size, args.seq_len, _GPT2_VOCABULARY, args.memory or memory_bytes())
    ok = model is None or bool(model["largest_batch"])
    if model is None or args.dataset is not None or args.bytes is not None:
        plan = make_plan(_job(args))
        result, ok = plan.to_json(), ok and plan.ok
        if not args.json:
            print(format_plan(plan))
    if args.json:
        print(json.dumps({**result, "ok": ok, **({} if model is None else {"model": model})}))
    elif model is not None:
        print(format_model(model))
    return not ok


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

    options = ("workers", "slices", "churn", "seed", "epochs")
    values = read_toml(args.scenario) if args.scenario else {}
    values |= {name: value for name in options if (value := getattr(args, name)) is not None}
    scenario = validate(Scenario, values, "simulate")
    with bar("simulate", scenario.num_samples, " samples", enabled=not args.json and not args.quiet) as advance:
        result = simulate(scenario, advance)
    show(args, result.to_json())
    if not result.ok:
        settings = ", ".join(f"{k} = {v}" for k, v in scenario.model_dump(exclude_defaults=True).items())
        print(f"simulate: failed with seed {scenario.seed}. Repeat it with: {settings}", file=sys.stderr)
    return not result.ok


def add_verbs(verb: Any, group: Any) -> None:
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
    add_identity(p)

    p = verb("simulate", _simulate, "run a whole network in virtual time, on the real code; exit 1 if a sample is lost")
    p.add("--workers", "machines that train (default: 1000)", positive)
    p.add("--slices", "slices of the dataset (default: 10000)", positive)
    p.add("--churn", "share of the workers that are killed and replaced (default: 0)", share)
    p.add("--seed", "seed of all random choices (default: 0)", int)
    p.add("--epochs", "passes over the dataset (default: 1)", positive)
    p.add("--scenario", "TOML with further settings: links, faults (default: none)", file)
