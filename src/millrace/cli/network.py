"""Commands on the network: identities, DHT, data node, scheduler, worker."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.cli.arguments import address, positive, show, size
from millrace.cli.running import Verb, join_network, on_stop, ready, until_stopped
from millrace.errors import UsageError


def _network_init(args: argparse.Namespace) -> int:
    from millrace.network.identity import create_network

    create_network(args.directory, args.name, bootstrap=[address(a) for a in args.bootstrap])
    print(f"network {args.name!r} in {args.directory}. Keep root-key.pem secret: it admits nodes.")
    print(f"next: millrace network join {args.directory} NODE_DIRECTORY --name NODE")
    return 0


def _network_join(args: argparse.Namespace) -> int:
    from millrace.network.identity import join

    identity = join(args.network, args.directory, args.name)
    print(f"{identity.name} is peer {identity.peer_id}. Its files are in {args.directory}; use --network with it.")
    return 0


def _network_renew(args: argparse.Namespace) -> int:
    from millrace.network.identity import renew

    identity = renew(args.network, args.directory)
    print(f"{identity.name} has a new certificate; it is peer {identity.peer_id} as before.")
    return 0


def _network_revoke(args: argparse.Namespace) -> int:
    from millrace.network.identity import revoke

    for directory in args.directories:
        revoke(directory, args.peer_id)
    print(f"{args.peer_id} is revoked at {len(args.directories)} nodes, from their next request on.")
    return 0


def _network_show(args: argparse.Namespace) -> int:
    from millrace.network.identity import Identity, read_revoked

    identity = Identity.load(args.directory)
    listed = args.directory / "revoked.txt"
    revoked = sorted(read_revoked(listed)) if listed.exists() else []
    facts = {"name": identity.name, "peer_id": identity.peer_id, "network": identity.network_id, "revoked": revoked}
    show(facts, args.json)
    return 0


def _probe(args: argparse.Namespace) -> int:
    from millrace.network.client import Client
    from millrace.network.identity import Identity

    with Client(Identity.load(args.network)) as client:
        body, peer = client.request_json(args.address, "GET", "/v1/status", timeout_s=args.timeout)
    draining = isinstance(body, dict) and bool(body.get("draining"))
    show({"address": args.address, "peer_id": peer.peer_id, "name": peer.name, "healthy": not draining}, args.json)
    return 1 if draining else 0


def _dht(args: argparse.Namespace) -> int:
    from millrace.network.dht import LibtorrentDht

    host, port = address(args.listen)
    first = LibtorrentDht(host, port, [address(a) for a in args.bootstrap])
    nodes = [first]
    nodes += [LibtorrentDht(host, 0, [(host, first.port)]) for _ in range(args.nodes - 1)]
    ready(args, role="dht", address=f"{host}:{first.port}")
    try:
        until_stopped(args)
    finally:
        for node in nodes:
            node.close()
    return 0


def _serve(args: argparse.Namespace) -> int:
    from millrace.dataset.reader import open_dataset
    from millrace.serve import DataNode

    datasets = [open_dataset(path) for path in args.datasets]
    identity, discovery = join_network(args)
    host, port = address(args.listen)
    node = DataNode(identity, datasets, host, port, discovery, ttl_s=args.ttl)
    try:
        node.start()
        ready(
            args,
            role="data node",
            address=node.address,
            peer_id=identity.peer_id,
            datasets={d.name: d.id for d in datasets},
        )
        until_stopped(args)
    finally:
        node.stop()
        discovery.close()
    if args.json:
        print(json.dumps(node.status()), flush=True)
    return 0


def _find(args: argparse.Namespace) -> int:
    from millrace.network.discovery import find_providers
    from millrace.network.https import Client

    identity, discovery = join_network(args)
    try:
        claims = find_providers(discovery, Client(identity), identity.network_id, args.name, timeout_s=args.timeout)
    finally:
        discovery.close()
    found = [
        {
            "name": c.name,
            "dataset_id": c.dataset_id,
            "slices": c.num_slices,
            "peer_id": c.peer_id,
            "address": c.address,
        }
        for c in claims
    ]
    if args.json:
        print(json.dumps(found))
    for claim in found if not args.json else []:
        print("{name}  {dataset_id}  {slices} slices  {peer_id} at {address}".format(**claim))
    if not found:
        print(
            f"millrace: nobody announces a dataset named {args.name!r} in this network. "
            "Check the name and that its data node runs (millrace serve)",
            file=sys.stderr,
        )
        return 1
    if len({c.dataset_id for c in claims}) > 1:
        print(f"millrace: {args.name!r} stands for several datasets here; they are never mixed", file=sys.stderr)
    return 0


def _schedule(args: argparse.Namespace) -> int:
    from millrace.network.https import Client
    from millrace.schedule.service import SchedulerService

    identity, discovery = join_network(args)
    host, port = address(args.listen)
    service = SchedulerService(
        identity,
        args.name,
        discovery=discovery,
        client=Client(identity),
        state_dir=args.state,
        host=host,
        port=port,
        seq_len=args.seq_len,
        epochs=args.epochs,
        seed=args.seed,
        lease_s=args.lease,
        dataset_id=args.id,
        wait_s=args.wait,
    )
    try:
        service.start()
        ready(
            args,
            role="scheduler",
            address=service.address,
            peer_id=identity.peer_id,
            ledger=str(service.ledger_path),
        )
        until_stopped(args, until=service.is_done if args.exit_when_done else None)
    finally:
        service.stop()
        discovery.close()
    return 0


def _work(args: argparse.Namespace) -> int:
    from millrace.worker.leasing import run_worker

    settings = _work_settings(args)
    identity, discovery = join_network(args)
    stop = threading.Event()
    on_stop(stop, args)
    try:
        report = run_worker(
            identity,
            settings["name"],
            discovery=discovery,
            scheduler=settings["scheduler"],
            cache_dir=Path(settings["cache_dir"]),
            cache_bytes=int(settings["cache_bytes"]),
            batch_size=int(settings["batch_size"]),
            trainer=settings["trainer"],
            on_progress=lambda p: print(json.dumps(p) if args.json else _progress_line(p), flush=True),
            stop=stop,
        )
    finally:
        discovery.close()
    result = report.to_json()
    if args.json:
        print(json.dumps({"report": result}), flush=True)
    else:
        show(result, False)
    return 0


def _work_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Flags over the file's [work] table over defaults."""
    settings: dict[str, Any] = {
        "name": None,
        "scheduler": None,
        "cache_dir": "./millrace-cache",
        "cache_bytes": 4 << 30,
        "batch_size": 8,
        "trainer": "auto",
        "network": None,
    }
    if args.config:
        import tomllib

        try:
            table = tomllib.loads(Path(args.config).read_text()).get("work", {})
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{args.config}: not valid TOML: {error}. Mend the line named") from None
        if unknown := sorted(set(table) - set(settings)):
            raise UsageError(f"{args.config}: unknown key work.{unknown[0]}. Known: {', '.join(sorted(settings))}")
        settings |= table
    settings |= {k: v for k in settings if (v := getattr(args, k, None)) is not None}
    if not settings["name"]:
        raise UsageError("which dataset? Give its name: millrace work NAME, or work.name in the --config file")
    args.network = settings["network"]
    return settings


def _progress_line(p: dict[str, Any]) -> str:
    loss = "" if p.get("loss") is None else f"  loss {p['loss']:.3f}"
    return "step {step:,}  {tokens:,} tokens  {tokens_per_s:,.0f} tokens/s  waited {wait_share:.1%}".format(**p) + loss


def _status(args: argparse.Namespace) -> int:
    from millrace.network.https import Client
    from millrace.network.identity import Identity

    body, _ = Client(Identity.load(args.network)).request_json(args.address, "GET", "/v1/status")
    print(json.dumps(body, indent=None if args.json else 2))
    return 0


def _membership_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    network = group("network", "identities and membership")
    p = verb("init", _network_init, "make a network: its root key and certificate", network)
    p.add_argument("directory", type=Path)
    p.add_argument("--name", default="millrace")
    p.add_argument(
        "--bootstrap",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a DHT node that members start from",
    )
    p = verb("join", _network_join, "admit a node: its own key, and a certificate from the root", network)
    p.add_argument("network", type=Path)
    p.add_argument("directory", type=Path)
    p.add_argument("--name", required=True)
    p = verb("renew", _network_renew, "a new certificate for a node's key; its peer id stays", network)
    p.add_argument("network", type=Path)
    p.add_argument("directory", type=Path)
    p = verb("revoke", _network_revoke, "shut a peer out, in force at each node's next request", network)
    p.add_argument("peer_id")
    p.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="of nodes, and the network's for new ones")
    p = verb("show", _network_show, "who a node is, and whom it shuts out", network)
    p.add_argument("directory", type=Path)
    p.add_argument("--json", action="store_true")


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    _membership_verbs(verb, group)

    def node(name: str, run: Verb, about: str, network: bool = True) -> argparse.ArgumentParser:
        p = verb(name, run, about)
        if network:
            p.add_argument("--network", type=Path, metavar="DIR", help="this node's directory, from network join")
            p.add_argument("--dht", default="127.0.0.1:0", metavar="HOST:PORT", help="where our DHT node listens (UDP)")
        p.add_argument("--bootstrap", action="append", default=[], metavar="HOST:PORT")
        p.add_argument("--json", action="store_true")
        p.add_argument("--lifeline", action="store_true", help="stop when standard input ends")
        return p

    p = node("dht", _dht, "nodes of the Kademlia DHT that others start from", network=False)
    p.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    p.add_argument("--nodes", type=positive, default=1)
    p = node("serve", _serve, "a data node: serve datasets and announce them")
    p.add_argument("datasets", nargs="+", metavar="DATASET")
    p.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    p.add_argument("--ttl", type=float, default=60.0, metavar="S", help="how long a claim holds without renewal")
    p = node("find", _find, "who has a dataset")
    p.add_argument("name")
    p.add_argument("--timeout", type=float, default=10.0, metavar="S")
    p = node("schedule", _schedule, "a scheduler: find a dataset and lease its slices")
    p.add_argument("name")
    p.add_argument("--id", help="the dataset id, where a name stands for several")
    p.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    p.add_argument("--state", type=Path, default=Path("./millrace-state"), metavar="DIR")
    p.add_argument("--seq-len", type=positive, default=1024)
    p.add_argument("--epochs", type=positive, default=1)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--lease", type=float, default=30.0, metavar="S")
    p.add_argument("--wait", type=float, default=30.0, metavar="S", help="how long to look for a data node")
    p.add_argument("--exit-when-done", action="store_true")
    p = node("work", _work, "a worker: lease, fetch, verify, train, acknowledge")
    p.add_argument("name", nargs="?")
    p.add_argument("--config", type=Path, metavar="F", help="TOML with a [work] table; flags win over it")
    p.add_argument("--scheduler", metavar="HOST:PORT", help="default: found in the DHT")
    p.add_argument("--cache-dir", metavar="DIR")
    p.add_argument("--cache-bytes", type=size)
    p.add_argument("--batch-size", type=positive)
    p.add_argument("--trainer", choices=["auto", "gpt", "count", "none"])
    p = verb("probe", _probe, "whether a scheduler or data node answers and takes requests: exit 0 or 1")
    p.add_argument("address", metavar="HOST:PORT")
    p.add_argument("--network", type=Path, required=True, metavar="DIR")
    p.add_argument("--timeout", type=float, default=2.0, metavar="S")
    p.add_argument("--json", action="store_true")
    p = verb("status", _status, "what a scheduler or data node says of itself")
    p.add_argument("address", metavar="HOST:PORT")
    p.add_argument("--network", type=Path, required=True, metavar="DIR")
    p.add_argument("--json", action="store_true")
