"""Documents of similar embeddings: k-means, then the cosines within each cluster, as SemDeDup does.

Vectors are int16, of length 4096, so that all sums are of integers: the result is the same whatever the order, the
processor and its libraries, and a cosine is exact to about 0.001. A document goes if a better one in its cluster (of
greater weight, then earlier) has a cosine of `similarity` or more. Memory is `memory_bytes` a task; time grows with
documents x clusters, and with the square of a cluster.

Source: Abbas et al. 2023 (SemDeDup).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.arrays import BOOL, I16, I64
from forebay.prepare.compiled import jit
from forebay.prepare.dedup.methods import quantize
from forebay.storage.store import Store

MAX_CLUSTERS = 1 << 16
_ITERATIONS = 10
_SAMPLES = 64  # Vectors a cluster that k-means learns from, and at most so many bytes:
_SAMPLE_BYTES = 256 << 20


@dataclass(frozen=True)
class VectorSplit:
    """The vectors of a split, `PREFIX.semantic`: `documents` rows, the first of which is `first` in the corpus."""

    store: Store
    prefix: str
    documents: int
    first: int

    def read(self, start: int, stop: int, width: int) -> I16:
        """Rows [start, stop) int16 [*, width]."""
        name = f"{self.prefix}.semantic"
        return self.store.read_array(name, "<i2", (stop - start) * width, start * width).reshape(-1, width)

    def dropped(self, drop: str) -> BOOL:
        """bool [documents]: those whose byte in an object of a byte a document of the corpus is not 0."""
        if not drop:
            return np.zeros(self.documents, np.bool_)
        return np.asarray(self.store.read_array(drop, np.uint8, self.documents, self.first) != 0)


@dataclass(frozen=True)
class Clustering:
    """The vectors of all splits, and what their tasks share; `STEM-centroids` are the centres.

    Rows without a vector, and those that `drop` marks, are in no cluster. With `weighted` documents have weights.
    """

    store: Store
    stem: str
    splits: tuple[VectorSplit, ...]
    drop: str
    width: int
    clusters: int
    weighted: bool
    similarity: float
    memory_bytes: int

    def assigned(self, index: int) -> str:
        """The name of the rows of a split ordered by cluster, u32 [documents], those in none last.

        Beside it are `NAME.starts` u32 [clusters + 1], the vectors `NAME.vectors` and the weights `NAME.weights`.
        """
        return f"{self.stem}-{index}"


@dataclass(frozen=True)
class ClusterTask:
    """A task of a clustering: the one of the centres, that of split `start`, or that of clusters [start, stop)."""

    name: str
    clustering: Clustering
    start: int = 0
    stop: int = 0


@jit()
def _dot(a, b):  # type: ignore[no-untyped-def]
    """The product of two int16 vectors; 64 products fit in an int32, and a loop of that length becomes vector code."""
    total = np.int64(0)
    full = len(a) // 64 * 64
    for start in range(0, full, 64):
        x, y = a[start : start + 64], b[start : start + 64]
        part = np.int32(0)
        for i in range(64):
            part = np.int32(part + np.int32(np.int32(x[i]) * np.int32(y[i])))
        total += part
    for i in range(full, len(a)):
        total += np.int32(a[i]) * np.int32(b[i])
    return total


@jit()
def nearest(vectors, centroids, out):  # type: ignore[no-untyped-def]
    """The centroid of the greatest product for each vector, the first of several; -1 for a vector of zeros."""
    for row in range(len(vectors)):
        best, chosen = np.int64(-(1 << 62)), -1
        if _dot(vectors[row], vectors[row]) > 0:
            for c in range(len(centroids)):
                product = _dot(vectors[row], centroids[c])
                if product > best:
                    best, chosen = product, c
        out[row] = chosen


@jit()
def _sum_by_cluster(vectors, of, sums):  # type: ignore[no-untyped-def]
    for row in range(len(vectors)):
        if of[row] >= 0:
            for i in range(vectors.shape[1]):
                sums[of[row], i] += vectors[row, i]


def find_centroids(task: ClusterTask, scale: int) -> str:
    """Learn the centres of the clusters, int16 [clusters, width], from a sample. Returns the name of the task."""
    shared = task.clustering
    store, clusters, width = shared.store, shared.clusters, shared.width
    documents = sum(split.documents for split in shared.splits)
    limit = max(clusters, min(_SAMPLES * clusters, _SAMPLE_BYTES // (2 * width)))
    step = max(1, documents // limit)
    parts = [np.empty((0, width), np.int16)]
    for split in shared.splits:
        rows = np.arange(-split.first % step, split.documents, step)
        retained = rows[~split.dropped(shared.drop)[rows]]
        with store.local(f"{split.prefix}.semantic") as path:
            if len(retained):
                mapped = np.memmap(path, "<i2", "r", shape=(split.documents, width))
                parts.append(np.ascontiguousarray(mapped[retained]))
    sample = np.concatenate(parts)
    sample = sample[sample.any(1)]
    chosen = np.linspace(0, max(len(sample) - 1, 0), clusters).astype(np.int64)
    centroids = sample[chosen] if len(sample) else np.zeros((clusters, width), np.int16)
    of = np.empty(len(sample), np.int64)
    for _ in range(_ITERATIONS if clusters > 1 else 0):
        nearest(sample, centroids, of)
        sums = np.zeros(centroids.shape, np.int64)
        _sum_by_cluster(sample, of, sums)
        moved = quantize(sums)
        empty = ~moved.any(1)
        moved[empty] = centroids[empty]
        if np.array_equal(moved, centroids):
            break
        centroids = moved
    store.write(task.name, np.ascontiguousarray(centroids, "<i2").tobytes())
    return task.name


def assign_clusters(task: ClusterTask, scale: int) -> str:
    """Order the rows of a split by cluster. Returns the name of the task."""
    shared = task.clustering
    store, split, width = shared.store, shared.splits[task.start], shared.width
    centroids = store.read_array(f"{shared.stem}-centroids", "<i2").reshape(shared.clusters, width)
    clusters = np.empty(split.documents, np.int64)
    step = max(1, (16 << 20) // (2 * width))
    for start in range(0, split.documents, step):
        vectors = split.read(start, min(start + step, split.documents), width)
        nearest(vectors, centroids, clusters[start : start + step])
    clusters[split.dropped(shared.drop)] = -1
    clusters[clusters < 0] = shared.clusters
    order = np.argsort(clusters, kind="stable")
    starts = np.searchsorted(clusters[order], np.arange(shared.clusters + 1))
    store.write(f"{task.name}.starts", starts.astype("<u4").tobytes())
    store.write(task.name, order.astype("<u4").tobytes())
    if shared.weighted:
        store.write(f"{task.name}.weights", store.read_array(f"{split.prefix}.weight", "<f8")[order].tobytes())
    with store.local(f"{split.prefix}.semantic") as path, store.open(f"{task.name}.vectors") as file:
        if split.documents:
            mapped = np.memmap(path, "<i2", "r", shape=(split.documents, width))
            for start in range(0, split.documents, step):
                file.write(mapped[order[start : start + step]].data)
    return task.name


def compare_clusters(task: ClusterTask, scale: int) -> str:
    """Write pairs of similar documents to `NAME.pairs`: the later one, the better one. Returns the name of the task."""
    shared = task.clustering
    names = [shared.assigned(index) for index in range(len(shared.splits))]
    count = task.stop - task.start + 1
    bounds = [shared.store.read_array(f"{name}.starts", "<u4", count, task.start).tolist() for name in names]
    with shared.store.open(f"{task.name}.pairs") as pairs, shared.store.scratch() as folder:
        for cluster in range(count - 1):
            members, weights, vectors = _members(shared, [b[cluster : cluster + 2] for b in bounds], folder / "vectors")
            better = np.lexsort((members, -weights)) if shared.weighted else np.arange(len(members))
            for later, earlier in _similar(shared, members, vectors, better, shared.memory_bytes >> (2 * scale)):
                pairs.write(np.stack([later, earlier], axis=1).astype("<u8").data)
    return task.name


def _members(shared: Clustering, bounds: Sequence[list[int]], path: Path) -> tuple[Any, Any, Any]:
    """The documents of a cluster by their numbers in the corpus; their weights, and their vectors, in a file."""
    numbers, weights = [np.empty(0, np.int64)], [np.empty(0)]
    with path.open("wb") as file:
        for index, (split, (start, stop)) in enumerate(zip(shared.splits, bounds)):
            if start == stop:
                continue
            store, width, name = shared.store, shared.width, shared.assigned(index)
            numbers.append(store.read_array(name, "<u4", stop - start, start).astype(np.int64) + split.first)
            if shared.weighted:
                weights.append(store.read_array(f"{name}.weights", "<f8", stop - start, start))
            file.write(store.read_array(f"{name}.vectors", "<i2", (stop - start) * width, start * width).data)
    members = np.concatenate(numbers)
    none = np.empty((0, shared.width), np.int16)
    mapped = np.memmap(path, "<i2", "r", shape=(len(members), shared.width)) if len(members) else none
    return members, np.concatenate(weights), mapped


def _similar(shared: Clustering, members: I64, vectors: Any, better: I64, memory_bytes: int) -> Any:
    """For blocks of a cluster's members, the best first: those that are similar to a better one, and the first such."""
    block = max(64, memory_bytes // (8 * shared.width))
    for start in range(0, len(members), block):
        own = np.ascontiguousarray(vectors[better[start : start + block]])
        matches = np.full(len(own), -1, np.int64)
        for before in range(0, start + 1, block):
            others = own if before == start else np.ascontiguousarray(vectors[better[before : before + block]])
            _match(own, others, before == start, before, shared.similarity, matches)
        later = np.flatnonzero(matches >= 0)
        yield members[better[start + later]], members[better[matches[later]]]


@jit()
def _match(vectors, others, same, offset, similarity, matches):  # type: ignore[no-untyped-def]
    norms = np.empty(len(others), np.float64)
    for i in range(len(others)):
        norms[i] = _dot(others[i], others[i])
    for j in range(len(vectors)):
        if matches[j] >= 0:
            continue
        bound = similarity * similarity * np.float64(_dot(vectors[j], vectors[j]))
        for i in range(j if same else len(others)):
            product = np.float64(_dot(vectors[j], others[i]))
            if product > 0 and product * product >= bound * norms[i]:
                matches[j] = offset + i
                break
