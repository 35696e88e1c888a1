"""Commands that make datasets of raw text: prepare, recipe, report, acquire."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import positive, size
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.prepare.read import api
    from forebay.prepare.recipe import Recipe


def _recipe(args: argparse.Namespace) -> Recipe:
    """The recipe that the command line describes: shipped recipe, then file, then single settings, then flags."""
    from forebay.plugins import plugins
    from forebay.prepare.config import load_recipe, merge, parse_setting, stage_group
    from forebay.prepare.dedup.methods import KINDS

    settings: dict[str, Any] = {}
    for text in args.set or ():
        settings = merge(settings, parse_setting(text))
    flags = {
        "name": args.name,
        "max_error_rate": args.max_bad,
        "sample": args.sample,
        "read.format": args.format,
        "read.text_key": args.text_key,
        "tokenize.tokenizer": args.tokenizer,
        "slice.bytes": args.slice_bytes,
        "slice.tokens": args.slice_tokens,
        "slice.rows": args.slice_rows,
        "slice.seed": args.seed,
        "slice.shuffle": True if args.shuffle else None,
    }
    for key, value in flags.items():
        if value is not None:
            settings = merge(settings, parse_setting(f"{key}={json.dumps(value)}"))
    for name in _names(args.filter):
        for stage in stage_group(name):
            settings = merge(settings, {stage: {}})
    for name in _names(args.dedup):
        if name not in KINDS and name not in plugins("forebay.dedup"):
            raise UsageError(f"--dedup {name!r}: expected some of {', '.join(KINDS)}.")
        settings = merge(settings, {"dedup": {name: True}})
    return load_recipe(args.recipe, args.config, settings, allow_code=args.allow_code)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _prepare(args: argparse.Namespace) -> int:
    from forebay.observe.progress import PrepareBar
    from forebay.prepare.driver import prepare_dataset
    from forebay.prepare.plan import plan

    recipe = _recipe(args)
    if args.plan:
        planned = plan(args.inputs, recipe, workers=args.workers, follow_links=args.follow_links)
        print(json.dumps(planned.to_json()) if args.json else planned.to_text())
        return 0
    if args.out is None:
        raise UsageError("prepare: --out DIR is missing: where the dataset goes.")
    if not args.inputs:
        print(f"inputs of the recipe: {', '.join(map(json.dumps, recipe.inputs))}", file=sys.stderr)
    if args.ray_address:
        os.environ["RAY_ADDRESS"] = args.ray_address
    names = ("workers", "engine", "document_ids", "to", "follow_links", "strict")
    options = {name: getattr(args, name) for name in names}
    with PrepareBar(enabled=not args.quiet) as bar:
        notify = partial(print, "forebay:", file=sys.stderr)
        done = prepare_dataset(
            args.inputs, args.out, recipe=recipe, write_ids=args.keep_ids, on_progress=bar.update, on_message=notify,
            **options,
        )  # fmt: skip
    result = done.to_json()
    if args.json:
        print(json.dumps(result))
        return 0
    reasons = sorted(result["dropped"].items(), key=lambda pair: -pair[1])
    dropped = ", ".join(f"{n:,} {reason}" for reason, n in reasons[:6]) or "none"
    dropped += f" and {len(reasons) - 6} other reasons" if len(reasons) > 6 else ""
    what = f"{result['tokens']:,} tokens in {result['slices']:,} slices" if args.to == "dataset" else f"as {args.to}"
    print(
        f"{result['documents_out']:,} of {result['documents_in']:,} documents, {what} (dropped: {dropped})\n"
        f"{args.out}  id {result['id']}"
    )
    for name, counts in result.get("subsets", {}).items():
        path = args.out if name == "train" else args.out / name
        print(f"{name}: {path}  id {counts['id']}: {counts['documents']:,} documents, {counts['tokens']:,} tokens")
    return 0


def _show_recipe(args: argparse.Namespace) -> int:
    from forebay.prepare.config import describe, recipe_names, recipe_text
    from forebay.prepare.recipe import STAGES

    if args.name is None:
        print(f"recipes: {', '.join(recipe_names())}\nstages:  {', '.join(STAGES)}")
        print("tables:  read, dedup, tokenize, slice, subsets, rows, lm\n\n`forebay recipe NAME` shows any of these.")
    else:
        is_recipe = args.name in recipe_names()
        if is_recipe:
            print(recipe_text(args.name))
        if not is_recipe or args.name in STAGES:
            # Behind a recipe as comments: what is printed stays a recipe.
            print(textwrap.indent(describe(args.name), "# ", lambda line: True) if is_recipe else describe(args.name))
    return 0


def _report(args: argparse.Namespace) -> int:
    from forebay.prepare.report import load_report, render_text

    path = Path(args.dataset)
    page = path / "report.html" if path.is_dir() else path
    report = load_report(page)
    print(json.dumps(report) if args.json else render_text(report))
    if not args.json:
        print(f"\nThe whole of it: {page.resolve().as_uri()}")
    return 0


def _acquire(args: argparse.Namespace) -> int:
    from forebay.prepare.read.api import acquire

    def show_pages(progress: api.ApiProgress) -> None:
        print(f"\r{progress.pages:,} pages, {progress.items:,} items", end="", file=sys.stderr)

    is_shown = sys.stderr.isatty() and not args.quiet
    folder = acquire(args.spec, args.out, *([show_pages] if is_shown else []))
    if is_shown:
        print(file=sys.stderr)
    print(folder)
    return 0


_API_FILE = """\
the API file:
  preset           reddit or x: sets what the file does not (both need a header of your own)
  url              where to ask; required without preset = "x"
  items            where the items are in a page: data.children[].data; [] is each of a list (default: [])
  text             the fields whose texts make the text: ["title", "selftext"] (default: text)
  id               the field with the id, by which repeats are noticed (default: id)
  link             the address of an item: "https://example.org/{id}"
  next             where the cursor of the next page is in a page; the last page has none
  next_parameter   the parameter that takes the cursor (default: cursor)
  requests_per_s   at most (default: 1)
  max_pages        0: all (default)
  max_wait_s       a server that wants a longer pause ends the run (default: 900)
  [parameters], [headers]   of each request; ${NAME} is a variable of the environment

example:
  preset = "reddit"
  url = "https://oauth.reddit.com/r/programming/comments"
  max_pages = 100
  [headers]
  Authorization = "Bearer ${REDDIT_TOKEN}"
"""


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    p = verb("prepare", _prepare, "raw text to a dataset")
    p.add_argument("inputs", nargs="*", metavar="INPUT", help="files, directories, URLs (default: those of the recipe)")
    p.add_argument("--out", type=Path, metavar="DIR", help="the dataset to make; must be free, or an interrupted run's")
    p.add_argument("--recipe", metavar="NAME", help="fineweb, gopher, c4, wikipedia, code or sft")
    p.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with settings of your own")
    p.add_argument("--allow-code", action="store_true", help="let the recipe run code: what its `use` names")
    p.add_argument("--set", action="append", metavar="KEY=VALUE", help="one setting: gopher_quality.min_words=20")
    p.add_argument("--tokenizer", metavar="T", help="a tokenizer.json, a hub name, `bytes`, `train:VOCAB`")
    p.add_argument("--filter", metavar="NAMES", help="stages to switch on: gopher,c4,fineweb,language,…")
    p.add_argument("--dedup", metavar="KINDS", help="exact,lines,minhash")
    p.add_argument("--format", metavar="NAME", help="read every input as this format, unsniffed")
    p.add_argument("--name", help="the dataset's name (default: the directory's)")
    p.add_argument("--slice-bytes", type=size, metavar="N", help="bytes a slice, such as 64MiB (default: the recipe's)")
    p.add_argument("--slice-tokens", type=positive, metavar="N", help="tokens a slice, instead of bytes")
    p.add_argument("--slice-rows", type=positive, metavar="N", help="rows a slice, with [rows]")
    p.add_argument("--shuffle", action="store_true", help="permute the documents over the whole dataset")
    p.add_argument("--seed", type=int, metavar="N", help="of the shuffle and of --sample (default: the recipe's)")
    p.add_argument("--sample", metavar="1%", help="only this share of the input: to try a recipe")
    p.add_argument("--plan", action="store_true", help="say what would run, on how much, and stop")
    p.add_argument("--workers", type=positive, default=None, metavar="N", help="processes (default: one a core)")
    p.add_argument("--engine", default="local", metavar="NAME", help="local, ray, or a plug-in that runs the tasks")
    p.add_argument("--ray-address", metavar="ADDRESS", help="a Ray cluster (default: RAY_ADDRESS)")
    p.add_argument(
        "--to",
        choices=["dataset", "text", "lm"],
        default="dataset",
        help="text: Parquet of what is kept; lm: a model for [perplexity]",
    )
    p.add_argument("--keep-ids", type=Path, metavar="FILE", help="write each kept document's source id here")
    p.add_argument("--document-ids", action="store_true", help="keep each document's source id beside the slices")
    p.add_argument("--text-key", help="the field or column that holds the text")
    p.add_argument("--max-bad", type=float, metavar="FRACTION", help="more malformed records than this: stop")
    p.add_argument("--follow-links", action="store_true", help="read what links in input folders lead to elsewhere")
    p.add_argument("--strict", action="store_true", help="stop if an input is left out or cannot be read")

    p = verb("recipe", _show_recipe, "a recipe to copy, or what a table of one means")
    p.add_argument("name", nargs="?", metavar="NAME", help="a recipe or a table; without it: a list of both")

    p = verb("report", _report, "what preparation kept and dropped, and why")
    p.add_argument("dataset", help="a dataset, or its report.html")

    p = verb("acquire", _acquire, "fetch a paged JSON API to JSONL, resumably")
    p.epilog = _API_FILE
    p.add_argument("spec", type=Path, help="a TOML file that describes the API, see below")
    p.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the JSONL goes; again to resume")
