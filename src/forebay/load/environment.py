"""`Loader()` without a dataset: the arguments that `forebay worker -- COMMAND` gives its command, and its statistics.

`FOREBAY_LOADER` is JSON of the Loader's keyword arguments, with options objects as objects of their fields. A Loader
made of it writes its `stats()` into a file in the directory `FOREBAY_STATS` when the process ends.
"""

import atexit
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from forebay.errors import UsageError
from forebay.files import atomic_write
from forebay.load.options import OPTIONS, CacheOptions, NetworkOptions, OrderOptions, SampleOptions, as_options

VARIABLE, STATS_DIRECTORY = "FOREBAY_LOADER", "FOREBAY_STATS"


class LoaderArguments(TypedDict, total=False):
    """The Loader's arguments for datasets of any layout, but the dataset."""

    batch_size: int | None
    global_batch_size: int | Sequence[tuple[int, int]] | None
    rank: int | None
    world_size: int | None
    seed: int
    shuffle: bool
    epochs: int | None
    steps: int | None
    split: str | None
    cache_dir: str | Path | None
    cache_bytes: int | None
    scheduler: str | Mapping[str, str] | None
    order: OrderOptions | None
    cache: CacheOptions | Literal["disk", "ram"] | None
    network: NetworkOptions | None
    samples: SampleOptions | None


def add_environment(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a Loader without a dataset: those that are given, else the environment's.

    Of an options object, fields that are not their default count as given.

    Raises:
        UsageError: If there is no `FOREBAY_LOADER`, or it is malformed.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        raise UsageError(
            f"Loader: expected a dataset, got none, and no {VARIABLE} in the environment. Give a directory or URL and "
            "batch_size=, for tokens also seq_len=; or start the program by `forebay worker NAME -- COMMAND`."
        )
    try:
        settings = json.loads(text)
        if not isinstance(settings, dict) or not settings.get("dataset") or settings.keys() - arguments.keys():
            raise ValueError("expected an object with `dataset` and other arguments of the Loader")
        for name in OPTIONS.keys() & settings.keys():
            if isinstance(settings[name], dict):
                settings[name] = OPTIONS[name](**settings[name])
    except (ValueError, TypeError) as error:
        raise UsageError(f"{VARIABLE}: cannot be read: {error}: {text:.200}. Correct it, or unset it.") from error
    result = {**arguments, **{name: value for name, value in settings.items() if arguments[name] == defaults.get(name)}}
    for name in OPTIONS.keys() & settings.keys():
        if arguments[name] is not None:
            result[name] = _fill(as_options(name, arguments[name], OPTIONS[name]), settings[name])
    return result


def _fill(options: Any, others: Any) -> Any:
    """The options, with the others' values in place of defaults."""
    unset = [field.name for field in fields(options) if getattr(options, field.name) == field.default]
    return replace(options, **{name: getattr(others, name) for name in unset})


def close_at_exit(loader: Any) -> int:
    """Close a loader when this process ends, not when a forked child does. The process id."""
    pid = os.getpid()
    atexit.register(lambda: loader.close() if os.getpid() == pid else None)
    return pid


def write_stats(loader: Any, pid: int) -> None:
    """Write a loader's statistics for the worker that started this process; nothing in other processes."""
    directory = Path(os.environ.get(STATS_DIRECTORY) or os.devnull)
    if os.getpid() != pid or not directory.is_dir():
        return
    try:
        atomic_write(directory / f"{pid}-{id(loader)}.json", json.dumps(loader.stats()).encode())
    except OSError as error:
        logging.getLogger("forebay").warning("the worker's report lacks this loader's statistics: %s", error)


def read_stats(directory: Path) -> dict[str, float]:
    """The sums of the statistics in a directory; `loaders` is their number, `wait_share` the share of the time."""
    total: dict[str, float] = {"loaders": 0}
    for path in directory.glob("*.json"):
        total["loaders"] += 1
        for name, value in json.loads(path.read_text()).items():
            total[name] = total.get(name, 0) + value
    elapsed_s = total.get("wait_s", 0.0) + total.get("busy_s", 0.0)
    return {**total, "wait_share": total["wait_s"] / elapsed_s} if elapsed_s else total
