"""Commands on data: inspect, verify, import, demo."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import positive, show, size

if TYPE_CHECKING:
    from forebay.dataset.reader import VerifyReport

_SHOWN = 16  # Numbers of an array that are printed.


def _inspect(args: argparse.Namespace) -> int:
    from forebay.load.sources import open_dataset

    dataset = open_dataset(args.dataset, args.network)
    fields = {"checked": "", **dataset.describe()}
    fields["checked"] = fields.pop("checked") or "manifest and table of slices; `forebay verify` reads all"
    shown = dataset.head(args.documents) if args.documents else []
    if args.json:
        if shown:
            fields["head"] = [_plain_item(item) for item in shown]
        show(fields, True)
        return 0
    show({key: value for key, value in fields.items() if value not in ("", None)}, False)
    for number, item in enumerate(map(_plain_item, shown)):
        named = " ".join(str(item.pop(key)) for key in ("id", "source") if item.get(key))
        print(f"\n--- {item.pop('index', number)} {named}".rstrip())
        print(text if (text := item.pop("text", "")) else "\n".join(f"{key}: {value}" for key, value in item.items()))
    return 0


def _plain_item(item: Any) -> dict[str, Any]:
    """A document, without tokens if it has text; or a row, with large arrays shortened."""
    if isinstance(item, dict):
        return {name: array.tolist() if array.size <= _SHOWN else _shortened(array) for name, array in item.items()}
    plain = {
        "index": item.index,
        "id": item.id,
        "source": item.source,
        "num_tokens": len(item.tokens),
        "text": item.text,
    }
    return plain if item.text else {**plain, "tokens": item.tokens[:_SHOWN].tolist()}


def _shortened(array: Any) -> str:
    return f"{array.dtype} {list(array.shape)}: {', '.join(map(str, array.reshape(-1)[:8].tolist()))} …"


def _verify(args: argparse.Namespace) -> int:
    from forebay.observe.progress import bar

    with bar("verify", None, enabled=not args.quiet) as advance:
        report = _verify_in_place(args, advance)
    if args.json:
        result = report.to_json()
        print(json.dumps({key: result[key] for key in ("ok", "bad", "level", "checks")}))
    elif report.level == "hash":
        print(f"ok: every file of {args.dataset} matches its hash")
    elif report.level == "structure":
        print(f"ok in structure: {args.dataset} has a format without hashes, so changed bytes may not be detected")
        print(f"checked: {'; '.join(report.checks)}")
    else:
        for name in report.bad:
            print(f"bad: {name}")
        print("Fetch or prepare these again; do not train on this dataset before.", file=sys.stderr)
    return 0 if report.ok else 1


def _verify_in_place(args: argparse.Namespace, advance: Callable[[int], None]) -> VerifyReport:
    """Verify a local dataset by its files, which reports a damaged manifest; another one by its reader."""
    from forebay.dataset.manifest import MANIFEST_FILE
    from forebay.dataset.reader import local_path, verify_dataset
    from forebay.load.sources import open_dataset

    is_local = "://" not in args.dataset or args.dataset.startswith("file://")
    if is_local:
        folder = local_path(args.dataset)
        if (folder / MANIFEST_FILE).is_file() or not folder.exists():
            return verify_dataset(folder, on_progress=advance)
    return open_dataset(args.dataset, args.network).verify(on_progress=advance)


def _import(args: argparse.Namespace) -> int:
    from forebay.dataset.import_slices import import_slices

    show(import_slices(args.directory, name=args.name).describe(), args.json)
    return 0


def _demo(args: argparse.Namespace) -> int:
    from forebay.demo import run_demo

    return run_demo(args.input, args.json, args.keep, args.trainer, args.max_bytes, args.tokenizer)


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    p = verb("demo", _demo, "run everything on this machine, in about a minute")
    p.add_argument("--input", nargs="+", type=Path, metavar="PATH", help="text to train on (default: Python's library)")
    p.add_argument("--json", type=Path, metavar="FILE", help="also write the summary here")
    p.add_argument("--keep", type=Path, metavar="DIR", help="keep all files in this new directory")
    p.add_argument(
        "--trainer", default="count", metavar="T", help="the trainer, as for `forebay work` (default: count)"
    )
    p.add_argument("--max-bytes", type=size, default=None, help="use at most this many bytes of the default text")
    p.add_argument("--tokenizer", default="train:4096", metavar="T", help="as for `forebay prepare`")

    for name, run, about in (
        ("inspect", _inspect, "show the contents of a dataset"),
        ("verify", _verify, "verify a dataset's hashes, or its structure where the format has none"),
    ):
        p = verb(name, run, about)
        p.add_argument("dataset", help="a directory or URL, of Forebay's format or one of docs/formats.md")
        if name == "inspect":
            p.add_argument("--documents", type=positive, metavar="N", help="also print the first N documents or rows")
        p.add_argument("--network", metavar="DIR", help="for forebay:// URLs: the node's directory")
    p = verb("import", _import, "make a dataset of a directory of SafeTensors files: add a manifest")
    p.add_argument("directory", type=Path, help="with slices/*.safetensors")
    p.add_argument("--name", help="the dataset's (default: the directory's)")
