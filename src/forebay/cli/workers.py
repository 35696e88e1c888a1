"""Commands of training: the worker of a scheduler, and the coordinator of ranks."""

import contextlib
import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from forebay.cli.arguments import (
    add_identity,
    add_settings,
    address,
    file,
    folder,
    is_loopback,
    positive,
    print_result,
    seconds,
    show,
    size,
)
from forebay.cli.running import (
    add_from_urls,
    add_node,
    joined_network,
    load_identity,
    ready,
    stop_event,
    terminate_on_stdin_close,
    until_stopped,
)
from forebay.errors import UsageError
from forebay.toml import parse_settings, read_toml

_COUNT = [sys.executable, "-m", "forebay.worker.count"]


def _work(args: Namespace) -> int:
    from forebay.lease.scheduler_client import SchedulerClient
    from forebay.network.client import Client
    from forebay.worker.command import loader_arguments, run_command

    if args.name is None and args.scheduler is None:
        raise UsageError(
            "worker: expected a job, got none. Give its name (forebay worker NAME), or --scheduler HOST:PORT for any "
            "job of that scheduler."
        )
    if args.listen not in ("auto", "none"):
        address(f"0.0.0.0{args.listen}" if args.listen.startswith(":") else args.listen)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Until the command runs.
    terminate_on_stdin_close()
    identity = load_identity(args)
    with Client(identity) as client, contextlib.ExitStack() as stack:
        discovery = None
        if args.scheduler is None:
            discovery = stack.enter_context(joined_network(args))[1]
        scheduler = SchedulerClient(identity, client, args.name or "", discovery, args.scheduler, args.timeout)
        network = {
            "identity": str(Path(args.identity).absolute()), "listen": None if args.listen == "none" else args.listen,
            "patience_s": args.timeout, "upload_bytes_per_s": args.upload_limit, "from_urls": args.from_urls or "",
        }  # fmt: skip
        arguments = loader_arguments(
            scheduler, batch_size=args.batch_size, cache_bytes=args.cache_bytes, network=network,
            cache_dir=str(args.cache_dir.absolute()),
        )  # fmt: skip
        if args.bootstrap:  # Else the command joins the DHT itself, and follows the scheduler to another address.
            arguments["scheduler"] = scheduler.addresses()[0]
        scheduler.discovery = None
        stack.close()
        code, stats = run_command(args.command or _COUNT, scheduler, arguments)
    show(args, {"report": stats} if args.json else stats)
    return code


def _coordinate(args: Namespace) -> None:
    from forebay.coordinator.messages import Rules
    from forebay.coordinator.server import Coordinator

    host, port = address(args.listen)
    identity = None
    if args.identity is not None:
        identity = load_identity(args)
    elif not is_loopback(host):
        if not args.allow_plain_http:
            raise UsageError(
                f"coordinator: expected mutual TLS on {host}, got plain HTTP: any host could join the run. "
                "Give --identity DIR for mutual TLS, or --allow-plain-http on a trusted network."
            )
        print(f"forebay: plain HTTP on {host}:{port}: any host that reaches it may join the run.", file=sys.stderr)
    if args.state is None:
        print("forebay: the run's state is in memory; --state DIR stores it.", file=sys.stderr)
    rules = Rules(
        args.min_workers, args.silence_timeout / 3, args.silence_timeout, args.disconnect_timeout, args.step_timeout,
        args.workers_per_member,
    )  # fmt: skip
    coordinator = Coordinator(
        host, port, state_dir=args.state, rules=rules, config=_run_config(args), identity=identity,
        on_note=lambda text: print(f"forebay: {text}", file=sys.stderr, flush=True),
    )  # fmt: skip
    stop = stop_event()
    with coordinator:
        scheme = "http" if identity is None else "https"
        ready(args, role="coordinator", address=coordinator.address, url=f"{scheme}://{coordinator.address}",
              run_id=coordinator.run_id)  # fmt: skip
        until_stopped(stop, (lambda: coordinator.done) if args.exit_when_done else None, identity)
        status = coordinator.status()
    print_result(args, status)


def _run_config(args: Namespace) -> dict[str, Any]:
    """The settings for all workers: the file's, with those of --set laid over them."""
    config = (read_toml(args.config) if args.config is not None else {}) | parse_settings(args.set)
    wrong = [key for key, value in config.items() if not isinstance(value, (str, int, float, bool))]
    if wrong:
        raise UsageError(f"coordinator: expected plain values as settings, got {', '.join(wrong)} of another kind.")
    for key in ("batch_size", "seq_len", "num_steps"):
        if type(config.get(key, 1)) is not int or config.get(key, 1) < 1:
            raise UsageError(f"coordinator: expected {key} of at least 1, got {config[key]!r}.")
    return config


def add_verbs(verb: Any, group: Any) -> None:
    about = "run a program whose forebay.Loader() leases, downloads and shares the slices of a scheduler's job"
    waits = "a bootstrap node, then for a scheduler or data nodes that do not answer"
    p = add_node(verb, "worker", _work, about, timeout_s=60.0, timeout_of=waits)
    p.takes_command, p.usage = True, "forebay worker [NAME] [OPTIONS] [-- COMMAND ARG ...]"
    p.epilog = "COMMAND: the program, such as `python train.py` or `torchrun ...` (default: one that counts tokens)"
    p.add("name", "the job; without it: the job of --scheduler", "NAME", nargs="?")
    p.add("--scheduler", "address of the scheduler (default: found in the DHT)", "HOST:PORT")
    cache_dir = Path("./forebay-cache")
    p.add("--cache-dir", "verified slices (default: ./forebay-cache)", folder, cache_dir)
    p.add("--cache-bytes", "budget of the cache (default: 4GiB)", size, 4 << 30)
    p.add("--batch-size", "samples per step", positive, 8)
    p.add("--listen", "to share slices; none: do not (default: any free port)", "HOST:PORT", "auto")
    p.add("--upload-limit", "bytes per second to others (default: no limit)", size)
    add_from_urls(p)

    p = verb(
        "coordinator",
        _coordinate,
        "assign ranks to the workers of a run, also when workers join or leave",
        log_level="info",
    )
    p.add("--listen", "address to listen at", "HOST:PORT", "127.0.0.1:8000")
    p.add("--min-workers", "start when N workers have joined", positive, 1)
    p.add("--state", "store the run's state; a restart continues it (default: in memory)", "DIR")
    add_identity(p)
    p.add_flag("--allow-plain-http", "allow plain HTTP beyond this machine")
    p.add("--config", "TOML with settings for all workers (default: none)", file)
    add_settings(p, "dataset_name=books or num_steps=1000")
    p.add("--silence-timeout", "silence until a worker is removed", seconds, 90.0)
    p.add("--disconnect-timeout", "the same after a disconnect", seconds, 5.0)
    p.add("--step-timeout", "wait for a step's end, then regroup", seconds, 600.0)
    p.add("--workers-per-member", "per certificate, with --identity", positive, 8)
    p.add_flag("--exit-when-done", "exit when the run's last step is done")
