"""`forebay worker -- COMMAND`: a program of one's own as a worker of a lease job.

The command's environment has what `forebay.Loader()` needs: the job's dataset, samples and scheduler, and this worker's
settings. Several processes of a command, such as the ranks of torchrun, are as many sessions, which share the cache.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from forebay.base import Json
from forebay.errors import NetworkError, UsageError
from forebay.lease.scheduler_client import SchedulerClient
from forebay.lease.session import return_leases
from forebay.load.environment import STATS_DIRECTORY, read_stats
from forebay.load.options import VARIABLE
from forebay.machine import own_directory
from forebay.processes import end_with_parent
from forebay.worker.trainer import share_processors

log = logging.getLogger("forebay.worker")


def loader_arguments(scheduler: SchedulerClient, **settings: Any) -> Json:
    """The Loader's arguments, as plain values, for a scheduler's job; `settings` are further ones.

    NetworkError if the scheduler does not answer.
    """
    info = scheduler.read_job()
    scheduler.name = str(info.get("name"))
    split, fraction = info.get("split") or (None, 0.0)
    return {
        "dataset": f"forebay://{quote(scheduler.identity.network_name, safe='')}/{quote(scheduler.name, safe='')}",
        "scheduler": scheduler.fixed_address or "auto",
        "seq_len": info.get("seq_len") if info.get("layout") == "tokens" else None,
        "packing": info.get("packing", "concat"), "split": split, "samples": {"validation_fraction": fraction},
        **settings,
    }  # fmt: skip


def run_command(command: Sequence[str], scheduler: SchedulerClient, arguments: Json) -> tuple[int, dict[str, float]]:
    """Run a command to its end. For the main thread: it passes SIGTERM and SIGINT on to the command's process group.

    Leases of processes that died are returned. Returns the exit status, 128 + N after signal N, and the sums of the
    statistics of its loaders (`read_stats`). UsageError if there is no such program.
    """
    share_processors()  # with other workers of this machine
    cache = own_directory(Path(arguments["cache_dir"]))
    with tempfile.TemporaryDirectory(prefix="stats-", dir=cache) as stats:
        environment = os.environ | {VARIABLE: json.dumps(arguments), STATS_DIRECTORY: stats}
        try:
            child = subprocess.Popen(command, env=environment, process_group=0, preexec_fn=end_with_parent)
        except OSError as error:
            raise UsageError(f"worker: cannot run {command[0]}: {error.strerror}. Give a program behind --.") from error

        def forward(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the command has ended
                os.killpg(child.pid, number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, forward)
        code = child.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # the command has ended
        if code:
            reason = signal.Signals(-code).name if code < 0 else f"status {code}"
            log.error("the command ended with %s: %s", reason, " ".join(command))
            try:
                return_leases(cache, scheduler)
            except NetworkError as error:
                log.warning("leases of processes that died are not returned, and will expire: %s", error)
        return code if code >= 0 else 128 - code, read_stats(Path(stats))
