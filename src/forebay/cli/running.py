"""Shared parts of commands that talk to a network: its options, joining it, the ready line, stopping."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import address, plain, print_note, print_result, seconds
from forebay.cli.parser import Parser
from forebay.errors import UsageError
from forebay.storage.hosts import is_loopback
from forebay.storage.retry import log_while_waiting
from forebay.threads import SupervisedThread

if TYPE_CHECKING:
    from forebay.network.dht import LibtorrentDht
    from forebay.network.peer import Peer
    from forebay.network.pki.identity import Identity

log = logging.getLogger("forebay.cli")


def load_identity(args: Namespace, *role: str) -> Identity:
    """This node's identity, from `--identity`; its certificate has the `role`, as of `Identity.check_role`.

    NetworkError if all members refuse it.
    """
    from forebay.network.pki.identity import Identity

    if args.identity is None:
        raise UsageError(
            "expected --identity DIR, got none. Give this node's directory (forebay network join); what serves plain "
            "HTTP, such as a page, is http://HOST:PORT."
        )
    identity = Identity.load(args.identity)
    identity.check_admitted()
    if role:
        identity.check_role(*role)
    return identity


@contextmanager
def joined_network(
    args: Namespace, *role: str, stop: threading.Event | None = None
) -> Iterator[tuple[Identity, LibtorrentDht]]:
    """Load this node's identity, as `load_identity`, and join the DHT until the end of the block.

    `stop` ends the wait for a bootstrap node, as an interrupt does; NetworkError if none answers within `args.timeout`.
    FOREBAY_DHT has the address of our DHT node, HOST:PORT (UDP).
    """
    from forebay.network.audit import open_audit_log
    from forebay.network.dht import LibtorrentDht, wait_for_bootstrap

    identity = load_identity(args, *role)
    identity.audit = open_audit_log()
    bootstrap = [address(a) for a in args.bootstrap] or list(identity.bootstrap)
    if not bootstrap:
        raise UsageError(
            f"expected a DHT node in {args.identity}, got none. Give --bootstrap HOST:PORT (start one: forebay dht)."
        )
    host, port = address(os.environ["FOREBAY_DHT"]) if "FOREBAY_DHT" in os.environ else ("", 0)
    # The engine aborts the process if the interpreter ends while it runs, so it is closed on every path.
    with contextlib.closing(LibtorrentDht(host, port, bootstrap)) as discovery:
        wait_for_bootstrap(bootstrap, args.timeout, stop)
        if stop is not None and stop.is_set():
            raise KeyboardInterrupt
        yield identity, discovery


def listening_address(args: Namespace, discovery: LibtorrentDht) -> tuple[str, int]:
    """The address to listen at: `--listen`, else a free port at the address by which the DHT knows this host."""
    return address(args.listen) if args.listen else (discovery.host, 0)


def send_request(
    args: Namespace, address: str, path: str, body: Any = None, timeout_s: float = 10.0
) -> tuple[Any, Peer]:
    """Send a GET, or with a body a POST, as the node of `--identity`; return the reply and the peer.

    An address that begins with http:// is of a server without TLS; with https:// it is as without.
    """
    from forebay.network.client import Client
    from forebay.storage.hosts import parse_address

    identity = None if address.startswith("http://") else load_identity(args)
    address = address.removeprefix("http://").removeprefix("https://")
    parse_address(address)
    with Client(identity) as client, log_while_waiting(log, lambda: f"an answer of {address}"):
        return client.request_json(address, "GET" if body is None else "POST", path, body, timeout_s=timeout_s)


def ready(args: Namespace, **fields: Any) -> None:
    """Print the ready line, which other programs wait for, and notify systemd, if it started this process."""
    if name := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.sendto(b"READY=1", name.replace("@", "\0", 1))
    parts = (f"{k.replace('_', ' ')} {plain(v)}" for k, v in fields.items())
    print_result(args, {"ready": True, **fields}, f"ready: {'  '.join(parts)}")


def stop_event() -> threading.Event:
    """An event that SIGTERM and SIGINT set; see also `terminate_on_stdin_close`."""
    stop = threading.Event()
    reader, writer = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not stop.set(): it would wait forever for the lock of a stop.wait() that the signal interrupted.
        signal.signal(number, lambda *_: os.write(writer, b"."))

    def pass_on() -> None:
        os.read(reader, 1)
        stop.set()

    SupervisedThread(pass_on, "signals").start()
    terminate_on_stdin_close()
    return stop


def terminate_on_stdin_close() -> None:
    """With FOREBAY_EXIT_ON_STDIN_CLOSE=1 send this process SIGTERM when its standard input ends.

    The pipe closes however the parent dies, so no process is left behind.
    """

    def watch() -> None:
        # os.read, as this thread would hold the lock of Python's buffer when the interpreter ends.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ.get("FOREBAY_EXIT_ON_STDIN_CLOSE") == "1":
        SupervisedThread(watch, "stdin-close").start()


def until_stopped(
    stop: threading.Event, until: Callable[[], bool] | None = None, identity: Identity | None = None
) -> None:
    """Wait until `stop` is set or `until` returns True; NetworkError once `identity`, this node's, is revoked.

    An expired certificate may be renewed while the node runs.
    """
    while not stop.wait(0.2):
        if until is not None and until():
            return
        if identity is not None and identity.revocations.find(identity.peer_id, identity.org) is not None:
            identity.check_admitted()
    log.info("stopping: requests under way are finished first")


def check_plain_http(args: Namespace, host: str, purpose: str, advice: str) -> None:
    """Raise UsageError if other hosts could use plain HTTP at a host, unless the user allows it: then print a note."""
    if is_loopback(host):
        return
    if not args.allow_plain_http:
        raise UsageError(
            f"--listen: expected an address of this machine only, got {host}: any host that reaches it could {purpose} "
            f"by plain HTTP. {advice}, or --allow-plain-http on a trusted network."
        )
    print_note(f"plain HTTP on {args.listen}: any host that reaches it may {purpose}.")


def add_node(
    verb: Any, name: str, run: Callable[[Namespace], int | None], about: str, timeout_s: float = 30.0,
    timeout_of: str = "a bootstrap node",
) -> Parser:  # fmt: skip
    """Add a verb that runs a node of the DHT, with the options that all of them have."""
    p: Parser = verb(name, run, about, log_level="info")
    p.add_list("--bootstrap", "DHT node to join by; may be repeated (default: the network's)", "HOST:PORT")
    p.add("--timeout", f"longest wait for {timeout_of}", seconds, timeout_s)
    return p


def add_from_urls(parser: Parser) -> None:
    """Add the option that allows reading from URLs that peers name."""
    parser.add(
        "--from-urls",
        "also read from URLs that data nodes name: public ones, or any, also http and private (default: none)",
        ["public", "any"],
    )
