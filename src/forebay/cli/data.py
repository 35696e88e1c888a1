"""Commands on datasets and text: inspect, verify, report, import, extract, convert, doctor, mirror, demo."""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.base import Json
from forebay.cli.arguments import (
    add_settings,
    file,
    folder,
    index_range,
    plain,
    positive,
    print_note,
    print_result,
    show,
    size,
    validate,
)
from forebay.cli.running import add_from_urls
from forebay.errors import MALFORMED, DatasetError, ForebayError, PrepareError, UsageError, unknown_name
from forebay.toml import parse_settings

if TYPE_CHECKING:
    from forebay.formats.conversion import ConvertOptions

_MAX_VALUES = 16  # of an array that is printed
_MAX_CHARACTERS = 2000  # of a document


def _inspect(args: Namespace) -> None:
    dataset = _open(args)
    fields = dataset.describe()
    fields["checked"] = fields.pop("checked", "") or "manifest and table of slices; `forebay verify` reads all"
    shown = dataset.head(args.documents) if args.documents else []
    if args.json:
        if shown:
            fields["head"] = [_plain_item(item) for item in shown]
        show(args, fields)
        return
    show(args, {key: value for key, value in fields.items() if value not in ("", None)})
    if args.documents and not shown:
        print(f"\nno documents: {args.dataset} has no rows, or its format does not say where documents end")
    for number, (is_row, item) in enumerate((isinstance(item, dict), _plain_item(item)) for item in shown):
        names = [] if is_row else [item.pop(key) for key in ("index", "id", "source")][1:]
        print(" ".join([f"\n--- {number}", *filter(None, names)]))
        text = "" if is_row else item.pop("text")
        print(text[:_MAX_CHARACTERS] if text else "\n".join(f"{key}: {value}" for key, value in item.items()))
        if len(text) > _MAX_CHARACTERS:
            print(f"… {len(text) - _MAX_CHARACTERS:,} more characters; --json prints all")


def _open(args: Namespace) -> Any:
    """Open a dataset, or the shared shards at a URL."""
    from forebay.load.shard_files import SharedShards
    from forebay.load.sources import open_dataset
    from forebay.storage.addresses import is_url

    try:
        return open_dataset(args.dataset, args.identity)
    except DatasetError as error:
        if is_url(args.dataset) and not args.dataset.startswith("forebay:"):
            with contextlib.suppress(ForebayError):
                return SharedShards.open(args.dataset)
        raise error


def _plain_item(item: Any) -> Json:
    """A document, without tokens if it has text; or a row, with large arrays shortened."""
    if isinstance(item, dict):
        return {
            name: array.tolist()
            if array.size <= _MAX_VALUES
            else f"{array.dtype} {list(array.shape)}: {', '.join(map(str, array.reshape(-1)[:8].tolist()))} …"
            for name, array in item.items()
        }
    names = ("index", "id", "source", "text")
    plain = {name: getattr(item, name) for name in names} | {"num_tokens": len(item.tokens)}
    return plain if item.text else {**plain, "tokens": item.tokens[:_MAX_VALUES].tolist()}


def _verify(args: Namespace) -> bool:
    from forebay.dataset.manifest import MANIFEST_FILE
    from forebay.dataset.reader import local_path, verify_dataset
    from forebay.observe.progress import bar
    from forebay.storage.addresses import is_url

    folder = None if is_url(args.dataset) else local_path(args.dataset)
    with bar("verify", None, enabled=not args.quiet) as advance:
        # A local dataset by its files, which reports a damaged manifest; another one by its reader.
        if folder is not None and ((folder / MANIFEST_FILE).is_file() or not folder.exists()):
            report = verify_dataset(folder, on_progress=advance)
        else:
            report = _open(args).verify(on_progress=advance)
    if args.json:
        show(args, report.to_json())
    elif report.level == "hash":
        print(f"ok: every file of {args.dataset} matches its hash")
    elif report.level == "structure":
        print(f"ok in structure: {args.dataset} has a format without hashes, so changed bytes may not be detected")
        print(f"checked: {'; '.join(report.checks)}")
    else:
        for name in report.bad:
            state = next(
                (state for state in ("missing", "cut", "changed") if name in getattr(report, state)), "not listed"
            )
            print(f"{state}: {name}")
        advice = (
            f"`forebay mirror GOOD_COPY {args.dataset}` fetches these again"
            f"{'; remove what is not listed' * any(name in report.extra for name in report.bad)}; do not train on this "
            "dataset before."
        )
        print(report.reason or advice, file=sys.stderr)
    return not report.ok


def _report(args: Namespace) -> None:
    try:
        return _show_report(args)
    except MALFORMED as error:
        raise DatasetError(
            f"{args.dataset}{f' or {args.second}' * bool(args.second)}: "
            f"expected a report of forebay prepare, got a damaged one ({type(error).__name__}: {error}). "
            "Prepare it again."
        ) from error


def _show_report(args: Namespace) -> None:
    from forebay.prepare.report import load_report, load_times, page_of, render_text

    path = args.dataset
    if args.second is None and (unfinished := _unfinished(path)) is not None:
        from forebay.observe.top import format_view
        from forebay.observe.views import preparation_view
        from forebay.prepare.progress import render_failures

        view, failures = format_view(preparation_view(unfinished["record"])), render_failures(unfinished["failed"])
        return print_result(args, unfinished, f"{view}{failures}")
    report = load_report(path)
    if args.second is not None:
        return _compare(args, report)
    if args.ids or args.html:
        raise UsageError("report: expected two datasets with --ids or --html, got one. Name the second.")
    print_result(args, report, render_text(report, load_times(path)), f"Full report: {page_of(path)}")


def _unfinished(path: str) -> Json | None:
    """The record of a run without a report, or with tasks that failed, and these tasks; None of a complete one."""
    from forebay.prepare.progress import read_failures, read_progress
    from forebay.prepare.report import REPORT_FILE
    from forebay.storage.addresses import is_bucket
    from forebay.storage.store import open_store

    if not is_bucket(path) and not Path(path).is_dir():
        return None
    store = open_store(path)
    failures = read_failures(store.child(".work"))
    if not failures and store.exists(REPORT_FILE):
        return None
    try:
        return {"record": read_progress(path), "failed": failures}
    except PrepareError:
        return None


def _compare(args: Namespace, report: Mapping[str, Any]) -> None:
    from forebay.files import atomic_write
    from forebay.prepare import compare
    from forebay.prepare.report import load_report, load_times

    comparison = compare.compare_reports(report, load_report(args.second))
    if args.ids:
        comparison["documents"] = compare.compare_ids(*args.ids)
    times = [load_times(path) for path in (args.dataset, args.second)]
    if times[0] and times[1]:
        comparison["times"] = compare.compare_times(times[0], times[1])
    if args.html is not None:
        atomic_write(args.html, compare.render_comparison(comparison).encode())
    page = f"\nFull report: {args.html.resolve().as_uri()}" if args.html is not None else ""
    print_result(args, comparison, f"{compare.render_comparison_text(comparison)}{page}".rstrip())


def _import(args: Namespace) -> None:
    from forebay.dataset.import_slices import import_slices

    show(args, import_slices(args.directory, name=args.name).describe())


def _extract(args: Namespace) -> bool:
    from forebay.formats.html import HtmlError
    from forebay.formats.inputs import ReadOptions
    from forebay.prepare.extract import extract_html
    from forebay.prepare.inputs import find_inputs, read_split, split_files

    options, num_failed = ReadOptions(), 0
    for split in split_files(find_inputs(args.files, options).files, options):
        for record in read_split(split, options):
            problem, text = record.problem, record.text
            try:
                text = extract_html(text) if record.html and not problem else text
            except HtmlError as error:
                problem = str(error)
            if problem == "blank":
                continue
            if problem:
                num_failed += 1
                print_note(f"{split.files[0].path}: {record.location or record.index}: {problem}")
            elif args.json:
                print(json.dumps({"url": record.url, "text": text}))
            else:
                print(f"{text}\n")
    return num_failed > 0


def _demo(args: Namespace) -> None:
    from forebay.demo import describe, run_demo

    summary = run_demo(args.input, args.keep, args.command, args.tokenizer)
    print_result(args, summary, describe(summary), *(["demo: ok"] if summary["ok"] else []))
    if not summary["ok"]:
        raise ForebayError("demo: the ledger does not prove the epoch. Run it again with --keep DIR and read the logs.")


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
        raise UsageError(
            "convert: expected one OUT, behind SRC or by --out, got "
            f"{f'{args.out} and --out {args.out_named}' if args.out else 'none'}."
        )
    args.source, args.out = path_or_url(args.source), path_or_url(args.out or args.out_named)
    if args.to is None:
        raise UsageError(f"convert: expected --to (one of {', '.join(written_formats())}), got none.")
    to = format_named(args.to)
    check_output(args.source, args.out, to, args.overwrite)
    skipped: list[Skipped] = []
    options = replace(options, on_skipped=skipped.extend)
    source = open_source(args.source, options, to)
    unit, count = ("tokens", source.num_tokens) if isinstance(source, TokenSource) else ("rows", source.num_rows)
    with bar("convert", count or None, unit.removesuffix("s"), enabled=not args.quiet) as advance:
        options = replace(options, on_progress=lambda done: advance(done / 2))  # They are written, then verified.
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
        print_note(line)


def _formats() -> list[str]:
    from forebay.convert import written_formats

    return [*written_formats()]


def _convert_options(args: Namespace) -> ConvertOptions:
    from forebay.formats.conversion import ConvertOptions

    settings, arguments = parse_settings(args.set), ("seq_len", "slice_bytes", "name")
    names = {field.name for field in fields(ConvertOptions)}.difference(
        arguments, ("dtype", "on_progress", "on_skipped", "sink")
    )
    if unknown := sorted(settings.keys() - names):
        raise unknown_name("convert: --set", sorted(names), unknown[0])
    if "resize" in settings:
        height, _, width = str(settings["resize"]).partition("x")
        settings["resize"] = (height, width or height)
    options = {name: getattr(args, name) for name in arguments}
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
        print(
            f"{report.path}: {report.kind}, {report.total_bytes:,} bytes "
            f"({depths.get(report.depth, f'read {report.read_bytes:,} bytes; --full reads all')})"
        )
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
        others = sum(report.metadata.get("not examined", 0) for report in reports)
        part = " in the part that was read" if any(report.depth == "part" for report in reports) else ""
        more = f"; {others:,} files were not examined" if others else ""
        print(f"ok: nothing wrong found{part}{more}")
    return not ok


def _mirror(args: Namespace) -> None:
    from forebay.dataset.reader import open_dataset
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
    if "://" not in args.source:
        open_dataset(args.source, verify="never")  # Its error says what a directory has that is not a dataset.
    dataset = open_remote(args.source, dataset_id=args.id, identity=args.identity, from_urls=args.from_urls or "")
    start, stop = args.slices or (0, dataset.num_slices)
    stop = dataset.num_slices if stop is None else stop
    total = int(dataset.table.bytes[start:stop].sum())
    swarm = {}
    with bar("mirror", total, enabled=not args.quiet) as advance:
        if args.share:
            report, figures = mirror_by_swarm(
                dataset, args.target, share=args.share, start=start, stop=stop, connections=args.connections,
                on_progress=advance,
            )  # fmt: skip
            swarm = {"swarm": figures}
        else:
            report = mirror(
                dataset, args.target, start=start, stop=stop, connections=args.connections, on_progress=advance
            )
    show(args, asdict(report) | swarm)


def add_verbs(verb: Any, group: Any) -> None:
    for name, run, about in (
        ("inspect", _inspect, "show the contents of a dataset"),
        ("verify", _verify, "verify a dataset's hashes, or its structure where the format has none"),
    ):
        p = verb(name, run, about)
        p.add("dataset", "directory or URL, of Forebay's format or one of docs/reference/formats.md")
        if name == "inspect":
            p.add("--documents", "print the first N, or rows (default: none)", positive)
    p = verb("report", _report, "show what preparation kept and dropped, and why; or compare two")
    p.add("dataset", "a dataset, its report.json or report.html, or a run: its failed tasks")
    p.add("second", "another one, to compare with the first (default: none)", "DATASET", nargs="?")
    p.add("--ids", "with two: what --write-ids wrote for each (default: none)", file, nargs=2)
    p.add("--html", "with two: write the comparison with histograms (default: no)", file)
    p = verb("import", _import, "make a dataset of a directory of SafeTensors files: add a manifest")
    p.add("directory", "directory with slices/*.safetensors, or *.safetensors", Path)
    p.add("--name", "name of the dataset (default: the directory's)")
    p = verb("extract", _extract, "print the main text of HTML pages and WARC records")
    p.add("files", "files, directories or URLs of text, HTML or WARC", "FILE", nargs="+")
    p = verb("demo", _demo, "run everything on this machine, in about a minute")
    p.takes_command, p.usage = True, "forebay demo [OPTIONS] [-- COMMAND ARG ...]"
    p.epilog = 'COMMAND: the workers\' program, as of `forebay worker`; it may print {"loss": X} lines'
    p.add("--input", "text to train on (default: Python's library)", Path, nargs="+", metavar="PATH")
    p.add("--keep", "keep all files in this new directory (default: no)", folder)
    p.add("--tokenizer", "tokenizer, as for `forebay prepare`", "T", "train:4096")

    p = verb("convert", _convert, "convert training data to another format, and verify the result")
    p.add("source", "file, directory, pattern in quotes, or URL: hf://, s3://, gs://, az://, https://", "SRC")
    p.add("out", "file or directory to write, or s3://, r2://, gs:// or az:// and a prefix", "OUT", nargs="?")
    p.add("--out", "the same, for those who name it (default: behind SRC)", "OUT", dest="out_named")
    p.add("--to", "forebay, jsonl, parquet, arrow, webdataset, mds, megatron … (required)", "FORMAT", values=_formats)
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
    p.add("--connections", "concurrent requests", positive, 16)
    add_from_urls(p)
    p.add(
        "--share",
        "forebay:// URLs: share received slices, so that many mirrors load the origin once (default: no)",
        "HOST:PORT",
        False,
        nargs="?",
        const=True,
    )
