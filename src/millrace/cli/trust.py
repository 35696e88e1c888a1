"""Commands on membership: a network's keys and certificates, who is admitted and who is shut out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.cli.arguments import address, show


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


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    """Adds the verbs of this module."""
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
