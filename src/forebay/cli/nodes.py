"""Commands on a network: its nodes (dht, serve, find, status), the scheduler and its jobs, workers, the coordinator."""

import contextlib
import json
import math
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from forebay.cli.arguments import (
    add_settings,
    address,
    file,
    folder,
    positive,
    print_note,
    print_result,
    seconds,
    show,
    size,
    validate,
)
from forebay.cli.running import (
    add_from_urls,
    add_node,
    check_plain_http,
    joined_network,
    listening_address,
    load_identity,
    log,
    ready,
    send_request,
    stop_event,
    terminate_on_stdin_close,
    until_stopped,
)
from forebay.errors import LeaseError, NetworkError, UsageError, did_you_mean
from forebay.storage.hosts import join_address
from forebay.storage.retry import log_while_waiting
from forebay.toml import parse_settings


def _status(args: Namespace) -> bool:
    if args.address is None:
        raise UsageError("status: expected HOST:PORT, got none. Give a node's address, or set FOREBAY_STATUS.")
    if args.address.startswith("udp://"):
        from forebay.network.dht import ping

        if reason := ping(address(args.address.removeprefix("udp://")), args.timeout):
            raise NetworkError(
                f"DHT node at {args.address}: expected an answer within {args.timeout:g} s, got none: {reason}. "
                "Is it running (forebay dht), and does UDP reach it?"
            )
        print_result(args, {"healthy": True}, f"DHT node at {args.address}: up")
        return False
    status, peer = send_request(args, args.address, "/v1/status", timeout_s=args.timeout)
    is_healthy = not status.get("draining") and (args.probe or not (status.get("faults") or status.get("error")))
    if args.json:  # Also for probes, which repeat this every few seconds: the view imports much.
        print(json.dumps({"healthy": is_healthy, "peer_id": peer.peer_id, "name": peer.name, **status}))
    else:
        from forebay.observe.top import format_view
        from forebay.observe.views import view_of

        print(format_view(view_of(status)), end="")
    return not is_healthy


def _dht(args: Namespace) -> None:
    from forebay.network.dht import LibtorrentDht

    host, port = address(args.listen)
    with contextlib.ExitStack() as nodes:
        bootstrap = [address(a) for a in args.bootstrap]
        first = nodes.enter_context(contextlib.closing(LibtorrentDht(host, port, bootstrap)))
        for _ in range(args.nodes - 1):
            nodes.enter_context(contextlib.closing(LibtorrentDht(host, 0, [(host, first.port)])))
        ready(args, role="dht", address=f"{host}:{first.port}")
        until_stopped(stop_event())


def _serve(args: Namespace) -> None:
    from forebay.data_node import DataNode
    from forebay.dataset.reader import open_dataset
    from forebay.network.access import AccessPolicy
    from forebay.network.limits import ServerLimits, parse_limits
    from forebay.storage.origins import open_remote

    access = AccessPolicy(args.access) if args.access is not None else None
    datasets = [
        open_remote(path) if "://" in path and not path.startswith("file://") else open_dataset(path)
        for path in args.datasets
    ]
    limits = parse_limits(ServerLimits(upload_bytes_per_s=args.upload_limit or math.inf), args.limit)
    stop = stop_event()
    names = {dataset.name: dataset.id for dataset in datasets}
    with joined_network(args, "serve", "data", *names, stop=stop) as (identity, discovery):
        host, port = listening_address(args, discovery)
        with DataNode(
            identity, datasets, host, port, discovery, ttl_s=args.ttl, access=access, limits=limits,
        ) as node:  # fmt: skip
            ready(args, role="data node", address=node.address, peer_id=identity.peer_id, datasets=names)
            until_stopped(stop, identity=identity)
        print_result(args, node.status())


def _find(args: Namespace) -> bool:
    from forebay.network.client import Client
    from forebay.network.discovery import find_providers, record_key

    what = f"data nodes of {args.name!r}; the DHT was asked and names no address that answers"
    with joined_network(args) as (identity, discovery), log_while_waiting(log, lambda: what):
        claims = find_providers(discovery, Client(identity), identity.network_id, args.name, timeout_s=args.timeout)
        key = record_key(identity.network_id, "dataset", args.name)
        addresses = [] if claims else [join_address(*item) for item in discovery.find(key, 0.0)]
    providers = [
        {"name": c.name, "dataset_id": c.dataset_id, "slices": c.num_slices, "peer_id": c.peer_id, "address": c.address}
        for c in claims
    ]
    line = "{name}  {dataset_id}  {slices} slices  {peer_id} at {address}"
    print_result(args, providers, *(line.format(**claim) for claim in providers))
    if not providers:
        print_note(
            f"expected a data node of {args.name!r} in this network, got none that answers, of {len(addresses)} in the "
            f"DHT ({', '.join(addresses[:5])}). Check the name, that it runs (forebay serve), and that this node may "
            "read it"
        )
    elif len({c.dataset_id for c in claims}) > 1:
        print_note(f"{args.name!r} is the name of several datasets here; they are never mixed")
    return not providers


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
    stop = stop_event()
    standby = partial(print_result, args, {"standby": True}, f"standing by for {args.state}")
    with joined_network(args, "scheduler", "scheduler", args.name, stop=stop) as (identity, discovery):
        host, port = listening_address(args, discovery)
        service = SchedulerService(
            identity, args.name, discovery, Client(identity), args.state, host, port, dataset_id=args.id or "",
            seq_len=args.seq_len, wait_s=args.timeout, standby=standby if args.standby else None, stopping=stop,
            publishers=args.publisher, limits=limits, from_urls=args.from_urls or "", epochs=args.epochs,
            seed=args.seed, lease_s=args.lease_timeout, stall_s=args.idle_timeout,
            max_failures=args.max_failures, **samples,
        )  # fmt: skip
        try:
            service.start()
            if stop.is_set():
                return
            ready(args, role="scheduler", address=service.address, peer_id=identity.peer_id,
                  ledger=str(service.ledger_path))  # fmt: skip
            until_stopped(stop, service.is_over if args.exit_when_done else None, identity)
            left_out = service.left_out() if args.exit_when_done else ""
        finally:
            service.stop()
    if left_out:
        raise LeaseError(
            f"{left_out}. Find out why workers could not read them, then run the missing samples as another job."
        )


def _job(args: Namespace) -> None:
    from forebay.scheduler.status import job_line

    if args.scheduler is None:
        raise UsageError("job: expected --scheduler HOST:PORT, got none.")
    path, body = f"/v1/job/{args.action}", dict[str, Any]()
    if args.arguments:
        if args.action != "readmit" or not all(text.isdecimal() for text in args.arguments):
            expected = "no further arguments (readmit: numbers of slices)"
            raise UsageError(f"job {args.action}: expected {expected}, got {' '.join(args.arguments)!r:.100}.")
        body = {"slices": [int(text) for text in args.arguments]}
    reply, _ = send_request(args, args.scheduler, path, body)
    print_result(args, reply, job_line(reply))


_COUNT = [sys.executable, "-m", "forebay.worker.count"]


def _work(args: Namespace) -> int:
    from forebay.fetch.cache import ChunkCache
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
    identity = load_identity(args, "worker", "worker", *filter(None, [args.name]))
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
        log.info("%s joins the job %s of %s", identity.name, scheduler.name, ", ".join(scheduler.addresses()))
        ChunkCache(args.cache_dir, args.cache_bytes).close()  # What is wrong with its disk is told here, once.
        scheduler.discovery = None
        stack.close()
        code, stats = run_command(args.command or _COUNT, scheduler, arguments)
    show(args, {"report": stats} if args.json else stats)
    return code


def _coordinate(args: Namespace) -> None:
    from forebay.coordinator.messages import Rules
    from forebay.coordinator.server import Coordinator

    host, port = address(args.listen)
    identity, config = None, _run_config(args)
    if args.identity is not None:
        identity = load_identity(args)
    else:
        check_plain_http(args, host, "join the run", "Give --identity DIR for mutual TLS")
    if args.state is None:
        print_note("the run's state is in memory; --state DIR stores it.")
    rules = Rules(
        args.min_workers, args.silence_timeout / 3, args.silence_timeout, args.disconnect_timeout,
    )  # fmt: skip
    coordinator = Coordinator(
        host, port, state_dir=args.state, rules=rules, config=config, identity=identity,
        on_note=print_note,
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
    """The settings for all workers."""
    from forebay.worker.config import WorkerConfig

    config = parse_settings(args.set)
    wrong = [key for key, value in config.items() if not isinstance(value, (str, int, float, bool))]
    if wrong:
        raise UsageError(f"coordinator: expected plain values as settings, got {', '.join(wrong)} of another kind.")
    names = [field.name for field in fields(WorkerConfig)]
    for key in sorted(config.keys() - set(names)):  # Settings of other programs have other names.
        if near := did_you_mean(key, names):
            raise UsageError(f"{key}: expected a setting of python -m forebay.worker.{near}")
    validate(WorkerConfig, {key: config[key] for key in config.keys() & set(names)}, "coordinator")
    return config


def add_verbs(verb: Any, group: Any) -> None:
    p = verb("dht", _dht, "run nodes of the Kademlia DHT that others start from", log_level="info")
    p.add("--listen", "of the first node (UDP); 0: a free port", "HOST:PORT", "127.0.0.1:0")
    p.add_list("--bootstrap", "DHT node to join through; may be repeated (default: none)", "HOST:PORT")
    p.add("--nodes", "number of nodes, the others at free ports", positive, 1)
    p = add_node(verb, "serve", _serve, "run a data node: serve datasets and announce them")
    p.add("datasets", "a directory, or a URL that members fetch from too", "DATASET", nargs="+")
    p.add("--listen", "address (default: a free port at the DHT node's address)", "HOST:PORT")
    p.add("--ttl", "how long an announcement is valid", seconds, 60.0)
    p.add("--upload-limit", "bytes per second to all (default: no limit)", size)
    p.add_list("--limit", "limit of members (default: docs/reference/http-api.md)", "NAME=NUMBER")
    p.add("--access", "TOML: who may read what, how much a day (default: all)", file)
    p = add_node(verb, "find", _find, "list the data nodes of a dataset", timeout_s=10.0, timeout_of="the DHT")
    p.add("name", "name of the dataset", "NAME")
    about = "show the status of a node; exit 1 if it takes no requests, or no data node serves its job"
    p = verb("status", _status, about)
    about = "scheduler, data node or coordinator; http://… without TLS, udp://… a DHT node (default: FOREBAY_STATUS)"
    p.add("address", about, "HOST:PORT", os.environ.get("FOREBAY_STATUS"), nargs="?")
    p.add("--timeout", "longest wait for the answer", seconds, 2.0)
    p.add_flag("--probe", "exit 1 only if it takes no requests: for what restarts a node")

    about = "find a dataset by name and lease its slices to workers"
    p = add_node(verb, "scheduler", _schedule, about, timeout_of="a bootstrap node, then for a data node")
    p.add("name", "dataset, and name of the job", "NAME")
    p.add("--id", "dataset id, if several datasets have the name (default: any)")
    p.add_list("--publisher", "lease only a dataset that it signed; may be repeated (default: any)", "PEER_ID")
    p.add("--listen", "address (default: a free port at the DHT node's address)", "HOST:PORT")
    p.add("--state", "ledger and journal (default: ./forebay-state)", folder, Path("./forebay-state"))
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
    p = verb("job", _job, "pause, resume or change the job of a running scheduler; needs the role admin")
    p.add("action", "readmit: slices that were set aside", ["pause", "resume", "readmit"])
    p.add("arguments", "readmit: slices (default: all)", "ARG", nargs="*")
    p.add("--scheduler", "address of the scheduler (required)", "HOST:PORT")

    about = "run a program whose forebay.Loader() leases, downloads and shares the slices of a scheduler's job"
    waits = "a bootstrap node, then for a scheduler or data nodes that do not answer"
    p = add_node(verb, "worker", _work, about, timeout_s=60.0, timeout_of=waits)
    p.takes_command, p.usage = True, "forebay worker [NAME] [OPTIONS] [-- COMMAND ARG ...]"
    p.epilog = "COMMAND: the program, such as `python train.py` or `torchrun ...` (default: one that counts tokens)"
    p.add("name", "the job; without it: the job of --scheduler", "NAME", nargs="?")
    p.add("--scheduler", "address of the scheduler (default: found in the DHT)", "HOST:PORT")
    p.add("--cache-dir", "verified slices (default: ./forebay-cache)", folder, Path("./forebay-cache"))
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
    p.add_flag("--allow-plain-http", "allow plain HTTP beyond this machine")
    add_settings(p, "dataset_name=books or num_steps=1000")
    p.add("--silence-timeout", "silence until a worker is removed", seconds, 90.0)
    p.add("--disconnect-timeout", "the same after a disconnect", seconds, 5.0)
    p.add_flag("--exit-when-done", "exit when the run's last step is done")
