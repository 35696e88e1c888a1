"""What the commands that run until they are stopped have in common: joining, being ready, stopping."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import address, plain, seconds
from forebay.errors import NetworkError, UsageError
from forebay.network.retry import waiting
from forebay.threads import Supervised

Verb = Callable[[argparse.Namespace], int]
log = logging.getLogger("forebay.cli")

if TYPE_CHECKING:
    from forebay.network.dht import LibtorrentDht
    from forebay.network.pki.identity import Identity, Peer


@contextmanager
def joined_network(
    args: argparse.Namespace, stop: threading.Event | None = None, required: bool = True
) -> Iterator[tuple[Identity, LibtorrentDht]]:
    """This node's identity and its place in the DHT, from here to the end of the block.

    `stop` ends the wait for a bootstrap node, as an interrupt does. If none answers within `args.timeout`, it raises
    NetworkError where `required`, else logs a warning.
    """
    from forebay.network.dht import LibtorrentDht, wait_for_bootstrap
    from forebay.network.pki.identity import Identity

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
    # The engine aborts the process if the interpreter ends while it runs: closed on every way out.
    with contextlib.closing(LibtorrentDht(host, port, bootstrap)) as discovery:
        try:
            wait_for_bootstrap(bootstrap, args.timeout if required else 1.0, stop)
        except NetworkError as error:
            if required:
                raise
            log.warning("%s", error)
        if stop is not None and stop.is_set():
            raise KeyboardInterrupt
        yield identity, discovery


def listen_at(args: argparse.Namespace, discovery: LibtorrentDht) -> tuple[str, int]:
    """Where a server listens: as told, else at a free port of the address under which the DHT names this host."""
    return address(args.listen) if args.listen else (discovery.host, 0)


def ask(args: argparse.Namespace, at: str, path: str, body: Any = None, timeout_s: float = 10.0) -> tuple[Any, Peer]:
    """A scheduler's or data node's answer to a GET, or with a body to a POST, by the node of `--network`; and whose."""
    from forebay.network.addresses import parse_address
    from forebay.network.client import Client
    from forebay.network.pki.identity import Identity

    parse_address(at)
    with Client(Identity.load(args.network)) as client, waiting(log, lambda: f"an answer of {at}"):
        return client.request_json(at, "GET" if body is None else "POST", path, body, timeout_s=timeout_s)


def ready(args: argparse.Namespace, **facts: Any) -> None:
    """Says that a server is up: one line, which other programs wait for."""
    if args.json:
        print(json.dumps({"ready": True, **facts}), flush=True)
    else:
        print("ready: " + "  ".join(f"{k.replace('_', ' ')} {plain(v)}" for k, v in facts.items()), flush=True)


def on_stop(stop: threading.Event, args: argparse.Namespace) -> None:
    """SIGTERM and SIGINT set `stop`; so does the end of standard input with --exit-on-stdin-close."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if args.exit_on_stdin_close:

        def watch() -> None:
            # A parent that dies, however it dies, closes the pipe: no process is left behind.
            # os.read, for Python's own buffer would be locked by this thread when the interpreter ends.
            while os.read(0, 4096):
                pass
            stop.set()

        Supervised(watch, "stdin-close").start()


def until_stopped(
    args: argparse.Namespace, until: Callable[[], bool] | None = None, stop: threading.Event | None = None
) -> None:
    """Wait for a signal, or `stop`, which then is that of an `on_stop` before; or until `until` is true."""
    if stop is None:
        stop = threading.Event()
        on_stop(stop, args)
    while not stop.wait(0.2):
        if until is not None and until():
            return


def add_server_options(p: argparse.ArgumentParser) -> None:
    """What commands that run until they are stopped have in common."""
    p.set_defaults(default_log_level="info")
    p.add_argument("--exit-on-stdin-close", action="store_true", help="stop when standard input ends")


def add_node(
    verb: Callable[..., argparse.ArgumentParser],
    name: str,
    run: Verb,
    about: str,
    network: bool = True,
    timeout_s: float = 30.0,
    timeout_of: str = "a bootstrap node",
) -> argparse.ArgumentParser:
    """A verb that runs a node: the flags which all of them have."""
    p = verb(name, run, about)
    add_server_options(p)
    if network:
        p.add_argument("--network", type=Path, metavar="DIR", help="this node's directory, from network join")
        where = "where our DHT node listens (UDP); default: the address from which the first bootstrap node is reached"
        p.add_argument("--audit", type=Path, metavar="FILE", help="log of refusals, bans and revocations")
        p.add_argument("--dht", metavar="HOST:PORT", help=where)
        p.add_argument("--timeout", type=seconds, default=timeout_s, metavar="S", help=f"longest wait for {timeout_of}")
    p.add_argument(
        "--bootstrap", action="append", default=[], metavar="HOST:PORT",
        help="a DHT node to enter by, in place of the network's; may be repeated",
    )  # fmt: skip
    return p
