"""The statistics that loaders of a command report to its worker (`forebay worker -- COMMAND`).

A Loader that has its dataset from the environment writes its `stats()` into a file in the directory `FOREBAY_STATS`
when the process ends.
"""

import atexit
import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

from forebay.files import atomic_write

STATS_DIRECTORY = "FOREBAY_STATS"


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
    """The sums of the statistics in a directory; `loaders` is their number, `wait_share` and `mfu` are of all time."""
    total: Any = Counter(loaders=0)
    for path in directory.glob("*.json"):
        total.update(json.loads(path.read_text()), loaders=1)
    elapsed_s = total["wait_s"] + total["busy_s"]
    shares = {"wait_share": "wait_s"} | ({"mfu": "ideal_s"} if total["ideal_s"] else {})
    return dict(total) | ({name: total[key] / elapsed_s for name, key in shares.items()} if elapsed_s else {})
