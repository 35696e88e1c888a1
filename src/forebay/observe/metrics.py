"""Prometheus metrics of a view and of a loader, by one table: `docs/reference/metrics.md` lists them.

A loader's are read from `Loader.stats()`, so the training loop is as fast as without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from forebay.load.stats import CAUSES
from forebay.observe.views import View

if TYPE_CHECKING:
    from forebay.load.loader import Loader
    from forebay.stream.text_stream import TextStream

Values: TypeAlias = Iterable[tuple[str, Any, Mapping[str, str]]]

_TABLE = """\
dashboard.up | dashboard_up | 1 if the source answered the last poll, else 0, without other metrics of it.
job.done | job_samples_used | Samples used, over all epochs.
job.total | job_samples | Samples of all epochs.
job.epoch | job_epoch | The epoch, counted from 1.
job.eta_s | job_remaining_seconds | Time until all samples are used, at the current rate.
job.throughput | job_tokens_per_second | Tokens used per second by all workers.
job.workers | job_workers | Workers that are not silent.
job.asking for leases | job_idle_workers | Workers that wait for a lease.
job.leases | job_leases | Leases of slices that are in use.
job.slices set aside | job_slices_set_aside | Slices that no worker could read, which are not leased.
job.ledger entries | job_ledger_entries | Entries of the ledger.
run.done | run_step | The last step that all workers finished.
run.total | run_steps | Steps of the run.
run.eta_s | run_remaining_seconds | Time until the last step, at the current rate.
run.workers | run_workers | Workers in the run.
run.generation | run_generation | The generation: it rises when workers join or leave.
loader.total | loader_steps | Steps of the run, or of the pass.
job.MFU | job_mfu_ratio | Model FLOPs utilization, a mean over the workers that measure it.
loader.MFU | loader_mfu_ratio | Model FLOPs utilization, a mean over ranks.
loader.eta_s | loader_remaining_seconds | Time until the last step, at the current rate.
preparation.eta_s | prepare_remaining_seconds | Time until all stages are finished, as far as it is known.
preparation.documents read | prepare_documents_read_total | Documents read.
preparation.kept | prepare_documents_kept | Documents that no rule has dropped.
preparation.malformed | prepare_malformed_documents_total | Records that could not be parsed.
preparation.throughput | prepare_documents_per_second | Documents processed per second in the current stage.
preparation.processes | prepare_processes | Processes that work on the preparation.
preparation.CPU time | prepare_cpu_seconds_total | CPU time of all rules.
preparation.time | prepare_elapsed_seconds | Time since the preparation started.
preparation.largest process | prepare_process_max_bytes | Peak memory of the largest process.
preparation.tasks | prepare_tasks_total | Tasks finished.
preparation.retries | prepare_retries_total | Attempts that failed and are repeated.
wait | wait_ratio | Fraction of the workers' time spent waiting for batches, by cause; a mean over workers.
workers.rate tokens/s | worker_tokens_per_second | Tokens used per second, by worker.
workers.rate samples/s | worker_samples_per_second | Samples of rows used per second, by worker.
workers.wait_share | worker_wait_ratio | Fraction of its time that a worker waited for batches.
workers.mfu | worker_mfu_ratio | Model FLOPs utilization of a worker that measures it.
workers.step | worker_step | Batches that a worker has received; in a coordinated run, its step.
workers.leases | worker_leases | Leases of a worker.
workers.last_seen_s | worker_last_seen_seconds | Time since the last request of a worker.
workers.cached_bytes | worker_cache_used_bytes | Bytes in a worker's cache of slices.
workers.cache_budget_bytes | worker_cache_limit_bytes | Budget of a worker's cache of slices.
workers.origin_bytes | worker_origin_bytes | Bytes fetched from data nodes and other origins, by worker.
workers.peer_bytes | worker_peer_bytes | Bytes fetched from other workers, by worker.
workers.shared_bytes | worker_shared_bytes | Bytes sent to other workers, by worker.
nodes.up | node_up | 1 if a data node answers and takes requests, else 0.
nodes.bytes_sent | node_sent_bytes_total | Bytes of slices and files that a data node has sent.
nodes.connections | node_connections | Open connections of a data node.
stages.done_share | prepare_stage_done_ratio | Fraction done, by stage.
stages.documents_in | prepare_stage_documents_in | Documents read, by stage.
stages.documents_out | prepare_stage_documents_out | Documents passed on, by stage.
stages.elapsed_s | prepare_stage_elapsed_seconds | Time taken, by stage.
stages.cpu_s | prepare_stage_cpu_seconds_total | CPU time, by stage.
members.tasks | prepare_member_tasks_total | Tasks finished, by job of an array.
members.last_report_s | prepare_member_last_report_seconds | Time since the last report, by job of an array.
rules.documents_in | prepare_rule_documents_in | Documents read, by rule.
rules.documents_out | prepare_rule_documents_out | Documents passed on, by rule.
rules.cpu_s | prepare_rule_cpu_seconds_total | CPU time, by rule.
dropped.documents | prepare_documents_dropped | Documents dropped, by rule and reason.
stats.wait | loader_wait_seconds_total | Time that the training loop waited for batches, by cause.
stats.busy_s | loader_busy_seconds_total | Time that the training loop spent between waits.
stats.waiting_s | loader_current_wait_seconds | Length of the wait in progress; 0 without one.
stats.ideal_s | loader_ideal_seconds_total | Time that the received tokens take at the device's peak: its rate is MFU.
stats.batches | loader_batches_total | Batches received.
stats.samples | loader_samples_total | Samples received.
stats.tokens | loader_tokens_total | Tokens received; of a TextStream: encoded.
stats.samples of | loader_dataset_samples_total | Samples received, by dataset of a mixture of rows.
stats.tokens of | loader_dataset_tokens_total | Tokens received, by dataset of a mixture.
stats.slices_opened | loader_slices_opened_total | Slices opened.
stats.requests | loader_requests_total | Requests for slices, hashes of their chunks and lengths of documents.
stats.fetched_bytes | loader_fetched_bytes_total | Bytes that these requests fetched.
stats.fetched_bytes_of_workers | loader_peer_bytes_total | Of the fetched bytes, those of other workers.
stats.fetched_chunks | loader_fetched_chunks_total | Chunks of slices fetched into the cache.
stats.refetched_bytes | loader_refetched_bytes_total | Bytes fetched a second time in one epoch.
stats.refetched_chunks | loader_refetched_chunks_total | Chunks fetched a second time in one epoch.
stats.evicted_bytes | loader_evicted_bytes_total | Bytes evicted from the cache.
stats.shared_bytes | loader_shared_bytes_total | Bytes of slices sent to other nodes.
stats.wrong_bytes | loader_wrong_bytes_total | Bytes fetched whose hash differed; they are not used.
stats.leases_lost | loader_lost_leases_total | Leases that expired or were taken back while they were in use.
stats.wasted_samples | loader_wasted_samples_total | Samples used of leases that were lost: others use them again.
stats.failed | loader_failed_fetches_total | Fetches that failed.
stats.late | loader_late_chunks_total | Chunks that were not in the cache when they were needed.
stats.in_flight | loader_fetches_in_flight | Fetches in progress.
stats.cached_bytes | loader_cache_used_bytes | Bytes in the cache, of all that share it.
stats.documents | loader_documents_total | Documents of a TextStream that were encoded.
stats.text_bytes | loader_text_bytes_total | Bytes of text of a TextStream that were encoded.
stats.malformed | loader_malformed_documents_total | Records of a TextStream that could not be parsed.
stats.epoch | loader_epoch | The epoch, counted from 0.
stats.step | loader_step | The step of the run.
"""
_METRICS = {key: (name, about) for key, name, about in (line.split(" | ") for line in _TABLE.splitlines())}
"""By what is measured (a figure of a view of that kind, a column of a table, or a count of `stats()`): names without
`forebay_`, and descriptions. A name that ends in `_total` is a counter's, another a gauge's."""

_LABELS = {
    "workers": {"worker": "name"}, "nodes": {"node": "name"}, "stages": {"stage": "stage"}, "rules": {"rule": "rule"},
    "dropped": {"rule": "rule", "reason": "reason"}, "members": {"member": "member"},
}  # fmt: skip
"""Labels of the rows of a view's tables, and the columns that they are from."""


def view_metrics(view: View) -> Iterator[Metric]:
    """The figures of a view; of a source that does not answer only that."""
    is_up = "error" not in view and bool(view["kind"])
    yield from _families([("dashboard.up", is_up, {}), *(_values(view) if is_up else ())])


def _values(view: View) -> Values:
    kind = view["kind"]
    own = {"dataset": view["title"]} if kind == "job" else {}
    figures = {name: value for name, (value, _) in view.get("figures", {}).items()}
    for name, value in {**figures, **(view.get("progress") or {})}.items():
        yield f"{kind}.{name}", value, own
    if kind in ("job", "loader"):
        for cause in CAUSES:
            yield "wait", view.get("waits", {}).get(cause, 0.0), {**own, "cause": cause}
    unit = "samples/s" if "samples/s" in view.get("figures", {}).get("throughput", ()) else "tokens/s"
    for table, columns in _LABELS.items():
        rows = view.get(table, [])
        names = Counter(row.get("name") for row in rows)
        for row in rows:
            labels = {label: str(row[column]) for label, column in columns.items()}
            if names[row.get("name")] > 1 and "id" in row:  # Names are their owners' choice.
                labels = {label: f"{name} {row['id']}" for label, name in labels.items()}
            for column, value in {**row, f"rate {unit}": row.get("rate"), "up": row.get("state") == "up"}.items():
                yield f"{table}.{column}", value, labels


def loader_metrics(loader: Loader[Any] | TextStream) -> Iterator[Metric]:
    """The counts and times of a loader of this process, with its rank as label."""
    return _families(_stats(loader))


def _stats(loader: Loader[Any] | TextStream) -> Values:
    labels = {"rank": str(loader.rank)}
    for key, value in {**loader.stats(), "epoch": loader.epoch, "step": loader.step}.items():
        name, _, dataset = key.partition(".")
        if key.removesuffix("_s") in CAUSES:
            yield "stats.wait", value, {**labels, "cause": key.removesuffix("_s")}
        elif dataset:
            yield f"stats.{name} of", value, {**labels, "dataset": dataset}
        else:
            yield f"stats.{key}", value, labels


def _families(values: Values) -> Iterator[Metric]:
    """The families of values, in their order; those without a line in the table, and None, are left out."""
    families: dict[str, dict[tuple[str, ...], float]] = {}
    names = {}
    for key, value, labels in values:
        if key in _METRICS and value is not None:
            families.setdefault(key, {})[tuple(labels.values())] = float(value)
            names[key] = tuple(labels)
    for key, samples in families.items():
        name, about = _METRICS[key]
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(f"forebay_{name}", about, labels=names[key])
        for label_values, number in samples.items():
            family.add_metric(label_values, number)
        yield family


@dataclass(eq=False)
class LoaderCollector:
    """A collector for a registry of one's own: `prometheus_client.REGISTRY.register(LoaderCollector(loader))`."""

    loader: Loader[Any] | TextStream

    def collect(self) -> Iterable[Metric]:
        """The metric families, for `prometheus_client`."""
        return loader_metrics(self.loader)
