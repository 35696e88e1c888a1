"""The command of a worker."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forebay.cli.arguments import add_from_urls, address, positive, show, size
from forebay.cli.running import add_node, joined_network, on_stop
from forebay.errors import UsageError
from forebay.toml import read_toml


def _work(args: argparse.Namespace) -> int:
    from forebay.worker.lease_worker import run_worker

    settings = _work_settings(args)
    stop = threading.Event()
    on_stop(stop, args)
    # A scheduler named by address is reached without the DHT.
    with joined_network(args, stop, required=settings["scheduler"] is None) as (identity, discovery):
        report = run_worker(
            identity,
            settings["name"],
            discovery=discovery,
            scheduler=settings["scheduler"],
            cache_dir=Path(settings["cache_dir"]),
            cache_bytes=int(settings["cache_bytes"]),
            batch_size=int(settings["batch_size"]),
            trainer=settings["trainer"],
            share=_share_at(settings["share"], discovery.host),
            upload_bytes_per_s=settings["upload_limit"],
            patience_s=args.timeout,
            from_urls=settings["from_urls"] or "",
            on_progress=lambda p: print(json.dumps(p) if args.json else _progress_line(p), flush=True),
            stop=stop,
        )
    if args.json:
        print(json.dumps({"report": asdict(report)}), flush=True)
    else:
        show(asdict(report), False)
    return 0


def _share_at(share: str | None, host: str) -> str | None:
    """The address to share cached slices at: `--share`, else a free port at the DHT node's address."""
    if share == "no":
        return None
    if share is not None:
        address(f"0.0.0.0{share}" if share.startswith(":") else share)
    return share or f"{host}:0"


def _work_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Settings: flags, else the file's [work] table, else defaults."""
    settings: dict[str, Any] = {"cache_dir": "./forebay-cache", "cache_bytes": 4 << 30, "batch_size": 8}
    settings |= {"trainer": "auto", "name": None, "scheduler": None, "network": None}
    settings |= dict.fromkeys(("share", "upload_limit", "from_urls"))
    if args.config:
        table = read_toml(args.config).get("work", {})
        if unknown := sorted(set(table) - set(settings)):
            raise UsageError(f"{args.config}: unknown key work.{unknown[0]}. Known: {', '.join(sorted(settings))}")
        settings |= table
    settings |= {k: v for k in settings if (v := getattr(args, k, None)) is not None}
    if not settings["name"] and not settings["scheduler"]:
        raise UsageError(
            "work: expected a job, got none. Give its name (forebay work NAME, or work.name in the --config file), "
            "or --scheduler HOST:PORT for any job of that scheduler."
        )
    settings["name"] = settings["name"] or ""
    args.network = settings["network"]
    return settings


def _progress_line(p: dict[str, Any]) -> str:
    loss = "" if p.get("loss") is None else f"  loss {p['loss']:.3f}"
    return "step {step:,}  {tokens:,} tokens  {tokens_per_s:,.0f} tokens/s  waited {wait_share:.1%}".format(**p) + loss


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    about = "run a worker: lease slices, download, verify, train, acknowledge, share"
    waits = "a bootstrap node, then for a scheduler or data nodes that do not answer"
    p = add_node(verb, "work", _work, about, timeout_s=60.0, timeout_of=waits)
    p.add_argument("name", nargs="?", help="name of the job; without it: any job of --scheduler")
    p.add_argument("--config", type=Path, metavar="F", help="TOML with a [work] table; flags override it")
    p.add_argument("--scheduler", metavar="HOST:PORT", help="address of the scheduler (default: found in the DHT)")
    p.add_argument("--cache-dir", metavar="DIR", help="directory for verified slices (default: ./forebay-cache)")
    p.add_argument("--cache-bytes", type=size, metavar="BYTES", help="budget of the cache (default: 4GiB)")
    p.add_argument("--batch-size", type=positive, metavar="N", help="samples per step (default: 8)")
    p.add_argument(
        "--trainer", metavar="T",
        help="the trainer: count (of tokens), none, or FILE.py:NAME, your class; default: auto, count or none",
    )  # fmt: skip
    p.add_argument(
        "--share",
        metavar="HOST:PORT|no",
        help="address to share cached slices at; :PORT for all addresses; default: a free port at the DHT node's "
        "address",
    )
    p.add_argument("--upload-limit", type=size, metavar="BYTES", help="upload limit in bytes per second")
    add_from_urls(p)
