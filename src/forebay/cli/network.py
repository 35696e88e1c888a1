"""Commands on the network: dht, serve, find, probe."""

import argparse
import contextlib
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.cli.arguments import add_limits, address, positive, seconds, show, size
from forebay.cli.running import add_node, ask, joined_network, listen_at, log, on_stop, ready, until_stopped
from forebay.network.retry import log_while_waiting


def _probe(args: argparse.Namespace) -> int:
    body, peer = ask(args, args.address, "/v1/status", timeout_s=args.timeout)
    draining = isinstance(body, dict) and bool(body.get("draining"))
    show({"address": args.address, "peer_id": peer.peer_id, "name": peer.name, "healthy": not draining}, args.json)
    return 1 if draining else 0


def _dht(args: argparse.Namespace) -> int:
    from forebay.network.dht import LibtorrentDht

    host, port = address(args.listen)
    with contextlib.ExitStack() as nodes:
        bootstrap = [address(a) for a in args.bootstrap]
        first = nodes.enter_context(contextlib.closing(LibtorrentDht(host, port, bootstrap)))
        for _ in range(args.nodes - 1):
            nodes.enter_context(contextlib.closing(LibtorrentDht(host, 0, [(host, first.port)])))
        ready(args, role="dht", address=f"{host}:{first.port}")
        until_stopped(args)
    return 0


def _serve(args: argparse.Namespace) -> int:
    from forebay.data_node import DataNode
    from forebay.dataset.reader import open_dataset
    from forebay.network.access import AccessPolicy
    from forebay.network.limits import ServerLimits, Throttle, parse_limits
    from forebay.storage.origins import open_remote

    access = AccessPolicy.load(args.access) if args.access is not None else None
    with log_while_waiting(log, lambda: f"the datasets {', '.join(args.datasets)}"):
        datasets = [
            open_remote(path) if "://" in path and not path.startswith("file://") else open_dataset(path)
            for path in args.datasets
        ]
    limits, stop = parse_limits(ServerLimits(), args.limit), threading.Event()
    on_stop(stop, args)
    with joined_network(args, stop) as (identity, discovery):
        host, port = listen_at(args, discovery)
        with DataNode(
            identity, datasets, host, port, discovery, ttl_s=args.ttl, access=access,
            throttle=Throttle(args.upload_limit), limits=limits,
        ) as node:  # fmt: skip
            names = {d.name: d.id for d in datasets}
            ready(args, role="data node", address=node.address, peer_id=identity.peer_id, datasets=names)
            until_stopped(args, stop=stop)
        if args.json:
            print(json.dumps(node.status()), flush=True)
    return 0


def _find(args: argparse.Namespace) -> int:
    from forebay.network.client import Client
    from forebay.network.discovery import find_providers

    def what() -> str:
        return f"data nodes of {args.name!r}; the DHT was asked and names no address that answers"

    with joined_network(args) as (identity, discovery), log_while_waiting(log, what):
        claims = find_providers(discovery, Client(identity), identity.network_id, args.name, timeout_s=args.timeout)
    providers = [
        {"name": c.name, "dataset_id": c.dataset_id, "slices": c.num_slices, "peer_id": c.peer_id, "address": c.address}
        for c in claims
    ]
    if args.json:
        print(json.dumps(providers))
    for claim in providers if not args.json else []:
        print("{name}  {dataset_id}  {slices} slices  {peer_id} at {address}".format(**claim))
    if not providers:
        print(
            f"forebay: no data node announces a dataset named {args.name!r} in this network. "
            "Check the name, that its data node runs (forebay serve), and that this node is not revoked",
            file=sys.stderr,
        )
        return 1
    if len({c.dataset_id for c in claims}) > 1:
        print(f"forebay: {args.name!r} is the name of several datasets here; they are never mixed", file=sys.stderr)
    return 0


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    p = add_node(verb, "dht", _dht, "nodes of the Kademlia DHT that others start from", network=False)
    p.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="of the first node (UDP); port 0: a free one"
    )
    p.add_argument("--nodes", type=positive, default=1, metavar="N", help="how many, the others at free ports")
    p = add_node(verb, "serve", _serve, "a data node: serve datasets and announce them")
    p.add_argument("datasets", nargs="+", metavar="DATASET", help="a directory, or a URL that members fetch from too")
    p.add_argument("--listen", metavar="HOST:PORT", help="default: a free port where our DHT node listens")
    p.add_argument("--ttl", type=seconds, default=60.0, metavar="S", help="how long a claim holds without renewal")
    p.add_argument("--upload-limit", type=size, metavar="BYTES", help="bytes a second to all members (default: none)")
    add_limits(p)
    p.add_argument("--access", type=Path, metavar="FILE", help="who may read what, and how much a day (TOML)")
    p = add_node(verb, "find", _find, "who has a dataset", timeout_s=10.0, timeout_of="an answer of the DHT")
    p.add_argument("name", help="the dataset's")
    p = verb("probe", _probe, "whether a scheduler or data node answers and takes requests: exit 0 or 1")
    p.add_argument("address", metavar="HOST:PORT", help="of a scheduler or data node")
    p.add_argument("--network", type=Path, required=True, metavar="DIR", help="the asking node's directory")
    p.add_argument("--timeout", type=seconds, default=2.0, metavar="S", help="longest wait for its answer")
