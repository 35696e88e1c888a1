"""Commands of the scheduler: run it, control its jobs."""

from __future__ import annotations

import argparse
import json
import threading
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import add_identity, positive, seconds
from forebay.cli.running import (
    add_from_urls,
    add_node,
    joined_network,
    listen_at,
    ready,
    send_request,
    stop_event,
)
from forebay.errors import LeaseError, UsageError
from forebay.threads import SupervisedThread

if TYPE_CHECKING:
    from forebay.scheduler.catalog import JobPlan


def _schedule(args: argparse.Namespace) -> int:
    from forebay.network.client import Client
    from forebay.network.limits import parse_limits
    from forebay.scheduler.server import LIMITS, SchedulerService

    plans, limits = _plans(args), parse_limits(LIMITS, args.limit)
    stop, started = stop_event(), threading.Event()
    with joined_network(args, stop) as (identity, discovery):
        host, port = listen_at(args, discovery)
        service = SchedulerService(
            identity, plans[0].name, discovery=discovery, client=Client(identity), state_dir=args.state, host=host,
            port=port, jobs=plans, wait_s=args.timeout, standby=args.standby, publishers=args.publisher,
            limits=limits, from_urls=args.from_urls or "",
        )  # fmt: skip
        try:
            SupervisedThread(lambda: _watch_standby(args, service, stop, started), "standby", stopping=started).start()
            service.start()
            started.set()
            if stop.is_set():
                return 0
            ready(args, role="scheduler", address=service.address, peer_id=identity.peer_id,
                  ledger=str(service.ledger_path))  # fmt: skip
            while not stop.wait(0.2):
                if args.exit_when_done and service.is_over():
                    break
            left_out = service.left_out() if args.exit_when_done else []
        finally:
            started.set()
            service.stop()
    if left_out:
        raise LeaseError(
            f"{'; '.join(left_out)}. Find out why workers could not read them, then lease them as another job."
        )
    return 0


def _watch_standby(args: argparse.Namespace, service: Any, stop: threading.Event, started: threading.Event) -> None:
    """While `start` waits for another scheduler to end: report it once, and end the wait at `stop`."""
    is_reported = False
    while not started.wait(0.1):
        if service.waiting.is_set() and not is_reported:
            is_reported = True
            print(json.dumps({"standby": True}) if args.json else f"standing by for {args.state}", flush=True)
        if stop.is_set():
            service.stop()
            return


def _plans(args: argparse.Namespace) -> list[JobPlan]:
    """A job for each NAME."""
    from forebay.scheduler.catalog import JobPlan

    if not args.names or (args.id and len(args.names) != 1):
        raise UsageError(f"scheduler: expected names of datasets, with --id exactly one, got {len(args.names)}.")
    settings = {
        "seq_len": args.seq_len, "epochs": args.epochs, "seed": args.seed, "lease_s": args.lease_timeout,
        "stall_s": args.idle_timeout, "steal_s": args.steal_after, "max_failures": args.max_failures,
        "dataset_id": args.id or "",
    }  # fmt: skip
    priorities = dict(args.priority)
    return [JobPlan(name, priority=priorities.get(name, 0), **settings) for name in args.names]


def _priority(text: str) -> tuple[str, int]:
    name, _, value = text.rpartition("=")
    if not name or not value.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"expected JOB=NUMBER, got {text!r}")
    return name, int(value)


def _job(args: argparse.Namespace) -> int:
    from forebay.scheduler.admin_api import job_line

    if args.scheduler is None:
        raise UsageError("job: expected --scheduler HOST:PORT, got none.")
    if args.action == "list":
        status, _ = send_request(args, args.scheduler, "/v1/status")
        jobs = [job for job in status["jobs"] if args.job in (None, job["name"])]
        print(json.dumps(jobs) if args.json else "\n".join(map(job_line, jobs)))
        return 0
    if args.job is None:
        raise UsageError(f"job {args.action}: expected the name of a job, got none.")
    body = {"slices": args.slices} if args.action == "readmit" and args.slices else {}
    kind = "peers" if args.action == "pardon" else "jobs"
    path = f"/v1/{kind}/{urllib.parse.quote(args.job, safe='')}/{args.action}"
    reply, _ = send_request(args, args.scheduler, path, body)
    text = f"pardoned {args.job}" if args.action == "pardon" else job_line(reply)
    print(json.dumps(reply) if args.json else text)
    return 0


def add_verbs(verb: Any, group: Any) -> None:
    about = "find datasets by name and lease their slices to workers"
    p = add_node(verb, "scheduler", _schedule, about, timeout_of="a bootstrap node, then for a data node")
    p.add("names", nargs="*", metavar="NAME", help="datasets, one job each")
    p.add_list("--priority", "JOB=N", "priority of a job; may be repeated (default: 0)", type=_priority)
    p.add("--id", help="dataset id, if several datasets have the name (default: any)")
    p.add_list("--publisher", "PEER_ID", "lease only datasets that it signed; may be repeated (default: any)")
    p.add("--listen", metavar="HOST:PORT", help="address (default: a free port at the DHT node's address)")
    state = Path("./forebay-state")
    p.add("--state", type=Path, default=state, metavar="DIR", help="ledgers and journal (default: ./forebay-state)")
    p.add_list("--limit", "NAME=NUMBER", "limit of members (default: docs/reference/http-api.md)")
    add_from_urls(p)
    p.add("--standby", action="store_true", help="wait until the scheduler on --state ends, then take over")
    p.add("--seq-len", type=positive, default=1024, metavar="L", help="tokens per sample")
    p.add("--epochs", type=positive, default=1, metavar="N", help="passes over the dataset")
    p.add("--seed", type=int, default=0, metavar="N", help="seed of the order")
    p.add("--lease-timeout", type=seconds, default=30.0, metavar="S", help="silence until a worker's leases expire")
    p.add("--idle-timeout", type=seconds, default=600.0, metavar="S", help="no progress until its leases expire")
    p.add("--steal-after", type=seconds, default=2.0, metavar="S", help="take samples from workers that need longer")
    p.add("--max-failures", type=positive, default=3, metavar="N", help="workers that fail until a slice is set aside")
    p.add("--exit-when-done", action="store_true", help="exit with the last job; exit 1 if slices were set aside")
    p = verb("job", _job, "list, pause, resume or change the jobs of a running scheduler; needs the role admin")
    p.add("action", choices=["list", "pause", "resume", "readmit", "pardon"], help="pardon: a banned peer")
    p.add("job", nargs="?", metavar="JOB", help="name of the job; of pardon: a peer id")
    p.add("slices", nargs="*", type=int, metavar="SLICE", help="readmit: slices set aside (default: all)")
    p.add("--scheduler", metavar="HOST:PORT", help="address of the scheduler (required)")
    add_identity(p)
