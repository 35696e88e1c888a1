"""`forebay coordinate`."""

import argparse
import ipaddress
import json
import socket
import sys
from collections.abc import Callable
from typing import Any

from forebay.cli.arguments import address, positive, seconds
from forebay.cli.running import add_server_options, ready, until_stopped
from forebay.errors import UsageError
from forebay.toml import read_toml

_SETTINGS: dict[str, Callable[[str], Any]] = {
    "dataset-type": str, "dataset-name": str, "tokenizer-name": str, "model-size": str,
    "batch-size": positive, "seq-len": positive, "num-steps": positive, "seed": int,
}  # fmt: skip


def _coordinate(args: argparse.Namespace) -> int:
    from forebay.coordinator.messages import Rules
    from forebay.coordinator.server import Coordinator

    host, port = address(args.listen)
    identity = None
    if args.network is not None:
        from forebay.network.pki.identity import Identity

        identity = Identity.load(args.network)
    elif not _is_loopback(host):
        if not args.open:
            raise UsageError(
                f"coordinate: expected mutual TLS on {host}, got plain HTTP: any host could join the run. "
                "Give --network DIR for mutual TLS, or --open on a trusted network."
            )
        print(
            f"forebay: open: plain HTTP on {host}:{port}; any host that reaches it may join the run.", file=sys.stderr
        )
    if args.state is None:
        print(
            "forebay: the run's state is in memory and lost when this process ends; --state DIR stores it.",
            file=sys.stderr,
        )
    if args.stale <= args.heartbeat:
        raise UsageError(
            f"coordinate: expected --stale above --heartbeat, got {args.stale:g} and {args.heartbeat:g} s."
        )
    rules = Rules(args.min_workers, args.heartbeat, args.stale, args.lost, args.grace, args.workers_per_member)
    coordinator = Coordinator(
        host, port, state_dir=args.state, rules=rules, config=_config(args), identity=identity,
        on_note=lambda text: print(f"forebay: {text}", file=sys.stderr, flush=True),
    )  # fmt: skip
    with coordinator:
        scheme = "http" if identity is None else "https"
        ready(args, role="coordinator", address=coordinator.address, url=f"{scheme}://{coordinator.address}",
              run_id=coordinator.run_id)  # fmt: skip
        until_stopped(args, (lambda: coordinator.done) if args.until_done else None)
        status = coordinator.status()
    if args.json:
        print(json.dumps(status), flush=True)
    return 0


def _config(args: argparse.Namespace) -> dict[str, Any]:
    """The settings for workers: the file's, overridden by the command line."""
    config: dict[str, Any] = {}
    if args.config is not None:
        config = read_toml(args.config)
        wrong = [key for key, value in config.items() if not isinstance(value, (str, int, float, bool))]
        if wrong:
            raise UsageError(
                f"coordinate: expected plain values in {args.config}, got {', '.join(wrong)} of another kind."
            )
    overrides = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in _SETTINGS}
    config = {**config, **{key: value for key, value in overrides.items() if value is not None}}
    size = config.get("batch_size", 1)
    if type(size) is not int or size < 1:
        raise UsageError(f"coordinate: expected batch_size of at least 1, got {size!r}.")
    return config


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host's ports."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(addresses) and all(ipaddress.ip_address(item.partition("%")[0]).is_loopback for item in addresses)


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    p = verb("coordinate", _coordinate, "assign ranks to the workers of a run, also when workers join or leave")
    p.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="default 127.0.0.1:8000")
    p.add_argument("--min-workers", type=positive, default=1, metavar="N", help="start when N workers have joined")
    p.add_argument("--state", metavar="DIR", help="store the run's state here; a restart continues it")
    p.add_argument("--network", metavar="DIR", help="mutual TLS as this node (made by forebay network join)")
    p.add_argument("--open", action="store_true", help="allow plain HTTP beyond this machine")
    p.add_argument("--config", metavar="FILE.toml", help="settings for all workers; they override the workers' own")
    for name, kind in _SETTINGS.items():
        p.add_argument(f"--{name}", type=kind, help="this setting for all workers")
    p.add_argument(
        "--heartbeat", type=seconds, default=30.0, metavar="S", help="seconds between two heartbeats of a worker (30)"
    )
    p.add_argument(
        "--stale",
        type=seconds,
        default=90.0,
        metavar="S",
        help="seconds without a heartbeat until a worker is removed (90)",
    )
    p.add_argument(
        "--lost",
        type=seconds,
        default=5.0,
        metavar="S",
        help="seconds after a disconnect until a worker is removed (5)",
    )
    p.add_argument(
        "--workers-per-member",
        type=positive,
        default=8,
        metavar="N",
        help="workers per certificate, with --network (default: 8)",
    )
    p.add_argument(
        "--grace", type=seconds, default=600.0, metavar="S", help="seconds to wait for the end of a step (600)"
    )
    p.add_argument("--until-done", action="store_true", help="end when the run's last step is done")
    add_server_options(p)
