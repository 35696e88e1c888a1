"""The command line: one verb, one function; each imports what it needs when it runs.

Exit 0 done, 1 failed, 2 wrong usage, 130 interrupted. Results go to stdout (the last line is JSON where `--json` is
given), everything else to stderr. A failure is one line: what, where, what to do.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.errors import MillraceError, UsageError

if TYPE_CHECKING:
    from millrace.network.discovery import Discovery
    from millrace.network.identity import Identity

Verb = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; no error leaves it as a traceback."""
    args = _parser().parse_args(argv)
    verb: Verb = args.verb
    try:
        return verb(args)
    except KeyboardInterrupt:
        print("millrace: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output left: not a failure of ours. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UsageError as error:
        print(f"millrace: {error}", file=sys.stderr)
        return 2
    except MillraceError as error:
        print(f"millrace: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"millrace: {_explain(error)}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(
            f"millrace: this command needs the package {error.name!r}, which is not installed. "
            "Install it with: pip install 'millrace[network]'",
            file=sys.stderr,
        )
        return 1


def _explain(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    advice = {
        errno.ENOSPC: "the disk is full. Free some space or choose another directory, then run the same command again",
        errno.EDQUOT: "the disk quota is used up. Free some space or choose another directory",
        errno.EACCES: "no permission. Check who owns it",
        errno.EROFS: "the file system is read-only. Choose another directory",
        errno.ENOENT: "it does not exist. Check the path",
    }.get(error.errno or 0, "the operating system refused")
    return f"{error.strerror or error}{where}: {advice}."


# ------------------------------------------------------------------------------------------------ data


def _prepare(args: argparse.Namespace) -> int:
    from millrace.observe.progress import PrepareBar
    from millrace.prepare.recipe import prepare

    with PrepareBar(enabled=not args.quiet) as bar:
        summary = prepare(
            args.inputs,
            args.out,
            tokenizer=args.tokenizer,
            name=args.name,
            slice_bytes=args.slice_bytes,
            workers=args.workers,
            seed=args.seed,
            keep_ids=args.keep_ids,
            text_key=args.text_key,
            max_bad_fraction=args.max_bad,
            on_progress=bar.update,
        )
    result = summary.to_json()
    if not args.json:
        dropped = ", ".join(f"{n} {reason}" for reason, n in result["dropped"].items()) or "none"
        print(
            f"{result['documents_out']:,} of {result['documents_in']:,} documents, {result['tokens']:,} tokens "
            f"in {result['slices']:,} slices (dropped: {dropped})\n{args.out}  id {result['id']}"
        )
    else:
        print(json.dumps(result))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from millrace.dataset.reader import open_dataset

    _show(open_dataset(args.dataset).describe(), args.json)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from millrace.dataset.reader import open_dataset
    from millrace.observe.progress import bytes_bar

    dataset = open_dataset(args.dataset)
    with bytes_bar("verify", dataset.manifest.bytes, enabled=not args.quiet) as advance:
        report = dataset.verify(on_progress=advance)
    if args.json:
        print(json.dumps({"ok": report.ok, "bad": report.bad}))
    elif report.ok:
        print(f"ok: {dataset.num_slices:,} slices match their hashes  id {dataset.id}")
    else:
        for name in report.bad:
            print(f"bad: {name}")
        print(
            "Fetch or prepare these again; until then nothing should train on this dataset.", file=sys.stderr
        )
    return 0 if report.ok else 1


def _adopt(args: argparse.Namespace) -> int:
    from millrace.dataset.adopt import adopt

    _show(adopt(args.directory, name=args.name).describe(), args.json)
    return 0


# --------------------------------------------------------------------------------------------- network


def _network_init(args: argparse.Namespace) -> int:
    from millrace.network.identity import create_network

    create_network(args.directory, args.name, bootstrap=[_address(a) for a in args.bootstrap])
    print(f"network {args.name!r} in {args.directory}. Keep root-key.pem secret: it admits nodes.")
    print(f"next: millrace network join {args.directory} NODE_DIRECTORY --name NODE")
    return 0


def _network_join(args: argparse.Namespace) -> int:
    from millrace.network.identity import join

    identity = join(args.network, args.directory, args.name)
    print(
        f"{identity.name} is peer {identity.peer_id}. Its files are in {args.directory}; use --network with it."
    )
    return 0


def _dht(args: argparse.Namespace) -> int:
    from millrace.network.dht import LibtorrentDht

    host, port = _address(args.listen)
    first = LibtorrentDht(host, port, [_address(a) for a in args.bootstrap])
    nodes = [first]
    nodes += [LibtorrentDht(host, 0, [(host, first.port)]) for _ in range(args.nodes - 1)]
    _ready(args, role="dht", address=f"{host}:{first.port}")
    try:
        _until_stopped(args)
    finally:
        for node in nodes:
            node.close()
    return 0


def _serve(args: argparse.Namespace) -> int:
    from millrace.dataset.reader import open_dataset
    from millrace.serve import DataNode

    datasets = [open_dataset(path) for path in args.datasets]
    identity, discovery = _join_network(args)
    host, port = _address(args.listen)
    node = DataNode(identity, datasets, host, port, discovery, ttl_s=args.ttl)
    try:
        node.start()
        _ready(
            args,
            role="data node",
            address=node.address,
            peer_id=identity.peer_id,
            datasets={d.name: d.id for d in datasets},
        )
        _until_stopped(args)
    finally:
        node.stop()
        discovery.close()
    if args.json:
        print(json.dumps(node.status()), flush=True)
    return 0


def _find(args: argparse.Namespace) -> int:
    from millrace.network.discovery import find_providers
    from millrace.network.https import Client

    identity, discovery = _join_network(args)
    try:
        claims = find_providers(
            discovery, Client(identity), identity.network_id, args.name, timeout_s=args.timeout
        )
    finally:
        discovery.close()
    found = [
        {
            "name": c.name,
            "dataset_id": c.dataset_id,
            "slices": c.num_slices,
            "peer_id": c.peer_id,
            "address": c.address,
        }
        for c in claims
    ]
    if args.json:
        print(json.dumps(found))
    for claim in found if not args.json else []:
        print("{name}  {dataset_id}  {slices} slices  {peer_id} at {address}".format(**claim))
    if not found:
        print(
            f"millrace: nobody announces a dataset named {args.name!r} in this network. "
            "Check the name and that its data node runs (millrace serve)",
            file=sys.stderr,
        )
        return 1
    if len({c.dataset_id for c in claims}) > 1:
        print(
            f"millrace: {args.name!r} stands for several datasets here; they are never mixed", file=sys.stderr
        )
    return 0


# ------------------------------------------------------------------------------------- schedule and work


def _schedule(args: argparse.Namespace) -> int:
    from millrace.network.https import Client
    from millrace.schedule.service import SchedulerService

    identity, discovery = _join_network(args)
    host, port = _address(args.listen)
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
    )
    try:
        service.start()
        _ready(
            args,
            role="scheduler",
            address=service.address,
            peer_id=identity.peer_id,
            ledger=str(service.ledger_path),
        )
        _until_stopped(args, until=service.is_done if args.exit_when_done else None)
    finally:
        service.stop()
        discovery.close()
    return 0


def _work(args: argparse.Namespace) -> int:
    from millrace.worker.client import run_worker

    settings = _work_settings(args)
    identity, discovery = _join_network(args)
    stop = threading.Event()
    _on_stop(stop, args)
    try:
        report = run_worker(
            identity,
            settings["name"],
            discovery=discovery,
            scheduler=settings["scheduler"],
            cache_dir=Path(settings["cache_dir"]),
            cache_bytes=int(settings["cache_bytes"]),
            batch_size=int(settings["batch_size"]),
            trainer=settings["trainer"],
            on_progress=lambda p: print(json.dumps(p) if args.json else _progress_line(p), flush=True),
            stop=stop,
        )
    finally:
        discovery.close()
    result = report.to_json()
    if args.json:
        print(json.dumps({"report": result}), flush=True)
    else:
        _show(result, False)
    return 0


def _work_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Flags over the file's [work] table over defaults."""
    settings: dict[str, Any] = {
        "name": None,
        "scheduler": None,
        "cache_dir": "./millrace-cache",
        "cache_bytes": 4 << 30,
        "batch_size": 8,
        "trainer": "auto",
        "network": None,
    }
    if args.config:
        import tomllib

        try:
            table = tomllib.loads(Path(args.config).read_text()).get("work", {})
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{args.config}: not valid TOML: {error}. Mend the line named") from None
        if unknown := sorted(set(table) - set(settings)):
            raise UsageError(
                f"{args.config}: unknown key work.{unknown[0]}. Known: {', '.join(sorted(settings))}"
            )
        settings |= table
    settings |= {k: v for k in settings if (v := getattr(args, k, None)) is not None}
    if not settings["name"]:
        raise UsageError(
            "which dataset? Give its name: millrace work NAME, or work.name in the --config file"
        )
    args.network = settings["network"]
    return settings


def _progress_line(p: dict[str, Any]) -> str:
    loss = "" if p.get("loss") is None else f"  loss {p['loss']:.3f}"
    return f"step {p['step']:,}  {p['tokens']:,} tokens  {p['tokens_per_s']:,.0f} tokens/s  waited {p['wait_share']:.1%}{loss}"


def _status(args: argparse.Namespace) -> int:
    from millrace.network.https import Client
    from millrace.network.identity import Identity

    body, _ = Client(Identity.load(args.network)).request_json(args.address, "GET", "/v1/status")
    print(json.dumps(body, indent=None if args.json else 2))
    return 0


def _ledger_verify(args: argparse.Namespace) -> int:
    from millrace.ledger import verify_ledger
    from millrace.network.identity import verify

    report = verify_ledger(args.file, verify=verify)
    if args.json:
        print(json.dumps(report.to_json()))
    else:
        for e in report.epochs:
            print(
                f"epoch {e['epoch']}: {e['samples']:,} samples used, {e['missing']:,} missing, {e['repeated']:,} repeated"
            )
        for problem in report.problems:
            print(f"problem: {problem}")
        print("ok: chain, signatures and coverage hold" if report.ok else "NOT ok")
    return 0 if report.ok else 1


def _demo(args: argparse.Namespace) -> int:
    from millrace.demo import run_demo

    return run_demo(
        inputs=args.input,
        json_file=args.json,
        keep=args.keep,
        trainer=args.trainer,
        max_bytes=args.max_bytes,
        tokenizer=args.tokenizer,
    )


# --------------------------------------------------------------------------------------------- shared


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    width = max(map(len, result), default=0)
    for key, value in result.items():
        print(f"{key:<{width}}  {value:,}" if isinstance(value, int) else f"{key:<{width}}  {value}")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{text!r} is not an address: expected HOST:PORT, such as 127.0.0.1:7410")
    return host, int(port)


def _join_network(args: argparse.Namespace) -> tuple[Identity, Discovery]:
    """This node's identity and its place in the DHT; the caller closes the latter."""
    from millrace.network.dht import LibtorrentDht
    from millrace.network.identity import Identity

    if args.network is None:
        raise UsageError(
            "which network? Give the node's directory: --network DIR (made by millrace network join)"
        )
    identity = Identity.load(args.network)
    bootstrap = [_address(a) for a in args.bootstrap] or list(identity.bootstrap)
    if not bootstrap:
        raise UsageError(
            f"no DHT node is known for {args.network}: give --bootstrap HOST:PORT (one runs with: millrace dht)"
        )
    host, port = _address(args.dht)
    return identity, LibtorrentDht(host, port, bootstrap)


def _ready(args: argparse.Namespace, **facts: Any) -> None:
    """Says that a server is up: one line, which other programs wait for."""
    if args.json:
        print(json.dumps({"ready": True, **facts}), flush=True)
    else:
        print("ready: " + "  ".join(f"{k} {v}" for k, v in facts.items()), flush=True)


def _on_stop(stop: threading.Event, args: argparse.Namespace) -> None:
    """SIGTERM and SIGINT set `stop`; so does the end of our standard input, if --lifeline was given."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if args.lifeline:

        def watch() -> None:
            # A parent that dies, however it dies, closes the pipe: no process is left behind.
            while sys.stdin.buffer.read(4096):
                pass
            stop.set()

        threading.Thread(target=watch, daemon=True).start()


def _until_stopped(args: argparse.Namespace, until: Callable[[], bool] | None = None) -> None:
    stop = threading.Event()
    _on_stop(stop, args)
    while not stop.wait(0.2):
        if until is not None and until():
            return


def size(text: str) -> int:
    """Bytes from `64MiB`, `1GB`, `4096` …; decimal and binary units."""
    units = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    units |= {f"{u}B": 1000 ** (i + 1) for i, u in enumerate("KMGT")}
    units |= {f"{u}IB": 1024 ** (i + 1) for i, u in enumerate("KMGT")}
    number = text.strip().rstrip("kmgtibKMGTIB")
    unit = text.strip()[len(number) :].upper()
    try:
        value = int(float(number) * units[unit])
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: try 64MiB, 1GB or 4096") from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a size must be above zero")
    return value


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above zero")
    return value


def _parser() -> argparse.ArgumentParser:
    from millrace import __version__

    parser = argparse.ArgumentParser(
        prog="millrace", description="Raw text in, a GPU that never waits out.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"millrace {__version__}")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)

    def verb(name: str, run: Verb, about: str, parent: Any = verbs) -> argparse.ArgumentParser:
        p: argparse.ArgumentParser = parent.add_parser(
            name, help=about, description=about, allow_abbrev=False
        )
        p.set_defaults(verb=run)
        return p

    def group(name: str, about: str) -> Any:
        return verbs.add_parser(name, help=about, description=about).add_subparsers(
            metavar="COMMAND", required=True
        )

    _data_verbs(verb)
    _network_verbs(verb, group("network", "identities and membership"))
    ledger = group("ledger", "who used which samples")
    p = verb("verify", _ledger_verify, "prove that each sample of an epoch was used exactly once", ledger)
    p.add_argument("file", type=Path)
    p.add_argument("--json", action="store_true")
    return parser


def _data_verbs(verb: Callable[..., argparse.ArgumentParser]) -> None:
    p = verb("demo", _demo, "the whole thing on this machine, in about a minute")
    p.add_argument(
        "--input", nargs="+", type=Path, metavar="PATH", help="text to train on (default: Python's library)"
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="also write the summary here")
    p.add_argument("--keep", type=Path, metavar="DIR", help="keep everything it makes in this new directory")
    p.add_argument("--trainer", choices=["auto", "gpt", "count", "none"], default="auto")
    p.add_argument("--max-bytes", type=size, default=None, help="use at most this much of the default text")
    p.add_argument("--tokenizer", default="train:4096")

    p = verb("prepare", _prepare, "raw text to a dataset")
    p.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="JSONL (.gz, .zst), Parquet, text files, directories"
    )
    p.add_argument("--out", required=True, type=Path, metavar="DIR")
    p.add_argument(
        "--tokenizer",
        required=True,
        metavar="T",
        help="a tokenizer.json, a hub name, `bytes` or `train:VOCAB`",
    )
    p.add_argument("--name", help="the dataset's name (default: the directory's)")
    p.add_argument("--slice-bytes", type=size, default=64 << 20, metavar="N")
    p.add_argument("--workers", type=_positive, default=None, metavar="N")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--keep-ids", type=Path, metavar="FILE", help="write each kept document's source id here")
    p.add_argument("--text-key", default="text", help="the field or column that holds the text")
    p.add_argument(
        "--max-bad", type=float, default=0.05, metavar="FRACTION", help="more bad records than this: stop"
    )
    p.add_argument("--quiet", action="store_true")
    p.add_argument("--json", action="store_true")

    for name, run, about in (
        ("inspect", _inspect, "what is in a dataset"),
        ("verify", _verify, "is a dataset whole"),
    ):
        p = verb(name, run, about)
        p.add_argument("dataset")
        p.add_argument("--json", action="store_true")
        p.add_argument("--quiet", action="store_true")
    p = verb("adopt", _adopt, "give a directory of SafeTensors files a manifest")
    p.add_argument("directory", type=Path)
    p.add_argument("--name")
    p.add_argument("--json", action="store_true")


def _network_verbs(verb: Callable[..., argparse.ArgumentParser], network: Any) -> None:
    p = verb("init", _network_init, "make a network: its root key and certificate", network)
    p.add_argument("directory", type=Path)
    p.add_argument("--name", default="millrace")
    p.add_argument(
        "--bootstrap",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a DHT node that members start from",
    )
    p = verb("join", _network_join, "admit a node: its own key, and a certificate from the root", network)
    p.add_argument("network", type=Path)
    p.add_argument("directory", type=Path)
    p.add_argument("--name", required=True)

    def node(name: str, run: Verb, about: str, network: bool = True) -> argparse.ArgumentParser:
        p = verb(name, run, about)
        if network:
            p.add_argument(
                "--network", type=Path, metavar="DIR", help="this node's directory, from network join"
            )
            p.add_argument(
                "--dht", default="127.0.0.1:0", metavar="HOST:PORT", help="where our DHT node listens (UDP)"
            )
        p.add_argument("--bootstrap", action="append", default=[], metavar="HOST:PORT")
        p.add_argument("--json", action="store_true")
        p.add_argument("--lifeline", action="store_true", help="stop when standard input ends")
        return p

    p = node("dht", _dht, "nodes of the Kademlia DHT that others start from", network=False)
    p.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    p.add_argument("--nodes", type=_positive, default=1)
    p = node("serve", _serve, "a data node: serve datasets and announce them")
    p.add_argument("datasets", nargs="+", metavar="DATASET")
    p.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    p.add_argument(
        "--ttl", type=float, default=60.0, metavar="S", help="how long a claim holds without renewal"
    )
    p = node("find", _find, "who has a dataset")
    p.add_argument("name")
    p.add_argument("--timeout", type=float, default=10.0, metavar="S")
    p = node("schedule", _schedule, "a scheduler: find a dataset and lease its slices")
    p.add_argument("name")
    p.add_argument("--id", help="the dataset id, where a name stands for several")
    p.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    p.add_argument("--state", type=Path, default=Path("./millrace-state"), metavar="DIR")
    p.add_argument("--seq-len", type=_positive, default=1024)
    p.add_argument("--epochs", type=_positive, default=1)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--lease", type=float, default=30.0, metavar="S")
    p.add_argument("--exit-when-done", action="store_true")
    p = node("work", _work, "a worker: lease, fetch, verify, train, acknowledge")
    p.add_argument("name", nargs="?")
    p.add_argument("--config", type=Path, metavar="F", help="TOML with a [work] table; flags win over it")
    p.add_argument("--scheduler", metavar="HOST:PORT", help="default: found in the DHT")
    p.add_argument("--cache-dir", metavar="DIR")
    p.add_argument("--cache-bytes", type=size)
    p.add_argument("--batch-size", type=_positive)
    p.add_argument("--trainer", choices=["auto", "gpt", "count", "none"])
    p = verb("status", _status, "what a scheduler or data node says of itself")
    p.add_argument("address", metavar="HOST:PORT")
    p.add_argument("--network", type=Path, required=True, metavar="DIR")
    p.add_argument("--json", action="store_true")


if __name__ == "__main__":
    sys.exit(main())
