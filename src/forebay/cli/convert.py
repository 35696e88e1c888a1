"""`forebay convert`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import positive, show, size
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.formats.conversion import ConvertOptions

_DTYPES = {"uint16": "U16", "uint32": "U32"}


def _convert(args: argparse.Namespace) -> int:
    from forebay.convert.convert import check_output, convert, format_named, open_source, written_formats
    from forebay.formats.conversion import TokenSource
    from forebay.observe.progress import bar
    from forebay.storage.listing import Skipped, count_reasons, describe_skipped

    options = _options(args)
    if args.to is None:
        raise UsageError(f"convert: expected --to (one of {', '.join(written_formats())}), got none.")
    check_output(args.source, args.out, args.force)
    to = format_named(args.to)
    skipped: list[Skipped] = []
    options = replace(options, on_skipped=skipped.extend)
    source = open_source(args.source, options, to)
    for line in describe_skipped(skipped):
        print(f"forebay: {line}", file=sys.stderr)
    unit, count = ("tokens", source.num_tokens) if isinstance(source, TokenSource) else ("rows", source.num_rows)
    total = 2 * (count or 0) or None  # Written, then read again.
    with bar("convert", total, unit, enabled=not args.quiet) as advance:
        options = replace(options, on_progress=advance)
        report = convert(source, args.out, to, options, force=args.force)
    result = report.to_json() | ({"skipped": count_reasons(skipped)} if args.json else {})
    notes = result["notes"] if args.json else result.pop("notes")
    show(result, args.json)
    for text in notes:
        print(f"note: {text}", file=sys.stderr)
    return 0


def _options(args: argparse.Namespace) -> ConvertOptions:
    from forebay.formats.conversion import ConvertOptions

    given = {name: value for name, value in vars(args).items() if name in ConvertOptions.__dataclass_fields__}
    given |= {"dtype": _DTYPES.get(args.dtype), "compress": args.compress or "", "tensors": dict(args.tensor)}
    return ConvertOptions(**given)


def _tensor(text: str) -> tuple[str, str]:
    name, _, dtype = text.partition("=")
    if not name or not dtype:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=TYPE, such as images=f16")
    return name, dtype


def _height_width(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 224 or 224x320 (height x width)")
    return int(parts[0]), int(parts[-1])


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    p = verb("convert", _convert, "from one format of training data to another, verified")
    p.add_argument("source", metavar="SRC", help="a file, a directory, or a pattern in quotes")
    p.add_argument("out", metavar="OUT", type=Path, help="where to write; must be free")
    p.add_argument("--to", metavar="FORMAT", help="safetensors, npy, bin, ds, megatron, mds, litdata, arrow, parquet …")
    p.add_argument("--dtype", choices=sorted(_DTYPES), help="of the tokens written (default: as they are)")
    p.add_argument("--input-dtype", metavar="T", help="of tokens that no header tells")
    p.add_argument("--column", metavar="NAME", help="the column of tokens (default: input_ids or tokens)")
    p.add_argument("--seq-len", type=positive, metavar="N", help="tokens of a sample, where the format has samples")
    p.add_argument("--slice-bytes", type=size, default=64 << 20, metavar="SIZE", help="largest file (default: 64MiB)")
    p.add_argument("--eos-id", type=int, metavar="N", help="the token that ends a document, where SRC tells no ends")
    p.add_argument("--name", metavar="NAME", help="of the dataset, or of its files")
    p.add_argument(
        "--compress",
        choices=["zstd", "snappy", "gzip", "none"],
        help="zstd: most formats; snappy: Parquet; gzip: lines",
    )
    p.add_argument("--tensor", action="append", type=_tensor, default=[], metavar="NAME=TYPE", help="type of a column")
    p.add_argument("--resize", type=_height_width, metavar="HxW", help="images: scale to one size")
    p.add_argument("--force", action="store_true", help="replace OUT once the new is whole")
