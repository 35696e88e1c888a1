"""Commands of the scheduler: run it, control its jobs."""

import contextlib
import threading
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from forebay.cli.arguments import add_identity, folder, positive, print_result, seconds
from forebay.cli.running import (
    add_from_urls,
    add_node,
    joined_network,
    listening_address,
    ready,
    send_request,
    stop_event,
    until_stopped,
)
from forebay.errors import LeaseError, UsageError
from forebay.threads import SupervisedThread
from forebay.toml import parse_settings


def _schedule(args: Namespace) -> None:
    from forebay.load.packing import DocumentSubset
    from forebay.network.client import Client
    from forebay.network.limits import parse_limits
    from forebay.scheduler.server import LIMITS, SchedulerService

    limits = parse_limits(LIMITS, args.limit)
    samples = parse_settings(args.samples)
    of_subset = ("min_tokens", "max_tokens", "exclude")
    names = ("packing", "split", "validation_fraction", *of_subset)
    if wrong := sorted(set(samples) - set(names)):
        raise UsageError(f"--samples: expected settings of {', '.join(names)}, got {', '.join(wrong)}.")
    if not isinstance(samples.get("validation_fraction", 0.0), (int, float)):
        raise UsageError(
            f"--samples: expected a number as validation_fraction, got {samples['validation_fraction']!r}."
        )
    if subset := {name: samples.pop(name) for name in of_subset if name in samples}:
        make: Callable[..., DocumentSubset] = DocumentSubset
        if "exclude" in subset:
            make = partial(DocumentSubset.from_file, str(subset.pop("exclude")))
        samples["documents"] = make(**subset)
    stop, started = stop_event(), threading.Event()
    with joined_network(args, stop) as (identity, discovery):
        host, port = listening_address(args, discovery)
        client = Client(identity)
        service = SchedulerService(
            identity, args.name, discovery, client, args.state, host, port, dataset_id=args.id or "",
            seq_len=args.seq_len, wait_s=args.timeout, standby=args.standby, publishers=args.publisher, limits=limits,
            from_urls=args.from_urls or "", epochs=args.epochs, seed=args.seed,
            lease_s=args.lease_timeout, stall_s=args.idle_timeout,
            max_failures=args.max_failures, **samples,
        )  # fmt: skip
        try:
            SupervisedThread(lambda: _watch_standby(args, service, stop, started), "standby", stopping=started).start()
            service.start()
            started.set()
            if stop.is_set():
                return
            with contextlib.ExitStack() as stack:
                shown = {}
                if args.dashboard is not None:
                    shown["dashboard"] = stack.enter_context(_open_page(args, service, client)).url
                ready(args, role="scheduler", address=service.address, peer_id=identity.peer_id,
                      ledger=str(service.ledger_path), **shown)  # fmt: skip
                until_stopped(stop, service.is_over if args.exit_when_done else None, identity)
            left_out = service.left_out() if args.exit_when_done else ""
        finally:
            started.set()
            service.stop()
    if left_out:
        raise LeaseError(
            f"{left_out}. Find out why workers could not read them, then run the missing samples as another job."
        )


def _open_page(args: Namespace, service: Any, client: Any) -> Any:
    """The dashboard of the scheduler in this process."""
    from forebay.cli.observe import open_page
    from forebay.observe.sources import NodeSource, status_by

    ask = status_by(client)
    source = NodeSource("", lambda address: ask(address) if address else service.status())
    return open_page(args.dashboard, source)


def _watch_standby(args: Namespace, service: Any, stop: threading.Event, started: threading.Event) -> None:
    """While `start` waits for another scheduler to end: report it once, and end the wait at `stop`."""
    is_reported = False
    while not started.wait(0.1):
        if service.waiting.is_set() and not is_reported:
            is_reported = True
            print_result(args, {"standby": True}, f"standing by for {args.state}")
        if stop.is_set():
            service.stop()
            return


def _job(args: Namespace) -> None:
    from forebay.scheduler.status import job_line

    if args.scheduler is None:
        raise UsageError("job: expected --scheduler HOST:PORT, got none.")
    path, body = f"/v1/job/{args.action}", dict[str, Any]()
    if args.arguments:
        if args.action != "readmit" or not all(text.isdecimal() for text in args.arguments):
            expected = "numbers of slices" if args.action == "readmit" else "no more arguments"
            raise UsageError(f"job {args.action}: expected {expected}, got {' '.join(args.arguments)!r:.100}.")
        body = {"slices": [int(text) for text in args.arguments]}
    reply, _ = send_request(args, args.scheduler, path, body)
    print_result(args, reply, job_line(reply))


def add_verbs(verb: Any, group: Any) -> None:
    about = "find a dataset by name and lease its slices to workers"
    p = add_node(verb, "scheduler", _schedule, about, timeout_of="a bootstrap node, then for a data node")
    p.add("name", "dataset, and name of the job", "NAME")
    p.add("--id", "dataset id, if several datasets have the name (default: any)")
    p.add_list("--publisher", "lease only a dataset that it signed; may be repeated (default: any)", "PEER_ID")
    p.add("--listen", "address (default: a free port at the DHT node's address)", "HOST:PORT")
    state = Path("./forebay-state")
    p.add("--state", "ledger and journal (default: ./forebay-state)", folder, state)
    p.add_list("--limit", "limit of members (default: docs/reference/http-api.md)", "NAME=NUMBER")
    add_from_urls(p)
    p.add_flag("--standby", "wait until the scheduler on --state ends, then take over")
    p.add("--seq-len", "tokens per sample", positive, 1024, metavar="L")
    about = "packing=best_fit, split=train, validation_fraction=F, min_tokens=N, max_tokens=N, exclude=FILE; repeatable"
    p.add_list("--samples", about, "KEY=VALUE")
    p.add("--epochs", "passes over the dataset", positive, 1)
    p.add("--seed", "seed of the order", int, 0, metavar="N")
    p.add("--lease-timeout", "silence until a worker's leases expire", seconds, 30.0)
    p.add("--idle-timeout", "no progress until its leases expire", seconds, 600.0)
    p.add("--max-failures", "workers that fail until a slice is set aside", positive, 3)
    p.add_flag("--exit-when-done", "exit when the job is done; 1 if slices were set aside")
    p.add("--dashboard", "also serve its page there, on this machine only (default: no page)", "HOST:PORT")
    p = verb("job", _job, "pause, resume or change the job of a running scheduler; needs the role admin")
    p.add("action", "readmit: slices that were set aside", ["pause", "resume", "readmit"])
    p.add("arguments", "readmit: slices (default: all)", "ARG", nargs="*")
    p.add("--scheduler", "address of the scheduler (required)", "HOST:PORT")
    add_identity(p)
