"""From links to decisions: the connected components of documents, which one of each stays, and the files that say so.

Hides: union-find over a memory-mapped file. Each document has 8 bytes there: 0 for one without a link, else one more
than the document above it. It is sparse on disk and its pages leave memory every `_LINKS` links, so memory is bounded
by the links of a step, whatever the number of documents: 8 bytes a document on disk, none in RAM to speak of. With
weights another 8 bytes are. The better document (greater weight, then first) is always above, so that a component's
root is the one that stays and the outcome does not depend on the order of the links.
"""

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from forebay.files import atomic_write, open_atomic, temporary_path
from forebay.prepare.compiled import jit
from forebay.prepare.dedup.pairs import read_flags, reserve

KEPT, EXACT, NEAR = 0, 1, 2
_LINKS = 1 << 15
"""Links between two clearings of mapped pages: 2 documents each and the path above them, 4 KiB a page at worst."""
_CHUNK = 1 << 20
_FLAT_BYTES = 64 << 20
"""Maps smaller than this are left in memory."""

CLUSTERS = pa.schema(
    [
        ("cluster", pa.int64()),  # the kept document's number in the corpus
        ("part", pa.int32()),  # -1 - i for the i-th of `against`
        ("document", pa.int64()),  # within the part
        ("kept", pa.bool_()),
        ("near", pa.bool_()),  # dropped as a near duplicate, not as an equal of another
    ]
)


@dataclass(frozen=True)
class Settle:
    """Links to `NAME.drop`: a byte for each document of the corpus, KEPT or `code`.

    `parts`: (prefix, documents) in corpus order; the first `against` of them are other datasets' and always win. If
    `weighted`, they have `.weight` files. A document that is not its component's best becomes `code`; codes in the
    `.drop` of an earlier Settle, `base`, stay. `clusters`: write `NAME.parquet` too, and the histogram of sizes.
    """

    name: str
    folder: str
    links: tuple[str, ...]
    parts: tuple[tuple[str, int], ...]
    against: int
    weighted: bool
    code: int
    base: str = ""
    clusters: bool = False


@dataclass(frozen=True)
class Mark:
    """Links to `NAME.cut`: a byte for each of `rows` lines or paragraphs, 1 if it stood in the corpus before."""

    name: str
    folder: str
    links: tuple[str, ...]
    rows: int


class _Mapped:
    """A temporary file as an array; `relax` takes its pages out of this process's memory."""

    def __init__(self, path: Path, dtype: str, rows: int) -> None:
        with path.open("xb") as file:
            reserve(file, max(rows, 1) * np.dtype(dtype).itemsize)
        self.array: NDArray[Any] = np.memmap(path, dtype, "r+", shape=(max(rows, 1),))

    def relax(self) -> None:
        if self.array.nbytes > _FLAT_BYTES:
            self.array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


@contextmanager
def _mapped(path: Path, dtype: str, rows: int) -> Iterator[_Mapped]:
    temporary = temporary_path(path)
    try:
        yield _Mapped(temporary, dtype, rows)
    finally:
        temporary.unlink(missing_ok=True)


@jit()
def find(parent: Any, i: int) -> int:
    """The root above a document; halves the path to it."""
    while True:
        above = parent[i]
        if above == 0 or above == i + 1:
            return i
        higher = parent[above - 1]
        if higher != 0:
            parent[i] = higher
            i = higher - 1
        else:
            i = above - 1


@jit()
def join(parent: Any, weights: Any, links: Any) -> None:
    """Union the ends of links int64 [*, 2]; of two roots the one of greater weight, then the first, goes above."""
    for k in range(len(links)):
        a = find(parent, links[k, 0])
        b = find(parent, links[k, 1])
        if a == b:
            continue
        if len(weights) and weights[a] != weights[b]:
            better = a if weights[a] > weights[b] else b
        else:
            better = min(a, b)
        worse = a + b - better
        parent[worse] = better + 1
        parent[better] = better + 1


@jit()
def roots(parent: Any, members: Any, out: Any) -> None:
    """The root of each of the members."""
    for k in range(len(members)):
        out[k] = find(parent, members[k])


def settle(task: Settle, scale: int) -> str:
    """Run a Settle, or take up what it wrote: `NAME.json` is written last. Returns its name."""
    folder = Path(task.folder)
    out = folder / task.name
    if out.with_suffix(".json").exists():
        return task.name
    rows = sum(documents for _, documents in task.parts)
    step = _LINKS >> (2 * scale)
    facts: dict[str, Any] = {"documents": rows}
    with _mapped(out.with_suffix(".parent"), "<i8", rows) as parent, _weights(task, rows) as weights:
        for links in _read_links(folder, task.links, step):
            join(parent.array, weights.array if weights else np.empty(0), links)
            parent.relax()
            if weights:
                weights.relax()
        with open_atomic(out.with_suffix(".drop")) as drop:
            counts = np.zeros(3, np.int64)
            for start in range(0, rows, _CHUNK):
                codes = _codes(task, parent, start, min(start + _CHUNK, rows))
                counts += np.bincount(codes, minlength=3)
                drop.write(codes.data)
        facts["counts"] = counts.tolist()
        if task.clusters:
            facts["sizes"] = _write_clusters(task, parent, out)
    atomic_write(out.with_suffix(".json"), json.dumps(facts).encode())
    return task.name


@contextmanager
def _weights(task: Settle, rows: int) -> Iterator[_Mapped | None]:
    if not task.weighted:
        yield None
        return
    with _mapped(Path(task.folder) / f"{task.name}.weights", "<f8", rows) as weights:
        at = 0
        for index, (prefix, documents) in enumerate(task.parts):
            if index < task.against:
                weights.array[at : at + documents] = np.inf
            else:
                weights.array[at : at + documents] = np.fromfile(f"{prefix}.weight", "<f8", documents)
            at += documents
            weights.relax()
        yield weights


def _read_links(folder: Path, names: tuple[str, ...], step: int) -> Iterator[NDArray[np.int64]]:
    for name in names:
        with (folder / f"{name}.links").open("rb") as file:
            while len(links := np.fromfile(file, "<i8", 2 * step)):
                yield links.reshape(-1, 2)


def _members(parent: _Mapped, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The documents of [start, stop) that are in components, and their roots."""
    members = np.flatnonzero(parent.array[start:stop]) + start
    parent.relax()
    above = np.empty(len(members), np.int64)
    for k in range(0, len(members), _LINKS):
        roots(parent.array, members[k : k + _LINKS], above[k : k + _LINKS])
        parent.relax()
    return members, above


def _codes(task: Settle, parent: _Mapped, start: int, stop: int) -> NDArray[np.uint8]:
    if task.base:
        codes = read_flags(Path(task.folder) / f"{task.base}.drop", start, stop - start)
    else:
        codes = np.zeros(stop - start, np.uint8)
    members, above = _members(parent, start, stop)
    later = members[members != above] - start
    codes[later[codes[later] == KEPT]] = task.code
    return codes


def _write_clusters(task: Settle, parent: _Mapped, out: Path) -> list[list[int]]:
    """The clusters, by document; returns how many there are of each size."""
    starts = np.cumsum([0] + [documents for _, documents in task.parts])
    with _mapped(out.with_suffix(".sizes"), "<i8", int(starts[-1])) as sizes:
        with open_atomic(out.with_suffix(".parquet")) as file, pq.ParquetWriter(file, CLUSTERS) as writer:
            for start in range(0, int(starts[-1]), _CHUNK):
                stop = min(start + _CHUNK, int(starts[-1]))
                members, above = _members(parent, start, stop)
                for k in range(0, len(above), _LINKS):
                    np.add.at(sizes.array, above[k : k + _LINKS], 1)
                    sizes.relax()
                codes = read_flags(out.with_suffix(".drop"), start, stop - start)[members - start]
                part = np.searchsorted(starts, members, side="right") - 1
                document = members - starts[part]
                number = np.where(part < task.against, -1 - part, part - task.against)
                columns = [above, number.astype(np.int32), document, codes == KEPT, codes == NEAR]
                writer.write_table(pa.table(columns, schema=CLUSTERS))
        found: dict[int, int] = {}
        for start in range(0, int(starts[-1]), _CHUNK):
            for size, count in zip(*np.unique(sizes.array[start : start + _CHUNK], return_counts=True)):
                found[int(size)] = found.get(int(size), 0) + int(count)
            sizes.relax()
    return [[size, found[size]] for size in sorted(found) if size]


def mark(task: Mark, scale: int) -> str:
    """Run a Mark, or take up its file. Returns its name."""
    out = Path(task.folder) / f"{task.name}.cut"
    if out.exists():
        return task.name
    with open_atomic(out) as file:
        reserve(file, task.rows)
        if task.rows:
            cut = np.memmap(file.name, np.uint8, "r+", shape=(task.rows,))
            for links in _read_links(Path(task.folder), task.links, _CHUNK >> (2 * scale)):
                cut[links[:, 0]] = 1
                cut.flush()
                if cut.nbytes > _FLAT_BYTES:
                    cut._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
    return task.name
