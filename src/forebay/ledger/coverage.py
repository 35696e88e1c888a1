"""Coverage of an epoch: which samples were used, are missing or were used twice, and its Merkle root.

The Merkle tree has one leaf per slice: which of its samples were used and which were set aside. Leaves name the job, so
that a root is valid for one job only. Counting uses sorted arrays, without a loop over uses.

The tree is that of RFC 6962 (section 2.1): leaves are hashed with a 0 byte in front, nodes with a 1 byte, so that
neither can be mistaken for the other; the left half of n leaves has the largest power of two below n. An inclusion
proof has at most log2(n) hashes: 18 for 250 000 leaves. A root of so many costs about 0.4 s.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Ranges: TypeAlias = Sequence[tuple[int, int]]  # Intervals [start, stop), rising, none touching the next.

_NONE = np.empty(0, np.int64)


def count_coverage(starts: I64, stops: I64, num_samples: int) -> dict[str, int]:
    """Count how non-empty intervals [start, stop), in any order, cover [0, num_samples).

    `samples`: the sum of the lengths; `missing`: points that no interval covers; `repeated`: uses of a point after its
    first. Cost: one sort, O(N log N).
    """
    total = int((stops - starts).sum())
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    covered = int(np.maximum(stops - np.maximum(starts, _reached(stops)), 0).sum())
    return {"samples": total, "missing": num_samples - covered, "repeated": total - covered}


def _reached(stops: I64) -> I64:
    """For intervals sorted by start: the largest stop of all intervals before each."""
    return np.maximum.accumulate(np.concatenate([[0], stops]).astype(np.int64))[:-1]


@dataclass(frozen=True, eq=False)
class Coverage:
    """The uses of an epoch's samples."""

    samples: I64  # int64 [S], of each slice.
    counts: dict[str, int]  # samples (repeated uses included), missing, repeated; set_aside if any.
    missing: I64  # (slice, start, stop): neither used nor set aside. int64 [M, 3].
    repeated: I64  # (slice, start, stop, which use): used before by another. int64 [R, 4].
    used: Mapping[int, Ranges]  # By slice: used samples.
    aside: Mapping[int, Ranges]  # By slice: set aside and not used.

    def leaf(self, job_id: str, epoch: int, index: int, first: int = 0) -> bytes:
        """The leaf of a slice; slices are numbered from `first` on."""
        used, aside = self.used.get(index, ()), self.aside.get(index, ())
        return coverage_leaf(job_id, epoch, first + index, int(self.samples[index]), used, aside)

    def leaves(self, job_id: str, epoch: int, first: int = 0) -> list[bytes]:
        """The leaves of all slices."""
        return [self.leaf(job_id, epoch, index, first) for index in range(len(self.samples))]


def cover(samples: I64, slices: I64, starts: I64, stops: I64, aside: Iterable[tuple[int, int, int]] = ()) -> Coverage:
    """The coverage of slices with `samples` [S] by non-empty uses [N] in any order.

    `aside` has (slice, start, stop), in any order. All must lie within their slices.
    """
    base = np.concatenate([[0], np.cumsum(samples)]).astype(np.int64)
    total = int(base[-1])
    order = np.argsort(base[slices] + starts, kind="stable")
    low, high = (base[slices] + starts)[order], (base[slices] + stops)[order]
    counts = count_coverage(low, high, total)
    reached = _reached(high)
    again = np.flatnonzero(low < reached)
    twice_stops = np.minimum(high[again], reached[again])
    twice = slices[order[again]]
    repeated = np.stack([twice, low[again] - base[twice], twice_stops - base[twice], order[again]], axis=1)
    used = _merged(low, high, base)
    left = np.array(list(aside), np.int64).reshape(-1, 3)
    set_aside = _merged(base[left[:, 0]] + left[:, 1], base[left[:, 0]] + left[:, 2], base)
    either = _merged(np.concatenate([used[0], set_aside[0]]), np.concatenate([used[1], set_aside[1]]), base)
    missing = _gaps(either, base)
    # Samples that were set aside and used count as used.
    others = [np.concatenate(pair) for pair in zip(used, missing)]
    aside_only = _gaps(_merged(others[0], others[1], base), base)
    counts["missing"] = int((missing[1] - missing[0]).sum())
    if len(aside_only[0]):
        counts["set_aside"] = int((aside_only[1] - aside_only[0]).sum())
    return Coverage(samples, counts, _rows(missing, base), repeated, _by_slice(used, base), _by_slice(aside_only, base))


def _merged(starts: I64, stops: I64, base: I64) -> tuple[I64, I64]:
    """The union of intervals, cut at the ends of slices."""
    if not len(starts):
        return _NONE, _NONE
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    edge = base[np.searchsorted(base, starts, "right") - 1] == starts
    first = (starts > _reached(stops)) | (edge & (starts >= _reached(stops)))
    first[0] = True
    first_rows = np.flatnonzero(first)
    return starts[first_rows], np.maximum.reduceat(stops, first_rows)


def _gaps(covered: tuple[I64, I64], base: I64) -> tuple[I64, I64]:
    """The samples outside of intervals, cut at the ends of slices."""
    starts, stops = np.concatenate([[0], covered[1]]), np.concatenate([covered[0], base[-1:]])
    some = np.flatnonzero(starts < stops)
    starts, stops = starts[some], stops[some]
    inside = np.unique(base)
    low, high = np.searchsorted(inside, starts, "right"), np.searchsorted(inside, stops, "left")
    num = np.maximum(high - low, 0)
    which = np.repeat(np.arange(len(starts)), num)
    cuts = inside[np.arange(int(num.sum())) - np.repeat(np.cumsum(num) - num, num) + low[which]]
    return np.sort(np.concatenate([starts, cuts])).astype(np.int64), np.sort(np.concatenate([stops, cuts])).astype(
        np.int64
    )


def _rows(ranges: tuple[I64, I64], base: I64) -> I64:
    """(slice, start, stop) of intervals that were cut at the ends of slices."""
    of = np.searchsorted(base, ranges[0], "right") - 1
    return np.stack([of, ranges[0] - base[of], ranges[1] - base[of]], axis=1).astype(np.int64)


def _by_slice(ranges: tuple[I64, I64], base: I64) -> dict[int, Ranges]:
    by_slice: dict[int, list[tuple[int, int]]] = {}
    for index, start, stop in _rows(ranges, base).tolist():
        by_slice.setdefault(index, []).append((start, stop))
    return {index: tuple(ranges) for index, ranges in by_slice.items()}


def coverage_leaf(job_id: str, epoch: int, slice_index: int, samples: int, used: Ranges, aside: Ranges = ()) -> bytes:
    """The bytes of a leaf: `forebay coverage 2 JOB EPOCH SLICE SAMPLES 0-8,9-10 8-9`."""
    ranges = [",".join(f"{start}-{stop}" for start, stop in part) or "none" for part in (used, aside)]
    return f"forebay coverage 2 {job_id} {epoch} {slice_index} {samples} {ranges[0]} {ranges[1]}".encode()


def coverage_root(
    job_id: str, epoch: int, samples: I64, aside: Mapping[int, Ranges] | None = None, first: int = 0
) -> str:
    """The root, in hex, of an epoch in which all samples were used but those set aside: for its `epoch` entry.

    Args:
        samples: int64 [S], of each slice.
        aside: By slice (from 0), ranges set aside and not used, rising.
        first: Number of the first slice, in a job of several datasets.
    """
    aside = aside or {}
    leaves = []
    for index, count in enumerate(samples.tolist()):
        removed = aside.get(index, ())
        edges = [0, *(edge for part in removed for edge in part), count]
        used = [(a, b) for a, b in zip(edges[::2], edges[1::2]) if a < b]
        leaves.append(coverage_leaf(job_id, epoch, first + index, count, used, removed))
    return merkle_root(leaves).hex()


def leaf_hash(leaf: bytes) -> bytes:
    """The hash of one leaf; 32 bytes."""
    return hashlib.sha256(b"\x00" + leaf).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """The root over leaves in this order; without leaves, the hash of no bytes."""
    level = [leaf_hash(leaf) for leaf in leaves]
    while len(level) > 1:
        level = _above(level)
    return level[0] if level else hashlib.sha256().digest()


def merkle_path(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """The inclusion proof of leaf `index`: the hashes of its siblings, from the leaves up."""
    if not 0 <= index < len(leaves):
        raise IndexError(f"leaf: expected one of {len(leaves)}, got {index}")
    level, path = [leaf_hash(leaf) for leaf in leaves], []
    while len(level) > 1:
        sibling = index ^ 1
        if sibling < len(level):
            path.append(level[sibling])
        level, index = _above(level), index >> 1
    return path


def root_of_path(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes | None:
    """The root that an inclusion proof gives; None if its length is wrong for leaf `index` of `size`."""
    if not 0 <= index < size:
        return None
    digest, rest, last = leaf_hash(leaf), list(path), size - 1
    while last > 0:
        if index ^ 1 <= last:  # Otherwise it has no sibling and moves up unchanged.
            if not rest:
                return None
            sibling = rest.pop(0)
            digest = _node(sibling, digest) if index & 1 else _node(digest, sibling)
        index, last = index >> 1, last >> 1
    return digest if not rest else None


def _above(level: list[bytes]) -> list[bytes]:
    """The next level. A last node without a sibling moves up unchanged, which gives the RFC's tree."""
    nodes = [_node(left, right) for left, right in zip(level[::2], level[1::2])]
    return nodes + level[-1:] if len(level) % 2 else nodes
