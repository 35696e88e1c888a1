"""Commands that copy and check files of other formats: convert, doctor, mirror."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import add_identity, add_settings, index_range, plain, positive, show, size, validate
from forebay.cli.running import add_from_urls
from forebay.errors import UsageError
from forebay.toml import parse_settings

if TYPE_CHECKING:
    from forebay.formats.conversion import ConvertOptions


_OF_TEXT = "by first bytes alone: `forebay prepare` reads text, and reports what is wrong with it"


def _convert(args: Namespace) -> None:
    from forebay.convert import check_output, convert, format_named, written_formats
    from forebay.formats.conversion import TokenSource
    from forebay.formats.sources import open_source
    from forebay.observe.progress import bar
    from forebay.storage.addresses import path_or_url
    from forebay.storage.listing import Skipped, count_reasons, describe_skipped

    options = _convert_options(args)
    if (args.out is None) == (args.out_named is None):
        raise UsageError("convert: expected one OUT, behind SRC or by --out, got none or both.")
    args.source, args.out = path_or_url(args.source), path_or_url(args.out or args.out_named)
    if args.to is None:
        raise UsageError(f"convert: expected --to (one of {', '.join(written_formats())}), got none.")
    to = format_named(args.to)
    check_output(args.source, args.out, to, args.overwrite)
    skipped: list[Skipped] = []
    options = replace(options, on_skipped=skipped.extend)
    source = open_source(args.source, options, to)
    unit, count = ("tokens", source.num_tokens) if isinstance(source, TokenSource) else ("rows", source.num_rows)
    with bar("convert", 2 * (count or 0) or None, unit, enabled=not args.quiet) as advance:  # written, then verified
        options = replace(options, on_progress=advance)
        report = convert(source, args.out, to, options, force=args.overwrite)
    if args.json:
        show(args, report.to_json() | {"skipped": count_reasons(skipped)})
    else:
        omitted = ("notes", "documents", "digest") if unit == "rows" else ("notes",)
        show(args, {key: x for key, x in report.to_json().items() if x not in (None, "") and key not in omitted})
    for text in report.written.notes:
        print(f"note: {text}", file=sys.stderr)
    if unit == "tokens" and to != "forebay" and (name := source.metadata.get("tokenizer")):
        print(f"note: left out the tokenizer ({name})", file=sys.stderr)
    for line in describe_skipped(skipped):
        print(f"forebay: {line}", file=sys.stderr)


def _convert_options(args: Namespace) -> ConvertOptions:
    from forebay.formats.conversion import ConvertOptions

    settings = parse_settings(args.set)
    names = {field.name for field in fields(ConvertOptions)} - {"dtype", "on_progress", "on_skipped", "sink"}
    if unknown := sorted(settings.keys() - names):
        raise UsageError(f"convert: --set: expected one of {', '.join(sorted(names))}, got {unknown[0]!r}.")
    if "resize" in settings:
        height, _, width = str(settings["resize"]).partition("x")
        settings["resize"] = (height, width or height)
    options = {name: getattr(args, name) for name in ("seq_len", "slice_bytes", "name")}
    dtype = {"uint16": "U16", "uint32": "U32"}.get(args.dtype or "")
    return validate(ConvertOptions, {**options, "dtype": dtype, **settings}, "convert")


def _doctor(args: Namespace) -> bool:
    from forebay.doctor import CheckOptions, examine
    from forebay.formats.external import token_dtype
    from forebay.storage.addresses import is_url

    if url := next(filter(is_url, args.paths), None):
        raise UsageError(f"doctor: expected a file of this machine, got {url}. Download it and name its path.")
    dtype = token_dtype(args.dtype) if args.dtype is not None else None
    reports = examine([*map(Path, args.paths)], CheckOptions(dtype, args.vocab_size or 0, args.full))
    ok = all(report.ok for report in reports)
    if args.json:
        print(json.dumps({"ok": ok, "reports": [report.to_json() for report in reports]}))
        return not ok
    for report in reports:
        depths = {"all": "read all of it", "none": "not checked", "kinds": _OF_TEXT}
        depth = depths.get(report.depth, f"read {report.read_bytes:,} bytes; --full reads all")
        print(f"{report.path}: {report.kind}, {report.total_bytes:,} bytes ({depth})")
        for name, value in report.metadata.items():
            print(f"    {name.replace('_', ' ')}: {plain(value)}")
        for finding in report.findings:
            print(f"  WRONG {finding.fault} at {finding.location} of {finding.path}")
            print(f"      {finding.evidence}\n      {finding.advice}")
    wrong = sum(bool(report.findings) for report in reports)
    unchecked = sum(report.depth == "none" for report in reports)
    if wrong:
        print(f"NOT ok: {wrong} of {len(reports)} have something wrong")
    elif unchecked:
        print(f"NOT checked: {unchecked} of {len(reports)} are of a format that doctor does not examine")
    else:
        is_part = any(report.depth == "part" for report in reports)
        others = sum(report.metadata.get("not examined", 0) for report in reports)
        more = f"; {others:,} files were not examined" if others else ""
        print(f"ok: nothing wrong found{' in the part that was read' if is_part else ''}{more}")
    return not ok


def _mirror(args: Namespace) -> None:
    from forebay.mirror import holds_shards, mirror, mirror_by_swarm, mirror_shards
    from forebay.observe.progress import bar
    from forebay.storage.origins import open_remote

    if args.id is None and not args.source.startswith("forebay://") and holds_shards(args.source):
        shards = None if args.slices is None else slice(*args.slices)
        with bar("mirror", None, enabled=not args.quiet) as advance:
            shown = mirror_shards(
                args.source, args.target, shards=shards, max_workers=args.connections, on_progress=advance
            )
        return show(args, shown)
    source = args.source
    if args.publisher is not None:
        if not source.startswith("forebay://"):
            raise UsageError("mirror: --publisher is for forebay:// URLs; say which dataset with --id")
        source += f"?publisher={args.publisher}"
    dataset = open_remote(source, dataset_id=args.id, identity=args.identity, from_urls=args.from_urls or "")
    start, stop = args.slices or (0, dataset.num_slices)
    stop = dataset.num_slices if stop is None else stop
    total = int(dataset.table.bytes[start:stop].sum())
    swarm = {}
    with bar("mirror", total, enabled=not args.quiet) as advance:
        if args.share:
            report, figures = mirror_by_swarm(
                dataset, args.target, share=args.share, start=start, stop=stop, connections=args.connections,
                upload_bytes_per_s=args.upload_limit, on_progress=advance,
            )  # fmt: skip
            swarm = {"swarm": figures}
        else:
            report = mirror(
                dataset, args.target, start=start, stop=stop, connections=args.connections, on_progress=advance
            )
    show(args, asdict(report) | swarm)


def add_verbs(verb: Any, group: Any) -> None:
    p = verb("convert", _convert, "convert training data to another format, and verify the result")
    p.add("source", "file, directory, pattern in quotes, or URL: hf://, s3://, gs://, az://, https://", "SRC")
    p.add("out", "file or directory to write, or s3://, r2://, gs:// or az:// and a prefix", "OUT", nargs="?")
    p.add("--out", "the same, for those who name it (default: behind SRC)", "OUT", dest="out_named")
    p.add("--to", "forebay, jsonl, parquet, arrow, webdataset, mds, megatron … (required)", "FORMAT")
    p.add("--dtype", "of the tokens written (default: the source's)", ["uint16", "uint32"])
    p.add("--seq-len", "tokens of a sample (default: the source's)", positive)
    p.add("--slice-bytes", "largest file (default: 64MiB)", size, 64 << 20)
    p.add("--name", "name of the dataset or of its files (default: of OUT)", "NAME")
    p.add_flag("--overwrite", "overwrite OUT after a successful conversion")
    add_settings(p, "column=ids, eos_id=0 or tensors.images=f16")

    p = verb("doctor", _doctor, "report the format of training-data files, what is wrong with them, and what to do")
    p.add("paths", "files, directories, or a pattern in quotes", "PATH", nargs="+")
    p.add("--dtype", "of tokens without a header: uint16, uint32, int64 (default: guessed)", "TYPE")
    p.add("--vocab-size", "report ids from this on (default: not checked)", positive)
    p.add_flag("--full", "read every byte (default: 256 MiB of each, 1 GiB of all)")

    p = verb("mirror", _mirror, "copy a dataset or shared shards to a directory or a bucket; run it again to resume")
    p.add("source", "URL of a dataset or of shared shards; r2:// uses R2_DATASET_*", "SRC")
    p.add("target", "a directory, s3://, r2://, gs:// or az://; TMPDIR has temporary files", "DST")
    p.add("--slices", "copy only these slices or shards (default: all)", index_range, metavar="A:B")
    p.add("--id", "expected dataset id; another one is refused (default: any)")
    p.add("--publisher", "forebay:// URLs: copy only what it signed (default: any)", "PEER_ID")
    p.add("--connections", "concurrent requests", positive, 16)
    add_identity(p)
    add_from_urls(p)
    p.add(
        "--share",
        "forebay:// URLs: share received slices, so that many mirrors load the origin once (default: no)",
        "HOST:PORT",
        False,
        nargs="?",
        const=True,
    )
    p.add("--upload-limit", "with --share: bytes per second (default: none)", size)
