"""`python -m forebay.worker`: one worker from the command line.

    python -m forebay.worker --dataset-type huggingface --dataset-name fineweb-edu --batch-size 8 --seq-len 1024

A flag replaces the value of `--config FILE.toml`, which replaces the dataset's own.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError, UsageError
from forebay.toml import read_toml
from forebay.worker.catalog import list_available_datasets
from forebay.worker.client import WorkerClient, log_to_stderr
from forebay.worker.config import DATASET_TYPES, MODEL_SIZES, WorkerConfig

_Flag = tuple[str, Any, str]
_DATA: tuple[_Flag, ...] = (
    ("dataset-name", str, "a short name, OWNER/NAME of the hub, or a path of text files"),
    ("dataset-type", DATASET_TYPES, "kind of data (dummy; huggingface with a name)"),
    ("tokenizer-name", str, "in place of the dataset's own"),
    ("batch-size", int, "samples of this worker's step (4)"),
    ("seq-len", int, "tokens of a sample (the dataset's own, or 32)"),
    ("seed", int, "of data and first weights (42)"),
    ("shuffle-buffer", int, "documents that are mixed (the dataset's own)"),
    ("text-key", str, "the column with the text (the dataset's own)"),
    ("partition", ("samples", "records"), "how ranks share text (samples)"),
    ("vocab-size", int, "of dummies' ids (1024)"),
)
_TRAINING: tuple[_Flag, ...] = (
    ("num-steps", int, "steps of the run (100)"),
    ("model-size", tuple(MODEL_SIZES), "of the model of FILE.py:NAME (tiny)"),
    ("trainer", str, "count (NumPy), or FILE.py:NAME, a class of your program (count)"),
    ("learning-rate", float, "AdamW's (0.001)"),
    ("device", str, "cpu, cuda, … (the accelerator if there is one)"),
    ("checkpoint-dir", str, "directory of the checkpoint, which is resumed"),
    ("checkpoint-steps", int, "between two checkpoints (1000)"),
)
_DISTRIBUTED: tuple[_Flag, ...] = (
    ("worker-id", str, "identifies this worker to the coordinator, also after a restart"),
    ("coordinator", str, "host:port or URL (FOREBAY_COORDINATOR, or 127.0.0.1:8000)"),
    ("network", str, "this node's directory, for a coordinator with mutual TLS"),
    ("timeout-s", float, "how long to wait for a coordinator or peer that does not respond (60)"),
)
_METAVAR = {str: "NAME", int: "N", float: "X"}


def make_parser() -> argparse.ArgumentParser:
    """The parser; its result has only the flags that are given."""
    parser = argparse.ArgumentParser(
        prog="python -m forebay.worker",
        usage="%(prog)s [--dataset-name NAME] [--num-steps N] [--distributed] [options]",
        description="Train on a dataset by its name, alone or with others.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=110),
    )
    data = parser.add_argument_group("data")
    _add_flags(data, _DATA)
    data.add_argument(
        "--streaming",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="stream, or keep the files here first (streamed above 10 GB)",
    )
    data.add_argument("--list-datasets", action="store_true", help="the datasets with a short name, and nothing else")
    _add_flags(parser.add_argument_group("training"), _TRAINING)
    distributed = parser.add_argument_group("several workers")
    distributed.add_argument("--distributed", action="store_true", help="train together with the coordinator's workers")
    _add_flags(distributed, _DISTRIBUTED)
    out = parser.add_argument_group("settings and output")
    out.add_argument("--config", type=Path, metavar="FILE", help="these settings from a TOML file; flags go before it")
    out.add_argument("--json", action="store_true", help="the report, or the list, as JSON on stdout")
    out.add_argument("--quiet", action="store_true", help="no lines of progress")
    return parser


def _add_flags(group: Any, flags: tuple[_Flag, ...]) -> None:
    for name, kind, help_text in flags:
        if isinstance(kind, tuple):
            options: dict[str, Any] = {"choices": kind, "metavar": "|".join(kind)}
        else:
            options = {"type": kind, "metavar": _METAVAR[kind]}
        group.add_argument(f"--{name}", help=help_text, default=argparse.SUPPRESS, **options)


def read_config(path: Path) -> dict[str, Any]:
    """Settings of a TOML file, by the names of WorkerConfig's fields; `-` may stand for `_`."""
    settings = {name.replace("-", "_"): value for name, value in read_toml(path).items()}
    names = [field.name for field in fields(WorkerConfig)]
    if unknown := sorted(set(settings) - set(names)):
        raise UsageError(f"config {path}: expected settings of {', '.join(names)}; got {', '.join(unknown)}.")
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the flags say. 0 when all steps are done, 1 on an error, 130 when interrupted."""
    args = vars(make_parser().parse_args(argv))
    path, distributed, as_json, quiet = (args.pop(name) for name in ("config", "distributed", "json", "quiet"))
    try:
        if args.pop("list_datasets"):
            return _list(as_json)
        config = WorkerConfig(**{**(read_config(path) if path else {}), **args})
        report = asyncio.run(_train(config, distributed, quiet))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ForebayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(report))
    return 0


async def _train(config: WorkerConfig, distributed: bool, quiet: bool) -> dict[str, Any]:
    worker = WorkerClient(config, log=(lambda line: None) if quiet else log_to_stderr)
    async with worker:
        return (await worker.run_training(use_distributed=distributed)).to_json()


def _list(as_json: bool) -> int:
    datasets = list_available_datasets()
    lines = [json.dumps(datasets)] if as_json else [f"{entry['name']}: {entry['description']}" for entry in datasets]
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
