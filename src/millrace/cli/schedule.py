"""Commands of the scheduler: run one, and ask what it says of itself."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.cli.arguments import positive
from millrace.cli.running import add_node, join_network, listen_at, ready, until_stopped


def _schedule(args: argparse.Namespace) -> int:
    from millrace.network.https import Client
    from millrace.schedule.service import SchedulerService

    identity, discovery = join_network(args)
    host, port = listen_at(args, discovery)
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
        publishers=args.publisher,
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


def _status(args: argparse.Namespace) -> int:
    from millrace.network.https import Client
    from millrace.network.identity import Identity

    body, _ = Client(Identity.load(args.network)).request_json(args.address, "GET", "/v1/status")
    print(json.dumps(body, indent=None if args.json else 2))
    return 0


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    """Adds the verbs of this module."""
    p = add_node(verb, "schedule", _schedule, "a scheduler: find a dataset and lease its slices")
    p.add_argument("name")
    p.add_argument("--id", help="the dataset id, where a name stands for several")
    p.add_argument("--publisher", action="append", default=[], metavar="PEER_ID", help="schedule only what it signed")
    p.add_argument("--listen", metavar="HOST:PORT", help="default: a free port where our DHT node listens")
    p.add_argument("--state", type=Path, default=Path("./millrace-state"), metavar="DIR")
    p.add_argument("--seq-len", type=positive, default=1024)
    p.add_argument("--epochs", type=positive, default=1)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--lease", type=float, default=30.0, metavar="S")
    p.add_argument("--wait", type=float, default=30.0, metavar="S", help="how long to look for a data node")
    p.add_argument("--exit-when-done", action="store_true")
    p = verb("status", _status, "what a scheduler or data node says of itself")
    p.add_argument("address", metavar="HOST:PORT")
    p.add_argument("--network", type=Path, required=True, metavar="DIR")
    p.add_argument("--json", action="store_true")
