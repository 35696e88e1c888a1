"""The plan of a loader whose order is that of schedulers' leases: its arguments, jobs and sessions, checked.

The job decides seed, epochs, seq_len, packing and split; the loader's own must agree. Each process is a worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from forebay.errors import StateError, UsageError
from forebay.fetch.feed import CacheSettings
from forebay.load.options import OrderOptions
from forebay.load.samples import SampleIndex
from forebay.load.sources import Mixture

if TYPE_CHECKING:
    from forebay.lease.job import LeaseJob
    from forebay.lease.session import SessionSettings

_STATE_VERSION = 1


def check_arguments(options: SimpleNamespace) -> None:
    """Refuse what a loader with a scheduler cannot have. Raises UsageError."""
    samples, by_job = options.samples, "The job decides this: leave it out, or start another job."
    refused = {
        "rank, world_size": (options.rank, options.world_size) != (None, None),
        "global_batch_size": options.global_batch_size is not None,
        "drop_last": bool(samples.drop_last),
        "order": options.order != OrderOptions(),
        "cache.readahead_bytes": options.cache.readahead_bytes is not None,
        "cache.keep": options.cache.keep != "budget",
    }
    reason = (
        "With scheduler= each process takes leases of its own, in the order in which they are granted. Leave it out."
    )
    for name, is_given in refused.items():
        if is_given:
            raise UsageError(f"{name}: expected none with scheduler=. {reason}")
    if options.batch_size is None:
        raise UsageError("batch_size: expected a number with scheduler=, got none.")
    for name, value, default in (
        ("seed", options.seed, 0), ("epochs", options.epochs, 1), ("shuffle", options.shuffle, True),
        ("documents", samples.documents, None),
    ):  # fmt: skip
        if value != default:
            raise UsageError(f"{name}: expected none with scheduler=, got {value!r:.100}. {by_job}")


def open_jobs(options: SimpleNamespace, mixture: Mixture | None) -> dict[str, LeaseJob]:
    """The job of each dataset, by name in the mixture; of one dataset, "".

    Raises:
        UsageError: If a dataset is no `forebay://` URL, or has no scheduler.
        NetworkError: If a scheduler does not answer.
    """
    from forebay.lease.job import LeaseJob  # A local dataset needs no network packages.

    sources: Mapping[str, Any] = {"": options.dataset} if mixture is None else mixture.datasets
    schedulers = options.scheduler
    if isinstance(schedulers, str):
        schedulers = dict.fromkeys(sources, schedulers) if mixture is None or schedulers == "auto" else {}
    if not isinstance(schedulers, Mapping) or set(schedulers) != set(sources):
        expected = "'host:port' or 'auto'" if mixture is None else "{name: 'host:port'} for each dataset, or 'auto'"
        raise UsageError(f"scheduler: expected {expected}, got {options.scheduler!r:.200}.")
    for source in sources.values():
        if not str(source).startswith("forebay://"):
            raise UsageError(f"scheduler: expected a dataset forebay://NETWORK/NAME with it, got {source!s:.200}.")
    network = options.network

    def open_one(name: str) -> LeaseJob:
        address = None if schedulers[name] == "auto" else schedulers[name]
        return LeaseJob(
            str(sources[name]), network.identity, address, discovery=network.discovery,
            patience_s=network.patience_s, from_urls=network.from_urls,
        )  # fmt: skip

    with ThreadPoolExecutor(len(sources)) as pool:
        return dict(zip(sources, pool.map(open_one, sources)))


def check_job(job: LeaseJob, index: SampleIndex, options: SimpleNamespace) -> None:
    """Refuse samples that are not the job's. Raises UsageError."""
    info = job.info
    split = None if index.split is None else list(index.split)
    fields = [
        ("packing", index.packing, info.get("packing", "concat")),
        ("split", split, info.get("split")),
        ("number of samples", index.num_samples, info.get("num_samples")),
    ]
    if index.layout == "tokens":
        fields.insert(0, ("seq_len", index.seq_len, info.get("seq_len")))
    for name, ours, theirs in fields:
        if ours != theirs:
            raise UsageError(
                f"{name}: expected that of the job {job.name}, {theirs!r}, got {ours!r}. Change the Loader's "
                "arguments, or start a job with these (forebay scheduler)."
            )


def session_settings(options: SimpleNamespace, num_jobs: int, cache: CacheSettings) -> SessionSettings:
    """The settings of each job's session; they divide the cache."""
    from forebay.lease.session import SessionSettings

    network, listen = options.network, options.network.listen
    share = ":0" if listen == "auto" else listen
    return SessionSettings(
        cache.budget_bytes // num_jobs, int(options.batch_size), network.receipt_s, share, network.upload_bytes_per_s
    )


def make_lease_state(jobs: Mapping[str, LeaseJob], step: int) -> dict[str, Any]:
    """The state of a loader with schedulers: which samples are used stands in their ledgers."""
    return {"version": _STATE_VERSION, "jobs": {name: job.job_id for name, job in jobs.items()}, "step": step}


def step_of_lease_state(state: object, jobs: Mapping[str, LeaseJob]) -> int:
    """The step of a state. Raises StateError if it is not one of these jobs."""
    expected = make_lease_state(jobs, 0)
    step = None
    with contextlib.suppress(TypeError, KeyError):
        step = state["step"]  # type: ignore[index]
    if not isinstance(state, dict) or type(step) is not int or step < 0 or state != {**expected, "step": step}:
        raise StateError(
            f"loader state: expected one of the jobs {expected['jobs']} with a step, got {state!r:.300}. Load a "
            "state of a loader with these schedulers, or start without one: they know what is used."
        )
    return step
