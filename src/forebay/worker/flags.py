"""The command line of `python -m forebay.worker`: one worker.

    python -m forebay.worker --dataset-type huggingface --dataset-name fineweb-edu --batch-size 8 --seq-len 1024

A flag replaces the value of `--config FILE.toml`, which replaces the dataset's own.
"""

import argparse
import asyncio
import inspect
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

from forebay.base import Json
from forebay.errors import ForebayError, UsageError
from forebay.toml import read_toml
from forebay.worker.catalog import list_available_datasets
from forebay.worker.client import WorkerClient, log_to_stderr
from forebay.worker.config import DATASET_TYPES, SIZES, WorkerConfig

_HELP = re.compile(r"^    (\w+): (.+(?:\n        .+)*)", re.MULTILINE)  # Of each argument in a docstring.
_CHOICES = {"dataset_type": DATASET_TYPES, "model_size": tuple(SIZES)}


def make_parser() -> argparse.ArgumentParser:
    """The parser; its result has only the flags that are given."""
    parser = argparse.ArgumentParser(
        prog="python -m forebay.worker",
        usage="%(prog)s [--dataset-name NAME] [--num-steps N] [--distributed] [options]",
        description="Train on a dataset by its name, alone or with others.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=110),
    )
    texts = dict(_HELP.findall(inspect.getdoc(WorkerConfig) or ""))
    for name, hint in get_type_hints(WorkerConfig).items():
        kind = next(kind for kind in (int, float, str, bool) if kind in (hint, *get_args(hint)))
        options: Json = {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "NAME")}
        if kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif name in _CHOICES:
            options = {"choices": _CHOICES[name], "metavar": "|".join(_CHOICES[name])}
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, help=" ".join(texts.get(name, "").split()), default=argparse.SUPPRESS, **options)
    parser.add_argument("--list-datasets", action="store_true", help="the datasets with a short name, and nothing else")
    parser.add_argument("--distributed", action="store_true", help="train together with the coordinator's workers")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of these settings; flags override it")
    parser.add_argument("--json", action="store_true", help="the report, or the list, as JSON on stdout")
    parser.add_argument("--quiet", action="store_true", help="no lines of progress")
    return parser


def read_config(path: Path) -> Json:
    """Settings of a TOML file, by the names of WorkerConfig's fields; `-` may stand for `_`."""
    settings = {name.replace("-", "_"): value for name, value in read_toml(path).items()}
    names = [field.name for field in fields(WorkerConfig)]
    if unknown := sorted(set(settings) - set(names)):
        raise UsageError(f"config {path}: expected settings of {', '.join(names)}; got {', '.join(unknown)}.")
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the flags say. 0 when all steps are done, 1 on an error."""
    args = vars(make_parser().parse_args(argv))
    path, distributed, as_json, quiet = (args.pop(name) for name in ("config", "distributed", "json", "quiet"))
    try:
        if args.pop("list_datasets"):
            datasets = list_available_datasets()
            print(json.dumps(datasets) if as_json else "\n".join(f"{d['name']}: {d['description']}" for d in datasets))
            return 0
        config = WorkerConfig(**{**(read_config(path) if path else {}), **args})
        asyncio.run(_train(config, distributed, quiet, as_json))
    except ForebayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _train(config: WorkerConfig, distributed: bool, quiet: bool, as_json: bool) -> None:
    async with WorkerClient(config, log=(lambda line: None) if quiet else log_to_stderr) as worker:
        try:
            await worker.run_training(use_distributed=distributed)
        finally:
            if as_json:
                print(json.dumps(worker.report.to_json()))
