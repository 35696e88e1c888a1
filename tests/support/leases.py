"""A worker of a lease job in this process: a Loader with the job's arguments, read to its end."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay import Loader, NetworkOptions, SampleOptions
from forebay.lease.scheduler_client import SchedulerClient
from forebay.network.client import Client
from forebay.network.discovery import Discovery
from forebay.network.pki.identity import Identity
from forebay.worker.command import loader_arguments


def work(
    identity: Identity, name: str, scheduler: str | None, cache_dir: Path | str, *, cache_bytes: int = 1 << 20,
    batch_size: int = 4, discovery: Discovery | None = None, on_batch: Callable[[Any], object] = lambda batch: None,
    stop: threading.Event | None = None, via: str = "", **network: Any,
) -> dict[str, float]:  # fmt: skip
    """Use batches until nothing is left to lease, or `stop` is set; the loader's statistics.

    Args:
        via: The address at which the loader reaches the scheduler, if it is another.
        network: The loader's options.
    """
    options = NetworkOptions(identity=identity, discovery=discovery, **network)
    with Client(identity) as client:
        asked = SchedulerClient(identity, client, name, discovery, scheduler, options.patience_s)
        arguments = loader_arguments(asked, batch_size=batch_size, cache_bytes=cache_bytes, cache_dir=cache_dir)
    arguments |= {"network": options, "samples": SampleOptions(**arguments["samples"])}
    arguments["scheduler"] = via or arguments["scheduler"]
    with Loader(arguments.pop("dataset"), **arguments) as loader:
        for batch in loader:
            on_batch(batch)
            if stop is not None and stop.is_set():
                loader.commit()
                break
    stats = loader.stats()
    return {**stats, "wait_share": stats["wait_s"] / max(1e-9, stats["wait_s"] + stats["busy_s"])}
