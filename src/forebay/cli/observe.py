"""Commands that show what runs: top, dashboard."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import add_identity, address, folder, is_loopback
from forebay.cli.running import load_identity, ready, stop_event, until_stopped
from forebay.errors import MALFORMED, StateError, UsageError

if TYPE_CHECKING:
    from forebay.observe.dashboard import Dashboard
    from forebay.observe.sources import Source

_TARGET = (
    "HOST:PORT of a scheduler, coordinator or data node; http://HOST:PORT; or a folder: a record, or prepare's output"
)


def _open(args: Namespace, stack: ExitStack, command: str) -> Source:
    from forebay.network.client import Client
    from forebay.observe.sources import open_source

    def client() -> Client:
        identity = load_identity(args)
        identity.check_role(command, "viewer")
        return stack.enter_context(Client(identity))

    return open_source(args.target, client)


def _top(args: Namespace) -> None:
    from forebay.observe.top import show_top

    with ExitStack() as stack:
        source = _open(args, stack, "top")
        if args.replay and not source.times():
            raise UsageError(f"top --replay: expected a folder with the record of a run, got {args.target}.")
        if args.json:
            import orjson

            print(orjson.dumps(source.poll()).decode())
            return
        try:
            show_top(source, replay=args.replay)
        except MALFORMED as error:
            raise StateError(
                f"top: expected views of this version from {args.target}, got others ({type(error).__name__}: {error})."
            ) from error


def open_page(listen: str, source: Source, record: Path | None = None, *, is_open: bool = False) -> Dashboard:
    """A dashboard that serves at `listen`; beyond loopback only if `is_open`."""
    from forebay.observe.dashboard import Dashboard
    from forebay.observe.record import RunRecord

    host, port = address(listen)
    if not is_loopback(host):
        if not is_open:
            raise UsageError(
                f"dashboard: expected an address of this machine only, got {host}: any host that reaches it could read "
                "the page. Use 127.0.0.1 and an SSH tunnel, or `forebay dashboard --allow-plain-http`."
            )
        print(f"forebay: plain HTTP on {listen}: any host that reaches it can read the page.", file=sys.stderr)
    recorded = None if record is None else RunRecord(record)
    return Dashboard(source, host, port, record=recorded).start()


def _dashboard(args: Namespace) -> None:
    stop = stop_event()
    with ExitStack() as stack:
        source = _open(args, stack, "dashboard")
        source.poll()  # What cannot be shown is an error here.
        page = stack.enter_context(open_page(args.listen, source, args.record, is_open=args.allow_plain_http))
        ready(args, role="dashboard", url=page.url)
        until_stopped(stop)


def add_verbs(verb: Any, group: Any) -> None:
    p = verb("top", _top, "show a job, a node, a run or a preparation in the terminal, live")
    p.add("target", _TARGET, "TARGET")
    p.add_flag("--replay", "play the record of a run from its start")
    add_identity(p)
    p = verb("dashboard", _dashboard, "serve a page that shows it in a browser, live", log_level="info")
    p.add("target", _TARGET, "TARGET")
    p.add("--listen", "address of the page; port 0: a free one", "HOST:PORT", "127.0.0.1:7480")
    p.add("--record", "record the run; `top --replay DIR` opens it later (default: none)", folder)
    p.add_flag("--allow-plain-http", "allow other addresses than this machine's")
    add_identity(p)
