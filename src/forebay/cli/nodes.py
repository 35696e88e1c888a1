"""Commands on the nodes of a network: dht, serve, find, status."""

import contextlib
import json
import math
import os
import sys
from argparse import Namespace
from typing import Any

from forebay.cli.arguments import add_identity, address, file, positive, print_result, seconds, size
from forebay.cli.running import (
    add_node,
    joined_network,
    listening_address,
    log,
    ready,
    send_request,
    stop_event,
    until_stopped,
)
from forebay.errors import UsageError
from forebay.storage.retry import log_while_waiting


def _status(args: Namespace) -> bool:
    if args.address is None:
        raise UsageError("status: expected HOST:PORT, got none. Give a node's address, or set FOREBAY_STATUS.")
    if args.address.startswith("udp://"):
        from forebay.network.dht import wait_for_bootstrap

        node = address(args.address.removeprefix("udp://"))
        wait_for_bootstrap([node], args.timeout)
        print_result(args, {"healthy": True}, f"DHT node at {args.address}: up")
        return False
    status, peer = send_request(args, args.address, "/v1/status", timeout_s=args.timeout)
    is_healthy = not status.get("draining") and (args.probe or not status.get("unserved"))
    if args.json:  # Also for probes, which repeat this every few seconds: the view imports much.
        print(json.dumps({"healthy": is_healthy, "peer_id": peer.peer_id, "name": peer.name, **status}))
    else:
        from forebay.observe.top import format_view
        from forebay.observe.views import view_of

        print(format_view(view_of(status)), end="")
    return not is_healthy


def _dht(args: Namespace) -> None:
    from forebay.network.dht import LibtorrentDht

    host, port = address(args.listen)
    with contextlib.ExitStack() as nodes:
        bootstrap = [address(a) for a in args.bootstrap]
        first = nodes.enter_context(contextlib.closing(LibtorrentDht(host, port, bootstrap)))
        for _ in range(args.nodes - 1):
            nodes.enter_context(contextlib.closing(LibtorrentDht(host, 0, [(host, first.port)])))
        ready(args, role="dht", address=f"{host}:{first.port}")
        until_stopped(stop_event())


def _serve(args: Namespace) -> None:
    from forebay.data_node import DataNode
    from forebay.dataset.reader import open_dataset
    from forebay.network.access import AccessPolicy
    from forebay.network.limits import ServerLimits, parse_limits
    from forebay.storage.origins import open_remote

    access = AccessPolicy(args.access) if args.access is not None else None
    with log_while_waiting(log, lambda: f"the datasets {', '.join(args.datasets)}"):
        datasets = [
            open_remote(path) if "://" in path and not path.startswith("file://") else open_dataset(path)
            for path in args.datasets
        ]
    limits, stop = (
        parse_limits(ServerLimits(upload_bytes_per_s=args.upload_limit or math.inf), args.limit),
        stop_event(),
    )
    with joined_network(args, stop) as (identity, discovery):
        host, port = listening_address(args, discovery)
        with DataNode(
            identity, datasets, host, port, discovery, ttl_s=args.ttl, access=access, limits=limits,
        ) as node:  # fmt: skip
            names = {d.name: d.id for d in datasets}
            ready(args, role="data node", address=node.address, peer_id=identity.peer_id, datasets=names)
            until_stopped(stop, identity=identity)
        print_result(args, node.status())


def _find(args: Namespace) -> bool:
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
    line = "{name}  {dataset_id}  {slices} slices  {peer_id} at {address}"
    print_result(args, providers, *(line.format(**claim) for claim in providers))
    if not providers:
        print(
            f"forebay: no data node announces a dataset named {args.name!r} in this network. "
            "Check the name, that its data node runs (forebay serve), and that this node is not revoked",
            file=sys.stderr,
        )
    elif len({c.dataset_id for c in claims}) > 1:
        print(f"forebay: {args.name!r} is the name of several datasets here; they are never mixed", file=sys.stderr)
    return not providers


def add_verbs(verb: Any, group: Any) -> None:
    p = verb("dht", _dht, "run nodes of the Kademlia DHT that others start from", log_level="info")
    p.add("--listen", "of the first node (UDP); 0: a free port", "HOST:PORT", "127.0.0.1:0")
    p.add_list("--bootstrap", "DHT node to join through; may be repeated (default: none)", "HOST:PORT")
    p.add("--nodes", "number of nodes, the others at free ports", positive, 1)
    p = add_node(verb, "serve", _serve, "run a data node: serve datasets and announce them")
    p.add("datasets", "a directory, or a URL that members fetch from too", "DATASET", nargs="+")
    p.add("--listen", "address (default: a free port at the DHT node's address)", "HOST:PORT")
    p.add("--ttl", "how long an announcement is valid", seconds, 60.0)
    p.add("--upload-limit", "bytes per second to all (default: no limit)", size)
    p.add_list("--limit", "limit of members (default: docs/reference/http-api.md)", "NAME=NUMBER")
    p.add("--access", "TOML: who may read what, how much a day (default: all)", file)
    p = add_node(verb, "find", _find, "list the data nodes of a dataset", timeout_s=10.0, timeout_of="the DHT")
    p.add("name", "name of the dataset", "NAME")
    about = "show the status of a node; exit 1 if it takes no requests, or no data node serves its job"
    p = verb("status", _status, about)
    about = "scheduler, data node or coordinator; http://… without TLS, udp://… a DHT node (default: FOREBAY_STATUS)"
    p.add("address", about, "HOST:PORT", os.environ.get("FOREBAY_STATUS"), nargs="?")
    add_identity(p)
    p.add("--timeout", "longest wait for the answer", seconds, 2.0)
    p.add_flag("--probe", "exit 1 only if it takes no requests: for what restarts a node")
