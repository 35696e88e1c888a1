"""What a loader shows of itself: a description in lines, cards for notebooks, and the documents behind a batch."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.arrays import Array
from forebay.dataset.reader import Dataset
from forebay.errors import UsageError
from forebay.load.tokens import TokenCollator
from forebay.maps import map_offset
from forebay.order.footprint import fetch_ratios, num_requests
from forebay.units import format_bytes, numbered

if TYPE_CHECKING:
    from forebay.dataset.documents import Document, Documents
    from forebay.fetch.cache import CacheSettings


class TokenText:
    """Decodes tokens with a dataset's tokenizer; pickled without it."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    @cached_property
    def _documents(self) -> Documents:
        from forebay.dataset.documents import Documents

        return Documents(self._dataset)

    def __call__(self, tokens: Array) -> str:
        return self._documents.text(tokens)

    def __reduce__(self) -> Any:
        return str, ()


def describe(loader: Any) -> dict[str, str]:
    """The description of a loader by name; see `Loader.describe`."""
    run, order, config = loader.run, loader.order, loader.config
    unit = "rows" if loader.seq_len is None else f"samples of {loader.seq_len} tokens"
    fields: dict[str, str] = {}
    for name, dataset, index in zip(loader.datasets, loader.datasets.values(), loader.plan.indexes):
        fields[f"dataset {name}".strip()] = (
            f"{dataset.name} ({dataset.url}), id {dataset.id[:12]}, {numbered(dataset.num_slices, 'slice')}, "
            f"{format_bytes(int(dataset.table.bytes.sum()))}; {index.num_samples:,} {unit}"
        )
    sizes = ", then ".join(f"{size:,} from step {step:,}" for step, size in loader.global_batch_sizes)
    fields["global batch"] = sizes.removesuffix(" from step 0") if "then" not in sizes else sizes
    packing = f"{config.packing}, document masks {'on' if config.has_masks else 'off'}"
    position = f"epoch {loader.epoch}, step {loader.step:,}{'' if run.num_steps is None else f' of {run.num_steps:,}'}"
    if jobs := loader.plan.jobs:
        leased = (f"job {job.job_id[:12]} of {job.name} at {job.scheduler.addresses()[0]}" for job in jobs.values())
        return {
            **fields, "position": f"{position} of this worker", "order": f"as leases are granted: {', '.join(leased)}",
            "packing": packing, "cache": _limit(loader.plan.cache),
        }  # fmt: skip
    fields["rank"] = f"{loader.rank} of {loader.world_size}"
    fields["position"] = position
    if loader.mixture is None:
        fields["steps"] = f"{loader.steps_per_epoch:,} an epoch; epochs in a pass: {config.epochs or 'no end'}"
    elif run.num_steps is not None:
        fields["repeats"] = ", ".join(f"{name} {n:.2f} times" for name, n in _repeats(loader).items())
    fields["order"] = f"{order}, seed {order.seed}, assignment {config.order.assignment}"
    fields["packing"] = packing
    if tail := loader.tail_tokens:
        fields["tail"] = f"{tail:,} tokens an epoch in no sample"
    return fields | _traffic(loader)


def _limit(settings: CacheSettings) -> str:
    return f"{settings.directory}, at most {format_bytes(settings.budget_bytes)}"


def _repeats(loader: Any) -> dict[str, float]:
    """How often the run reads each dataset of its mixture by its last step."""
    run = loader.run
    changes = run.weights.changes
    stops = [step for step, _ in changes[1:]] + [run.num_steps]
    samples = np.zeros(len(loader.datasets))
    for (step, weights), stop in zip(changes, stops):
        if step < run.num_steps:
            taken = run.progress(min(stop, run.num_steps)).samples_taken - run.progress(step).samples_taken
            samples += taken * np.array(weights) / sum(weights)
    return {name: float(n / index.num_samples) for name, n, index in zip(loader.datasets, samples, loader.plan.indexes)}


def _traffic(loader: Any) -> dict[str, str]:
    """What a node fetches in an epoch and must keep."""
    settings = loader.plan.cache
    if settings is None:
        return {"reading": "in place, from the dataset's directory; nothing is fetched"}
    parts = loader.plan.footprints(settings)
    needs, ratio = [part.nodes[0] for part in parts], max(fetch_ratios(parts, settings.budget_bytes))
    requests = sum(num_requests(parts, settings.budget_bytes, settings.neighbour_bytes())) // parts[0].num_nodes
    fetched, opened = sum(need.epoch_bytes for need in needs), sum(need.open_bytes for need in needs)
    return {
        "fetched": f"{format_bytes(fetched)} by a node in an epoch, by about {requests:,} requests; by all {ratio:.2f} "
        "times the dataset",
        "cache": f"{_limit(settings)}; {format_bytes(opened)} of it are read at once; slices hashed: "
        f"{loader.config.cache.verify}",
    }  # fmt: skip


def documents_of(loader: Any, batch: Any) -> list[list[Document]]:
    """The documents of each sample of a batch; see `Loader.documents`."""
    datasets, indexes = list(loader.datasets.values()), loader.plan.indexes
    return [
        [datasets[source].document(number) for number in _numbers(datasets[source], indexes[source], sample)]
        for source, sample in zip(batch.dataset_index.tolist(), batch.sample_ids.tolist())
    ]


def _numbers(dataset: Dataset, index: Any, sample: int) -> list[int]:
    if index.seq_len is None:
        raise UsageError(f"documents: expected a dataset of layout tokens, got rows in {dataset.url}. Use dataset[i].")
    key = int(np.searchsorted(index.bases, sample, "right")) - 1
    collator = TokenCollator([index], document_masks=True)
    opened = dataset.open_slice(key)
    collator.open(key, key, opened)
    starts, stops = collator.byte_ranges(key, np.array([sample - int(index.bases[key] + index.offsets[key])]))
    document_ends = np.asarray(opened.document_ends).astype(np.int64)
    lengths, first, remaining = np.diff(document_ends, prepend=0), int(index.first_documents[key]), index.seq_len
    offset, width = map_offset(opened.tokens), opened.tokens.itemsize
    numbers: list[int] = []
    for start, stop in zip(((starts - offset) // width).tolist(), ((stops - offset) // width).tolist()):
        size = min(stop - start, remaining)  # The last token is a label only.
        remaining -= size
        if size:
            low, high = np.searchsorted(document_ends, [start, start + size - 1], "right").tolist()
            numbers += [n for n in range(low, high + 1) if n >= len(lengths) or lengths[n]]
    return [first + number for number in dict.fromkeys(numbers)]
