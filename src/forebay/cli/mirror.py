"""`forebay mirror`: a dataset, or shared shards, copied to a directory or a bucket of one's own."""

import argparse
import contextlib
import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forebay.cli.arguments import add_from_urls, positive, show, size
from forebay.errors import UsageError


def _is_of_shards(args: argparse.Namespace) -> bool:
    """Whether the source has shards, if the arguments do not tell."""
    if args.shards is not None and (args.slices is not None or args.id is not None):
        raise UsageError("mirror: expected --shards, or --slices and --id of a dataset, got both. Give one.")
    if args.shards is not None or args.slices is not None or args.id is not None:
        return args.shards is not None
    if args.source.startswith("forebay://"):
        return False
    from forebay.mirror.shards import holds_shards

    return holds_shards(args.source)


def _mirror_shards(args: argparse.Namespace) -> int:
    from forebay.mirror.shards import mirror_shards
    from forebay.observe.progress import bar

    name = hashlib.sha256(f"{args.source} {args.target}".encode()).hexdigest()[:16]
    # Files are renamed into a directory, so temporary ones are on its disk.
    beside = Path(args.target) / ".mirror" if "://" not in args.target else Path(tempfile.gettempdir())
    temporary = (args.tmp_dir or beside) / f"forebay-mirror-{name}"
    with bar("mirror", None, enabled=not args.quiet) as advance:
        report = mirror_shards(
            args.source, args.target, temporary=temporary, shards=None if args.shards is None else slice(*args.shards),
            max_workers=args.connections, chunk_size=args.chunk_bytes, on_progress=advance,
        )  # fmt: skip
    with contextlib.suppress(OSError):
        (Path(args.target) / ".mirror").rmdir()
    show(asdict(report), args.json)
    return 0


def _mirror(args: argparse.Namespace) -> int:
    if _is_of_shards(args):
        return _mirror_shards(args)
    from forebay.mirror.dataset import mirror, mirror_by_swarm
    from forebay.observe.progress import bar
    from forebay.storage.origins import open_remote
    from forebay.storage.targets import open_target

    source = args.source
    if args.publisher is not None:
        if not source.startswith("forebay://"):
            raise UsageError("mirror: --publisher is for forebay:// URLs; say which dataset with --id")
        source += f"?publisher={args.publisher}"
    dataset = open_remote(source, dataset_id=args.id, identity=args.network, from_urls=args.from_urls or "")
    start, stop = args.slices or (0, dataset.num_slices)
    stop = dataset.num_slices if stop is None else stop
    temporary = (args.tmp_dir or Path(tempfile.gettempdir())) / f"forebay-mirror-{dataset.id[:16]}"
    target = open_target(args.target, temporary)
    total = int(dataset.table.bytes[start:stop].sum())
    swarm: dict[str, Any] = {}
    try:
        with bar("mirror", total, enabled=not args.quiet) as advance:
            if args.share:
                report, figures = mirror_by_swarm(
                    dataset, target, share=args.share, start=start, stop=stop, connections=args.connections,
                    upload_bytes_per_s=args.upload_limit, linger_s=args.linger, on_progress=advance,
                )  # fmt: skip
                swarm = {"swarm": figures}
            else:
                report = mirror(
                    dataset, target, start=start, stop=stop, connections=args.connections, on_progress=advance
                )
    finally:
        target.close()
    show(asdict(report) | swarm, args.json)
    return 0


def _slices(text: str) -> tuple[int, int | None]:
    """`A:B`, from A until before B; either may be left out. `A` alone is refused, as it could mean either."""
    first, colon, last = text.partition(":")
    if not colon or not all(part == "" or part.isdigit() for part in (first, last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range: try 0:100")
    return int(first or 0), int(last) if last else None


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    about = "copy a dataset or shared shards to a directory or a bucket; run it again to resume"
    p = verb("mirror", _mirror, about)
    p.add_argument("source", metavar="SRC", help="URL of a dataset or of shared shards; r2:// uses R2_DATASET_*")
    p.add_argument("target", metavar="DST", help="a directory, s3://, r2://, gs:// or az://")
    p.add_argument("--slices", type=_slices, metavar="A:B", help="copy only these slices, from 0")
    p.add_argument("--shards", type=_slices, metavar="A:B", help="shared shards: copy only these, from 0")
    p.add_argument("--chunk-bytes", type=size, help="shared shards: bytes per request")
    p.add_argument("--id", help="expected dataset id; another one is refused")
    p.add_argument("--publisher", metavar="PEER_ID", help="forebay:// URLs: copy only what this peer signed")
    p.add_argument("--connections", type=positive, default=16, help="concurrent requests (default: 16)")
    p.add_argument("--tmp-dir", type=Path, metavar="DIR", help="temporary files of uploads; needs space for a shard")
    p.add_argument("--network", metavar="DIR", help="for forebay:// URLs: the node's directory")
    add_from_urls(p)
    p.add_argument(
        "--share", nargs="?", const=True, default=False, metavar="HOST:PORT",
        help="forebay:// URLs: share received slices, so that many mirrors load the origin once",
    )  # fmt: skip
    p.add_argument("--upload-limit", type=size, metavar="BYTES", help="with --share: upload limit in bytes per second")
    p.add_argument(
        "--linger",
        type=float,
        default=60.0,
        metavar="S",
        help="with --share: seconds to keep sharing while others lack slices",
    )
