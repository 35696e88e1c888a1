"""Shared parts of long-running commands: joining a network, the ready line, stopping."""

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
from forebay.network.retry import log_while_waiting
from forebay.threads import SupervisedThread

Verb = Callable[[argparse.Namespace], int]
log = logging.getLogger("forebay.cli")

if TYPE_CHECKING:
    from forebay.network.dht import LibtorrentDht
    from forebay.network.peer import Peer
    from forebay.network.pki.identity import Identity


@contextmanager
def joined_network(
    args: argparse.Namespace, stop: threading.Event | None = None, required: bool = True
) -> Iterator[tuple[Identity, LibtorrentDht]]:
    """Load this node's identity and join the DHT until the end of the block.

    `stop` ends the wait for a bootstrap node, as an interrupt does. If none answers within `args.timeout`, it raises
    NetworkError if `required`, else logs a warning.
    """
    from forebay.network.dht import LibtorrentDht, wait_for_bootstrap
    from forebay.network.pki.identity import Identity

    if args.network is None:
        raise UsageError(
            "expected --network DIR, got none. Give this node's directory (created by `forebay network join`)."
        )
    identity = Identity.load(args.network)
    if args.audit is not None:
        from forebay.network.audit import AuditLog

        identity.audit = AuditLog(args.audit)
        atexit.register(identity.audit.close)
    bootstrap = [address(a) for a in args.bootstrap] or list(identity.bootstrap)
    if not bootstrap:
        raise UsageError(
            f"expected a DHT node in {args.network}, got none. Give --bootstrap HOST:PORT (start one: forebay dht)."
        )
    host, port = address(args.dht) if args.dht else ("", 0)
    # The engine aborts the process if the interpreter ends while it runs, so it is closed on every path.
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
    """The address to listen at: `--listen`, else a free port at the address by which the DHT knows this host."""
    return address(args.listen) if args.listen else (discovery.host, 0)


def ask(
    args: argparse.Namespace, address: str, path: str, body: Any = None, timeout_s: float = 10.0
) -> tuple[Any, Peer]:
    """Send a GET, or with a body a POST, as the node of `--network`; return the reply and the peer."""
    from forebay.network.addresses import parse_address
    from forebay.network.client import Client
    from forebay.network.pki.identity import Identity

    parse_address(address)
    with Client(Identity.load(args.network)) as client, log_while_waiting(log, lambda: f"an answer of {address}"):
        return client.request_json(address, "GET" if body is None else "POST", path, body, timeout_s=timeout_s)


def ready(args: argparse.Namespace, **fields: Any) -> None:
    """Print the ready line, which other programs wait for."""
    if args.json:
        print(json.dumps({"ready": True, **fields}), flush=True)
    else:
        print("ready: " + "  ".join(f"{k.replace('_', ' ')} {plain(v)}" for k, v in fields.items()), flush=True)


def on_stop(stop: threading.Event, args: argparse.Namespace) -> None:
    """SIGTERM and SIGINT set `stop`; so does the end of standard input with --exit-on-stdin-close."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if args.exit_on_stdin_close:

        def watch() -> None:
            # The pipe closes however the parent dies, so no process is left behind. os.read, as this thread would
            # hold the lock of Python's buffer when the interpreter ends.
            while os.read(0, 4096):
                pass
            stop.set()

        SupervisedThread(watch, "stdin-close").start()


def until_stopped(
    args: argparse.Namespace, until: Callable[[], bool] | None = None, stop: threading.Event | None = None
) -> None:
    """Wait for a signal, for `stop` (an event that was passed to `on_stop`), or until `until` is true."""
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
    """Add a verb that runs a node, with the options that all of them have."""
    p = verb(name, run, about)
    add_server_options(p)
    if network:
        p.add_argument("--network", type=Path, metavar="DIR", help="this node's directory, created by network join")
        about_listen = "address of our DHT node (UDP); default: the one from which the first bootstrap node is reached"
        p.add_argument("--audit", type=Path, metavar="FILE", help="write refusals, bans and revocations to this file")
        p.add_argument("--dht", metavar="HOST:PORT", help=about_listen)
        p.add_argument("--timeout", type=seconds, default=timeout_s, metavar="S", help=f"longest wait for {timeout_of}")
    p.add_argument(
        "--bootstrap", action="append", default=[], metavar="HOST:PORT",
        help="a DHT node to join through, instead of the network's; may be repeated",
    )  # fmt: skip
    return p
