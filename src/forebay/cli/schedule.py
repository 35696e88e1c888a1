"""Commands of the scheduler: run it, steer its jobs, show its status."""

from __future__ import annotations

import argparse
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import add_from_urls, add_limits, positive
from forebay.cli.running import add_node, ask, joined_network, listen_at, on_stop, ready
from forebay.errors import LeaseError, UsageError
from forebay.threads import SupervisedThread
from forebay.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from forebay.scheduler.catalog import JobPlan


# `forebay schedule VERB JOB --at HOST:PORT`: as a dataset may have any name, a verb is one only with --at.
VERBS = ("pause", "resume", "readmit", "pardon")


def _schedule(args: argparse.Namespace) -> int:
    if args.at:
        return _steer(args)
    from forebay.network.client import Client
    from forebay.network.limits import parse_limits
    from forebay.scheduler.server import LIMITS, SchedulerService

    plans, limits = _plans(args), parse_limits(LIMITS, args.limit)
    stop, began = threading.Event(), threading.Event()
    on_stop(stop, args)
    with joined_network(args, stop) as (identity, discovery):
        host, port = listen_at(args, discovery)
        service = SchedulerService(
            identity,
            plans[0].name,
            discovery=discovery,
            client=Client(identity),
            state_dir=args.state,
            host=host,
            port=port,
            jobs=plans,
            wait_s=args.timeout,
            standby=args.standby,
            publishers=args.publisher,
            limits=limits,
            from_urls=args.from_urls or "",
        )
        try:
            SupervisedThread(lambda: _until_told(args, service, stop, began), "standby", stopping=began).start()
            service.start()
            began.set()
            if stop.is_set():
                return 0
            ready(
                args,
                role="scheduler",
                address=service.address,
                peer_id=identity.peer_id,
                ledger=str(service.ledger_path),
            )
            while not stop.wait(0.2):
                if args.exit_when_done and service.is_over():
                    break
            left_out = service.left_out() if args.exit_when_done else []
        finally:
            began.set()
            service.stop()
    if left_out:
        raise LeaseError(
            "; ".join(left_out)
            + ". Find out why workers could not read them, then run the missing samples as another job."
        )
    return 0


def _until_told(args: argparse.Namespace, service: Any, stop: threading.Event, began: threading.Event) -> None:
    """While `start` waits for another scheduler to end: report it once, and end the wait at `stop`."""
    is_reported = False
    while not began.wait(0.1):
        if service.waiting.is_set() and not is_reported:
            is_reported = True
            print(json.dumps({"standby": True}) if args.json else f"standing by for {args.state}", flush=True)
        if stop.is_set():
            service.stop()
            return


def _plans(args: argparse.Namespace) -> list[JobPlan]:
    """A job for each NAME."""
    from forebay.scheduler.catalog import JobPlan

    if not args.names:
        raise UsageError("schedule: expected names of datasets, one job each, got none.")
    if (args.id or args.job) and len(args.names) != 1:
        raise UsageError("--id and --job: expected exactly one dataset name.")
    settings = {
        "seq_len": args.seq_len, "epochs": args.epochs, "seed": args.seed, "lease_s": args.lease,
        "stall_s": args.stall or 20 * args.lease, "steal_s": args.steal, "max_failures": args.max_failures,
        "max_tokens_per_s": args.max_tokens_per_s,
    }  # fmt: skip
    priorities = dict(_priority(text) for text in args.priority)
    return [
        JobPlan(
            args.job or name, dataset=name, dataset_id=args.id or "", priority=priorities.get(args.job or name, 0),
            **settings,
        )
        for name in args.names
    ]  # fmt: skip


def _priority(text: str) -> tuple[str, int]:
    name, _, value = text.rpartition("=")
    if not name or not value.removeprefix("-").isdecimal():
        raise UsageError(f"--priority: expected JOB=NUMBER, got {text!r}")
    return name, int(value)


def _steer(args: argparse.Namespace) -> int:
    from forebay.scheduler.admin_api import job_line

    if len(args.names) < 2 or args.names[0] not in VERBS or args.network is None:
        raise UsageError(f"schedule --at: expected {'|'.join(VERBS)} JOB … --at HOST:PORT --network DIR")
    verb, job, *more = args.names
    body: dict[str, Any] = {}
    if verb == "readmit" and more:
        body = {"slices": [int(text) for text in more if text.isdigit()]}
    path = f"/v1/jobs/{urllib.parse.quote(job, safe='')}/{verb}"
    if verb == "pardon":
        path = f"/v1/peers/{urllib.parse.quote(job, safe='')}/pardon"
    answer, _ = ask(args, args.at, path, body)
    print(json.dumps(answer) if args.json else f"pardoned {job}" if verb == "pardon" else job_line(answer))
    return 0


def _status(args: argparse.Namespace) -> int:
    from forebay.scheduler.admin_api import lines

    body, _ = ask(args, args.address, "/v1/status")
    if args.json:
        print(json.dumps(body))
    else:
        print("\n".join(lines(body) if "jobs" in body else _node_lines(body)))
    return 0


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    about = "find datasets by name and lease their slices to workers; or steer a running scheduler's jobs"
    p = add_node(verb, "schedule", _schedule, about, timeout_of="a bootstrap node, then for a data node")
    p.add_argument("names", nargs="*", metavar="NAME", help="datasets, one job each; with --at: a verb and a job")
    p.add_argument("--job", metavar="NAME", help="name of the job (default: the dataset's)")
    p.add_argument(
        "--priority", action="append", default=[], metavar="JOB=N", help="priority of a job for workers that name none"
    )
    p.add_argument("--id", help="dataset id, if several datasets have the name")
    p.add_argument(
        "--publisher",
        action="append",
        default=[],
        metavar="PEER_ID",
        help="lease only datasets signed by one of these peers",
    )
    p.add_argument(
        "--listen", metavar="HOST:PORT", help="address to listen at (default: a free port at the DHT node's address)"
    )
    p.add_argument(
        "--state", type=Path, default=Path("./forebay-state"), metavar="DIR",
        help="ledgers and journal; a restart on it continues (default: ./forebay-state)",
    )  # fmt: skip
    add_limits(p)
    add_from_urls(p)
    p.add_argument("--standby", action="store_true", help="wait until the scheduler on --state ends, then take over")
    p.add_argument("--seq-len", type=positive, default=1024, metavar="L", help="tokens per sample (1024)")
    p.add_argument("--epochs", type=positive, default=1, metavar="N", help="passes over the dataset (1)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the order (0)")
    p.add_argument(
        "--lease", type=float, default=30.0, metavar="S", help="seconds without contact until a lease expires (30)"
    )
    p.add_argument(
        "--max-tokens-per-s",
        type=float,
        default=1e8,
        metavar="N",
        help="limit of one lease; faster uses are recorded later (default: 1e8)",
    )
    p.add_argument(
        "--stall",
        type=float,
        metavar="S",
        help="seconds without progress until a lease expires (default: 20 times --lease)",
    )
    p.add_argument(
        "--steal",
        type=float,
        default=2.0,
        metavar="S",
        help="take work from workers that need longer than this, in seconds, for idle ones (2)",
    )
    p.add_argument(
        "--max-failures",
        type=positive,
        default=3,
        metavar="N",
        help="set a slice aside after this many workers failed on it (3)",
    )
    p.add_argument(
        "--exit-when-done", action="store_true",
        help="exit when every job is done and live workers know it; exit 1 if slices were set aside",
    )  # fmt: skip
    p.add_argument(
        "--at", metavar="HOST:PORT", help=f"a running scheduler, to {', '.join(VERBS)} a job; needs the role admin"
    )
    p = verb("status", _status, "show the status of a scheduler or data node")
    p.add_argument("address", metavar="HOST:PORT", help="address of a scheduler or data node")
    p.add_argument("--network", type=Path, required=True, metavar="DIR", help="this node's directory")


_MOST_PEERS = 10


def _node_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a data node's status: the node, its datasets with their swarms, and the largest readers."""
    state = "draining" if status["draining"] else "up"
    yield (
        f"data node {status['name']} ({status['peer_id']}) at {status['address']}: {state} for "
        f"{format_seconds(status['up_s'])}, {status['connections']:,} connections, "
        f"{format_bytes(status['bytes_sent'])} sent"
    )
    if status["announce_error"]:
        yield f"  not announced: {status['announce_error']}"
    for dataset in status["datasets"]:
        yield f"  {dataset['name']}  {dataset['id']}  {dataset['slices']:,} slices{_swarm(status, dataset['id'])}"
    readers = sorted(status["peers"].items(), key=lambda item: (-item[1], item[0]))
    if readers:
        yield "sent to"
    for peer_id, num_bytes in readers[:_MOST_PEERS]:
        yield f"  {peer_id}  {format_bytes(num_bytes):>10}"
    if len(readers) > _MOST_PEERS:
        yield f"  and {len(readers) - _MOST_PEERS:,} more"


def _swarm(status: Mapping[str, Any], dataset_id: str) -> str:
    """The swarm of a dataset, if it has members."""
    swarm = status["swarms"].get(dataset_id, {})
    if not swarm.get("members"):
        return ""
    banned = f", banned: {', '.join(swarm['banned'])}" if swarm["banned"] else ""
    num_from_origins, passed = swarm["from_origins"], swarm["from_peers"]
    return f"; swarm of {swarm['members']:,}: {num_from_origins:,} slices from here, {passed:,} passed on{banned}"
