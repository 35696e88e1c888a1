"""What the commands that run until they are stopped have in common: joining, being ready, stopping."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import address, plain
from forebay.errors import UsageError

Verb = Callable[[argparse.Namespace], int]

if TYPE_CHECKING:
    from forebay.network.dht import LibtorrentDht
    from forebay.network.identity import Identity


def join_network(args: argparse.Namespace) -> tuple[Identity, LibtorrentDht]:
    """This node's identity and its place in the DHT; the caller closes the latter."""
    from forebay.network.dht import LibtorrentDht
    from forebay.network.identity import Identity

    if args.network is None:
        raise UsageError("which network? Give the node's directory: --network DIR (made by forebay network join)")
    identity = Identity.load(args.network)
    if args.audit is not None:
        from forebay.network.audit import AuditLog

        identity.audit = AuditLog(args.audit)
        atexit.register(identity.audit.close)
    bootstrap = [address(a) for a in args.bootstrap] or list(identity.bootstrap)
    if not bootstrap:
        raise UsageError(
            f"no DHT node is known for {args.network}: give --bootstrap HOST:PORT (one runs with: forebay dht)"
        )
    host, port = address(args.dht) if args.dht else ("", 0)
    return identity, LibtorrentDht(host, port, bootstrap)


def listen_at(args: argparse.Namespace, discovery: LibtorrentDht) -> tuple[str, int]:
    """Where a server listens: as told, else at a free port of the address under which the DHT names this host."""
    return address(args.listen) if args.listen else (discovery.host, 0)


def ready(args: argparse.Namespace, **facts: Any) -> None:
    """Says that a server is up: one line, which other programs wait for."""
    if args.json:
        print(json.dumps({"ready": True, **facts}), flush=True)
    else:
        print("ready: " + "  ".join(f"{k.replace('_', ' ')} {plain(v)}" for k, v in facts.items()), flush=True)


def on_stop(stop: threading.Event, args: argparse.Namespace) -> None:
    """SIGTERM and SIGINT set `stop`; so does the end of our standard input, if --lifeline was given."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if args.lifeline:

        def watch() -> None:
            # A parent that dies, however it dies, closes the pipe: no process is left behind.
            # os.read, for Python's own buffer would be locked by this thread when the interpreter ends.
            while os.read(0, 4096):
                pass
            stop.set()

        threading.Thread(target=watch, daemon=True).start()


def until_stopped(args: argparse.Namespace, until: Callable[[], bool] | None = None) -> None:
    stop = threading.Event()
    on_stop(stop, args)
    while not stop.wait(0.2):
        if until is not None and until():
            return


def add_node(
    verb: Callable[..., argparse.ArgumentParser], name: str, run: Verb, about: str, network: bool = True
) -> argparse.ArgumentParser:
    """A verb that runs a node: the flags which all of them have."""
    p = verb(name, run, about)
    if network:
        p.add_argument("--network", type=Path, metavar="DIR", help="this node's directory, from network join")
        where = "where our DHT node listens (UDP); default: the address from which the first bootstrap node is reached"
        p.add_argument("--audit", type=Path, metavar="FILE", help="log of refusals, bans and revocations")
        p.add_argument("--dht", metavar="HOST:PORT", help=where)
    p.add_argument("--bootstrap", action="append", default=[], metavar="HOST:PORT")
    p.add_argument("--json", action="store_true")
    p.add_argument("--lifeline", action="store_true", help="stop when standard input ends")
    return p
