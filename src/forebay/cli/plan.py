"""`forebay plan`: what a run will need."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import positive, rate, seconds, size
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.load.resources import Job


def _shards(args: argparse.Namespace) -> int:
    """What `SharedShardedDatasetManager` needs: the shard in use, the next, a third while ranks let go of the old."""
    from forebay.load.shards import COMMON_SHARDS
    from forebay.units import words_of_bytes, words_of_seconds

    if args.dataset is not None or args.bytes is None or args.slice_bytes is None:
        raise UsageError("plan --shards: expected --bytes of all shards and --slice-bytes of one. Give both.")
    one, count = args.slice_bytes, -(-args.bytes // args.slice_bytes)
    start = min(3, count) * one
    told: dict[str, Any] = {
        "shards": count, "shard_bytes": one, "in_use_bytes": min(2, count) * one, "start_bytes": start,
        "shard_fetch_s": one / args.bandwidth if args.bandwidth else None, "refused": [], "warnings": [],
    }  # fmt: skip
    room = None if args.volume is None else _volume(args.volume)
    if room is not None and room < start:
        told["refused"].append(f"volume: expected room for {min(3, count)} shards, {start} bytes, got {room} bytes.")
    elif room is not None and room < COMMON_SHARDS * one and count > 3:
        told["warnings"].append(f"volume: {words_of_bytes(room)}; runs like this have {COMMON_SHARDS:.1f} shards.")
    told["ok"] = not told["refused"]
    if args.json:
        print(json.dumps(told))
        return int(not told["ok"])
    print(f"shards         {count} of {words_of_bytes(one)}")
    print(f"disk           {words_of_bytes(told['in_use_bytes'])}: the shard in use and the next")
    print(f"at the start   {words_of_bytes(start)}, with a third while ranks let go of the old")
    if told["shard_fetch_s"] is not None:
        print(f"shard comes in {words_of_seconds(told['shard_fetch_s'])}: training waits at a swap if it lasts less")
    for kind in ("warning", "refused"):
        for text in told[kind if kind == "refused" else "warnings"]:
            print(f"{kind}: {text}")
    print("ok" if told["ok"] else "NOT ok: this run would not do what was asked")
    return int(not told["ok"])


def _plan(args: argparse.Namespace) -> int:
    if args.shards:
        return _shards(args)
    from forebay.observe.plan import make_plan, plan_model, words

    model = None
    if args.model_size is not None:
        memory = _memory() if args.device_mem is None else args.device_mem
        model = plan_model(args.model_size, args.seq_len, args.vocab_size, memory)
    told: dict[str, Any] = {}
    ok = model is None or model.ok
    if model is None or args.dataset is not None or args.bytes is not None:
        plan = make_plan(_job(args))
        told, ok = plan.to_json(), ok and plan.ok
        if not args.json:
            print(words(plan))
    if model is not None and not args.json:
        print(model.words())
    if args.json:
        print(json.dumps({**told, "ok": ok, **({} if model is None else {"model": vars(model)})}))
    return 0 if ok else 1


def _job(args: argparse.Namespace) -> Job:
    from forebay.load.resources import Job

    if (args.dataset is None) == (args.bytes is None):
        raise UsageError("plan: expected a dataset, or --bytes and --slice-bytes of one to come. Give one of them.")
    slice_bytes, slice_samples, name, seq_len = _of_dataset(args) if args.dataset else _of_sizes(args)
    volume_bytes = None if args.volume is None else _volume(args.volume)
    given = {name: value for name, value in vars(args).items() if name in Job.__dataclass_fields__}
    given |= {
        "slice_bytes": slice_bytes, "slice_samples": slice_samples, "name": name, "seq_len": seq_len,
        "ranks_per_node": min(args.ranks_per_node, args.world_size), "volume_bytes": volume_bytes,
        "mem_bytes": args.mem if args.mem is not None else _memory(), "piece_bytes": args.chunk_bytes,
        "whole_in_memory": args.volume == "ram",
    }  # fmt: skip
    return Job(**given)


def _of_dataset(args: argparse.Namespace) -> tuple[Any, Any, str, int | None]:
    from forebay.load.samples import plan_samples
    from forebay.load.sources import open_dataset

    dataset = open_dataset(args.dataset, args.network)
    seq_len = args.seq_len if dataset.manifest.layout == "tokens" else None
    return dataset.table.bytes, plan_samples(dataset, seq_len).counts, dataset.name, seq_len


def _of_sizes(args: argparse.Namespace) -> tuple[Any, Any, str, int | None]:
    import numpy as np

    if args.slice_bytes is None:
        raise UsageError("plan: expected --slice-bytes beside --bytes. Say how large a slice will be.")
    full, rest = divmod(args.bytes, args.slice_bytes)
    sizes = np.array([args.slice_bytes] * full + [rest] * (rest > 0), np.int64)
    return sizes, sizes // args.token_bytes // args.seq_len, "", args.seq_len


def _volume(text: str) -> int:
    """What a disk has: of a directory, what is free there; of a size, that."""
    if text == "ram":
        return min(shutil.disk_usage("/dev/shm").free, _memory())
    path = Path(text)
    if not path.exists() and text[:1].isdigit():
        return size(text)
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _memory() -> int:
    """Of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    about = "disk, time and memory that a run will need, before it starts; exit 1 if it cannot be"
    p = verb("plan", _plan, about)
    p.add_argument("dataset", nargs="?", help="a directory or URL; only its description is read")
    p.add_argument("--bytes", type=size, help="of a dataset to come, instead: 2TB")
    p.add_argument("--slice-bytes", type=size, help="200GB")
    p.add_argument("--shards", action="store_true", help="plan SharedShardedDatasetManager: --slice-bytes is a shard's")
    p.add_argument("--token-bytes", type=positive, default=2, help="with --bytes: 2 (default) or 4 a token")
    p.add_argument("--seq-len", type=positive, default=2048, help="tokens a sample")
    p.add_argument("--global-batch", type=positive, default=512, help="samples of all ranks (default: 512)")
    p.add_argument("--world-size", type=positive, default=1, metavar="RANKS", help="ranks of the run")
    p.add_argument("--ranks-per-node", type=positive, default=1, metavar="N", help="ranks that share a cache")
    p.add_argument("--epochs", type=positive, default=1, help="passes over the dataset")
    p.add_argument("--seed", type=int, default=0, help="of the order")
    p.add_argument("--lanes", type=positive, help="default: the loader's, or as many as fit")
    p.add_argument(
        "--window", type=positive, metavar="SAMPLES", help="samples of a lane that are mixed (default: the loader's)"
    )
    p.add_argument(
        "--head", type=int, metavar="SAMPLES", help="samples that come from one slice at first (default: the loader's)"
    )
    p.add_argument("--cache-bytes", type=size, help="450GB; default: what the plan proposes")
    p.add_argument("--volume", metavar="DIR|SIZE|ram", help="the disk that the cache shall lie on")
    p.add_argument("--keep", choices=["budget", "window", "all"], default="budget", help="which slices the cache keeps")
    p.add_argument("--max-fetch-ratio", type=float, default=1.5, metavar="N",
                   help="refuse to fetch more than N times the dataset in an epoch (default: 1.5; 0: any)")  # fmt: skip
    p.add_argument("--mem", type=size, help="of a node (default: this machine's)")
    p.add_argument("--model-size", choices=["tiny", "small", "medium"], help="of the worker: the batch that fits")
    p.add_argument("--device-mem", type=size, help="of a device, for --model-size (default: this machine's)")
    p.add_argument("--vocab-size", type=positive, default=50257, help="for --model-size (default: GPT-2's)")
    p.add_argument("--bandwidth", type=rate, help="of a node: 1Gb/s, 125MB/s")
    p.add_argument("--step-s", type=seconds, help="a step of training, in seconds, without waiting")
    p.add_argument("--connections", type=positive, default=16, help="requests at once")
    p.add_argument("--chunk-bytes", type=size, default=8 << 20, help="the most that one request asks for")
    p.add_argument("--prefetch", type=int, default=0, help="batches made ahead")
    p.add_argument("--network", metavar="DIR", help="for forebay:// URLs: the node's directory")
