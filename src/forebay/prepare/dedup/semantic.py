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
from numpy.typing import NDArray

from forebay.files import open_atomic
from forebay.prepare.compiled import jit
from forebay.prepare.dedup.methods import Vectors, quantize
from forebay.prepare.dedup.pairs import read_flags

MAX_CLUSTERS = 1 << 16
_ITERATIONS = 10
_SAMPLES = 64  # Vectors a cluster that k-means learns from, and at most so many bytes:
_SAMPLE_BYTES = 256 << 20


@dataclass(frozen=True)
class VectorSplit:
    """The vectors of a split, `PREFIX.semantic`: `documents` rows, the first of which is `first` in the corpus."""

    prefix: str
    documents: int
    first: int

    def read(self, rows: NDArray[np.int64], width: int) -> Vectors:
        """int16 [rows, width]."""
        if not len(rows):
            return np.empty((0, width), np.int16)
        mapped = np.memmap(f"{self.prefix}.semantic", "<i2", "r", shape=(self.documents, width))
        vectors: Vectors = np.ascontiguousarray(mapped[rows])
        return vectors


@dataclass(frozen=True)
class CentroidsTask:
    """The centres of `clusters` clusters to `NAME`, int16 [clusters, width], learnt from a sample of the splits."""

    name: str
    folder: str
    splits: tuple[VectorSplit, ...]
    drop: str
    width: int
    clusters: int


@dataclass(frozen=True)
class AssignTask:
    """The rows of a split ordered by cluster: `NAME`, u32 [documents]; `NAME.starts` u32 [clusters + 1].

    Rows without a vector, and those that `drop` marks, come last and in no cluster.
    """

    name: str
    folder: str
    split: VectorSplit
    drop: str
    width: int
    clusters: int
    centroids: str


@dataclass(frozen=True)
class CompareTask:
    """Pairs of similar documents of the clusters [start, stop) to `NAME.pairs`: the later one, the better one."""

    name: str
    folder: str
    splits: tuple[VectorSplit, ...]
    assigned: tuple[str, ...]
    start: int
    stop: int
    width: int
    weighted: bool
    similarity: float
    memory_bytes: int


def default_clusters(documents: int) -> int:
    """About the square root of the documents: assigning and comparing then cost the same."""
    return int(min(MAX_CLUSTERS, max(1, documents**0.5)))


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
def nearest(vectors: Any, centroids: Any, out: Any) -> None:
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
def _sum_by_cluster(vectors: Any, of: Any, sums: Any) -> None:
    for row in range(len(vectors)):
        if of[row] >= 0:
            for i in range(vectors.shape[1]):
                sums[of[row], i] += vectors[row, i]


def find_centroids(task: CentroidsTask, scale: int) -> str:
    """Run a CentroidsTask unless its file exists. Returns its name."""
    out = Path(task.folder) / task.name
    if out.exists():
        return task.name
    documents = sum(split.documents for split in task.splits)
    limit = max(task.clusters, min(_SAMPLES * task.clusters, _SAMPLE_BYTES // (2 * task.width)))
    step = max(1, documents // limit)
    parts = [np.empty((0, task.width), np.int16)]
    for split in task.splits:
        rows = np.arange(-split.first % step, split.documents, step)
        retained = rows[read_flags(task.drop, split.first, split.documents)[rows] == 0] if task.drop else rows
        parts.append(split.read(retained, task.width))
    sample = np.concatenate(parts)
    sample = sample[sample.any(1)]
    chosen = np.linspace(0, max(len(sample) - 1, 0), task.clusters).astype(np.int64)
    centroids = sample[chosen] if len(sample) else np.zeros((task.clusters, task.width), np.int16)
    of = np.empty(len(sample), np.int64)
    for _ in range(_ITERATIONS if task.clusters > 1 else 0):
        nearest(sample, centroids, of)
        sums = np.zeros(centroids.shape, np.int64)
        _sum_by_cluster(sample, of, sums)
        moved = quantize(sums)
        empty = ~moved.any(1)
        moved[empty] = centroids[empty]
        if np.array_equal(moved, centroids):
            break
        centroids = moved
    with open_atomic(out) as file:
        file.write(np.ascontiguousarray(centroids, "<i2").data)
    return task.name


def assign_clusters(task: AssignTask, scale: int) -> str:
    """Run an AssignTask unless its file exists. Returns its name."""
    out, split = Path(task.folder) / task.name, task.split
    if out.exists():
        return task.name
    centroids = np.fromfile(task.centroids, "<i2").reshape(task.clusters, task.width)
    clusters = np.empty(split.documents, np.int64)
    step = max(1, (16 << 20) // (2 * task.width))
    for start in range(0, split.documents, step):
        vectors = split.read(np.arange(start, min(start + step, split.documents)), task.width)
        nearest(vectors, centroids, clusters[start : start + step])
    if task.drop:
        clusters[read_flags(task.drop, split.first, split.documents) != 0] = -1
    clusters[clusters < 0] = task.clusters
    order = np.argsort(clusters, kind="stable")
    starts = np.searchsorted(clusters[order], np.arange(task.clusters + 1))
    with open_atomic(f"{out}.starts") as file:
        file.write(starts.astype("<u4").data)
    with open_atomic(out) as file:
        file.write(order.astype("<u4").data)
    return task.name


def compare_clusters(task: CompareTask, scale: int) -> str:
    """Run a CompareTask unless its pairs exist. Returns its name."""
    out = Path(task.folder) / f"{task.name}.pairs"
    if out.exists():
        return task.name
    count = task.stop - task.start + 1
    starts = [np.fromfile(f"{task.folder}/{n}.starts", "<u4", count, offset=4 * task.start) for n in task.assigned]
    with open_atomic(out) as pairs:
        for cluster in range(count - 1):
            members, weights = _members(task, starts, cluster)
            better = np.lexsort((members, -weights)) if task.weighted else np.arange(len(members))
            for later, earlier in _similar(task, members[better], task.memory_bytes >> (2 * scale)):
                pairs.write(np.stack([later, earlier], axis=1).astype("<u8").data)
    return task.name


def _members(task: CompareTask, starts: Sequence[NDArray[np.uint32]], cluster: int) -> tuple[Any, Any]:
    """The documents of the task's cluster of that number, by their numbers in the corpus; and their weights."""
    numbers, weights = [np.empty(0, np.int64)], [np.empty(0)]
    for split, name, bounds in zip(task.splits, task.assigned, starts):
        count = int(bounds[cluster + 1]) - int(bounds[cluster])
        if count:
            rows = np.fromfile(f"{task.folder}/{name}", "<u4", count, offset=4 * int(bounds[cluster])).astype(np.int64)
            numbers.append(rows + split.first)
            if task.weighted:
                weights.append(np.memmap(f"{split.prefix}.weight", "<f8", "r")[rows])
    return np.concatenate(numbers), np.concatenate(weights)


def _read(task: CompareTask, numbers: NDArray[np.int64]) -> Vectors:
    firsts = np.array([split.first for split in task.splits])
    owners = np.searchsorted(firsts, numbers, "right") - 1
    vectors = np.empty((len(numbers), task.width), np.int16)
    for index in np.unique(owners).tolist():
        mine = owners == index
        vectors[mine] = task.splits[index].read(numbers[mine] - firsts[index], task.width)
    return vectors


def _similar(task: CompareTask, members: NDArray[np.int64], memory_bytes: int) -> Any:
    """For blocks of a cluster's members, the best first: those that are similar to a better one, and the first such."""
    block = max(64, memory_bytes // (8 * task.width))
    for start in range(0, len(members), block):
        vectors = _read(task, members[start : start + block])
        matches = np.full(len(vectors), -1, np.int64)
        for before in range(0, start + 1, block):
            others = vectors if before == start else _read(task, members[before : before + block])
            _match(vectors, others, before == start, before, task.similarity, matches)
        later = np.flatnonzero(matches >= 0)
        yield members[start + later], members[matches[later]]


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
