"""`forebay prepare`."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import textwrap
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.arguments import add_settings, file, percentage, positive, print_note, show, size
from forebay.errors import PrintableUrl, UsageError, listed
from forebay.toml import parse_settings
from forebay.units import format_bytes, numbered

if TYPE_CHECKING:
    from forebay.prepare.recipe import Recipe

_OUTPUTS = (
    "dataset", "parquet", "jsonl", "arrow", "webdataset", "mds", "litdata", "megatron", "lm", "report",
)  # fmt: skip


def _prepare(args: Namespace) -> None:
    if args.explain is not None:
        return _explain(args.explain)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _set_up_processes()
    from forebay.dataset.reader import open_dataset
    from forebay.observe.progress import PrepareBar
    from forebay.prepare.driver import prepare_dataset
    from forebay.prepare.report import load_report, load_times, page_of, render_text
    from forebay.prepare.run import plan

    recipe = _recipe(args)
    if args.dry_run:
        planned = plan(args.inputs, recipe, workers=args.workers, follow_links=args.follow_links)
        files = planned["inputs"].items()
        shown = planned | {
            "inputs": [f"{numbered(n['files'], 'file')} of {name} ({format_bytes(n['bytes'])})" for name, n in files],
            "bytes": format_bytes(planned["bytes"]),
            "recipe": f"stages: {listed(stage.name for stage in recipe.stages) or 'none'}; deduplication: "
            f"{listed(kind for kind, on in planned['recipe']['dedup'].items() if on is True) or 'none'}; tokenizer: "
            f"{recipe.tokenize.tokenizer or 'none'}",
        }
        return show(args, planned if args.json else shown)
    if args.out is None and recipe.sample < 1 and args.to in (None, "report") and not args.annotate:
        args.out, args.to = "sample-report", "report"
    if args.out is None:
        raise UsageError(
            "prepare: expected --out DIR, got none. Give the dataset's directory, or --sample 1% for a report alone."
        )
    args.to = args.to or "dataset"
    inputs = [_fetched(path, args) if path.endswith(".api.toml") else path for path in args.inputs]
    if not inputs and recipe.inputs:
        print(
            f"inputs of the recipe: {', '.join(json.dumps(PrintableUrl(name)) for name in recipe.inputs)}",
            file=sys.stderr,
        )
    names = ("workers", "engine", "task", "document_ids", "to", "annotate", "follow_links", "strict", "write_ids")
    options = {name: getattr(args, name) for name in (*names, "extend")}
    with PrepareBar(enabled=not args.quiet) as bar:
        output = prepare_dataset(
            inputs, args.out, recipe=recipe, on_progress=bar.update, on_message=bar.above(print_note), **options
        )
    result = output.to_json()
    if not output.id and args.task:
        print(f"all tasks of {args.out} are finished; --task finish writes the output")
        return
    if args.json:
        print(json.dumps(result))
        return
    if args.to == "report":
        print(f"{render_text(load_report(args.out), load_times(args.out))}\nFull report: {page_of(args.out)}")
        return
    reasons = sorted(result["dropped"].items(), key=lambda pair: -pair[1])
    dropped = listed(f"{n:,} {reason}" for reason, n in reasons) or "none"
    to = "parquet" if args.annotate and args.to == "dataset" else args.to
    what = f"{result['tokens']:,} tokens in {numbered(result['slices'], 'slice')}" if to == "dataset" else f"as {to}"
    if to == "dataset" and (rows := recipe.rows) is not None:
        what += f" of rows of {rows.max_tokens:,}"
        if not rows.packed:
            padding = 1 - result["tokens"] / (result["documents_out"] * rows.max_tokens)
            what += f", {padding:.0%} padding (see rows.max_tokens, rows.packed)"
        if cut := sum(stage["changed"].get("truncated", 0) for stage in load_report(args.out)["funnel"]):
            what += f", {numbered(cut, 'conversation')} cut to that length (see rows.too_long)"
    if args.extend:
        parent = open_dataset(args.extend).manifest
        what += f" behind the {numbered(parent.slices, 'slice')} ({format_bytes(parent.bytes)}) of {args.extend}"
    sampled = f"a sample of {100 * recipe.sample:.3g} % of the input: " if recipe.sample < 1 else ""
    new = " new" if args.extend else ""
    print(
        f"{sampled}{result['documents_out']:,} of {result['documents_in']:,}{new} documents, {what} (dropped: "
        f"{dropped})\n{args.out}  id {result['id']}"
    )
    failed = result["failed"]
    if failed["inputs"]:
        lost = f"{failed['share']:.1%}" if failed["share"] else "an unknown share"
        print(f"{numbered(failed['inputs'], 'input')} failed, {lost} of the bytes is missing: {args.out}/skipped.jsonl")


def _warm(args: Namespace) -> None:
    _set_up_processes()
    from forebay.machine import num_cores
    from forebay.observe.progress import PrepareBar
    from forebay.prepare.compiled import kernel_directory
    from forebay.prepare.config import load_recipe, recipe_names, stage_group
    from forebay.prepare.dedup.methods import KINDS
    from forebay.prepare.driver import prepare_dataset
    from forebay.prepare.forecast import StageProgress
    from forebay.prepare.kernels import KERNEL_STAGES, compile_groups, missing_groups

    names = args.names or KERNEL_STAGES
    recipes = [load_recipe(None, Path(name)) for name in names if name.endswith(".toml")]
    recipes += [load_recipe(name) for name in args.names if name in recipe_names()]
    rest = {name for name in names if not name.endswith(".toml")} - ({*recipe_names()} if args.names else set())
    filters: dict[str, Any] = {stage: {} for name in sorted(rest) for stage in stage_group(name)}
    dedup = {} if args.names else {"dedup": dict.fromkeys(KINDS, True)}
    recipes.append(load_recipe(settings={**filters, **dedup}))
    if "pii" in rest:
        recipes.append(load_recipe(settings={"pii": {"kinds": ["email"]}}))
    groups = list({group.name: group for recipe in recipes for group in missing_groups(recipe, ["html"])}.values())
    seconds: list[float] = []
    stage = StageProgress("kernels", "group", time.monotonic())
    stage.add({"": len(groups)}, len(groups))
    with PrepareBar(enabled=not args.quiet) as bar:

        def show() -> None:
            now = time.monotonic()
            bar.update(stage.progress(now, stage.remaining_s(num_cores(), now)))

        def add(_: int, cpu_s: float) -> None:
            seconds.append(cpu_s)
            stage.advance([1, 0, 0], "", "", 0.0, time.monotonic())
            show()

        show()
        compile_groups(prepare_dataset, groups, num_cores(), add, print_note, show)
    directory = kernel_directory()
    number = sum(1 for _ in Path(directory).rglob("*.nbc"))
    result = {"kernels": number, "groups": len(groups), "cpu_s": round(sum(seconds), 1), "path": directory}
    text = f"{number} kernels in {directory}: {numbered(len(groups), 'group')} compiled in {sum(seconds):.1f} s of CPU"
    print(json.dumps(result) if args.json else text)


def _set_up_processes() -> None:
    # Else numpy starts a thread per core in each of the processes, of which there is one per core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if sys.platform == "linux" and multiprocessing.get_start_method(allow_none=True) is None:
        # The command owns its process, so the workers may be forked from it: imports and kernels are loaded once.
        multiprocessing.set_start_method("fork")


def _recipe(args: Namespace) -> Recipe:
    """The shipped recipe, changed by the file, then by single settings, then by options."""
    from forebay.prepare.config import check_method, load_recipe, merge, stage_group, without_none

    options = {
        "sample": args.sample, "tokenize": {"tokenizer": args.tokenizer},
        "slice": {"bytes": args.slice_bytes, "seed": args.seed},
    }  # fmt: skip
    settings = merge(parse_settings(args.set), without_none(options))
    for name in _names(args.filter):
        for stage in stage_group(name):
            settings = merge(settings, {stage: {}})
    for name in _names(args.dedup):
        settings = merge(settings, {"dedup": {check_method(name): True}})
    return load_recipe(args.recipe, args.config, settings, allow_code=args.allow_code)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _fetched(spec: str, args: Namespace) -> str:
    """Download the API that a file describes to JSON lines beside the dataset; an earlier run continues."""
    from forebay.observe.progress import bar
    from forebay.prepare.api import acquire
    from forebay.storage.addresses import is_bucket

    out = Path(args.out.rpartition("/")[2] if is_bucket(args.out) else args.out)
    folder = out.with_name(f"{out.name}.inputs") / Path(spec).name.removesuffix(".api.toml")
    with bar("fetch", None, "item", enabled=not args.quiet) as advance:
        num_items = 0

        def update(progress: Any) -> None:
            nonlocal num_items
            advance(progress.items - num_items)
            num_items = progress.items

        return str(acquire(spec, folder, update))


def _explain(name: str) -> None:
    """Print a shipped recipe, or what a table of one means; "" lists both."""
    from forebay.prepare.config import describe, recipe_names, recipe_text
    from forebay.prepare.recipe import STAGES
    from forebay.prepare.scores.base import SCORERS

    if not name:
        print(f"recipes: {', '.join(recipe_names())}\nstages:  {', '.join(STAGES)}")
        print(f"scores:  {', '.join(f'score.{scorer}' for scorer in SCORERS)}")
        print("tables:  read, limits, dedup, tokenize, slice, rows, fim\n\n--explain NAME prints any of these.")
        return
    is_recipe = name in recipe_names()
    if is_recipe:
        print(recipe_text(name))
    if not is_recipe or name in STAGES:
        # After a recipe as comments, so that the output is a valid recipe.
        print(textwrap.indent(describe(name), "# ", lambda line: True) if is_recipe else describe(name))


def _recipes() -> list[str]:
    from forebay.prepare.config import recipe_names

    return recipe_names()


def _filters() -> list[str]:
    from forebay.plugins import plugins
    from forebay.prepare.recipe import GROUPS, STAGES

    return [*GROUPS, *STAGES, *plugins("forebay.filters")]


def _dedup() -> list[str]:
    from forebay.plugins import plugins
    from forebay.prepare.dedup.methods import KINDS

    return [*KINDS, *plugins("forebay.dedup")]


def add_verbs(verb: Any, group: Any) -> None:
    p = verb("prepare", _prepare, "raw text to a dataset; run it again to resume")
    p.epilog = "example: forebay prepare crawl/ --out web --tokenizer gpt2 --recipe fineweb"
    p.add("inputs", "paths, URLs, commoncrawl:CRAWL, X.api.toml (default: the recipe's)", "INPUT", nargs="*")
    p.add("--out", "the dataset to write: a directory, or s3://, r2://, gs://, az:// (required)", "DIR")
    p.add("--tokenizer", "tokenizer.json, hub name, bytes or train:VOCAB (required)", "T")
    p.add("--recipe", "fineweb, dclm, dolma …; --explain lists them (default: none)", "NAME", values=_recipes)
    p.add("--config", "TOML file with your settings (default: none)", file)
    add_settings(p, "gopher_quality.min_words=20 or read.text_key=body")
    p.add("--filter", "filters: gopher,c4,fineweb,language,… (default: the recipe's)", "NAMES", values=_filters)
    p.add("--dedup", "exact,url,minhash,lines,sentences,substring,… (default: the recipe's)", "KINDS", values=_dedup)
    p.add("--slice-bytes", "size of a slice (default: the recipe's, or 64MiB)", size)
    p.add("--seed", "of the shuffle and of train: (default: the recipe's, or 0)", int, metavar="N")
    p.add("--workers", "processes (default: one per core)", positive)
    p.add("--engine", "local, ray (RAY_ADDRESS), or a plug-in's name", "NAME", "local", values=lambda: ["local", "ray"])
    p.add("--task", "I/N: the I-th of N jobs that share the tasks; finish: write their output", "I/N", "")
    p.add("--sample", "a share of the input; without --out the report alone (default: 100%%)", percentage)
    p.add_flag("--dry-run", "print what would run, on how much, and stop")
    p.add("--write-ids", "write the source id of each kept document (default: no)", file)
    p.add_flag("--document-ids", "store the source id of each document beside the slices")
    p.add("--extend", "keep the slices of this dataset and add to them (default: none)", "DIR")
    p.add_flag("--strict", "stop if an input is left out or cannot be read")
    p.add_flag("--follow-links", "follow links in input folders to other places")
    p.add_flag("--allow-code", "allow the recipe to run code: what its `use` names")
    p.add("--to", "text: parquet … litdata; tokens: megatron; lm: a perplexity model", _OUTPUTS)
    p.add_flag("--annotate", "write the text with its scores and drop nothing")
    p.add(
        "--explain",
        "print a recipe or the keys of a table; alone: a list",
        "NAME",
        nargs="?",
        const="",
        values=lambda: [*_recipes(), *_filters()],
    )

    p = verb("warm", _warm, "compile the kernels of filters now, for an image or before a first run")
    p.epilog = "example: forebay warm fineweb"
    p.add("names", "recipes, TOML files and filters (default: all)", "NAME", nargs="*", values=_recipes)
