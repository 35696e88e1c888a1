"""Cuts repeated lines and spans out of documents, and drops those of which most is cut.

Units of documents that are compared and cut out by themselves: lines, and spans of sentences.

The second occurrence of a line in a document is compared with second occurrences elsewhere, and so on: a refrain stays.

A document has a row for each unit, or for each `span` units in turn, of `min_characters` or more. Hashing and cutting
walk the same rows. What is cut is first marked, a byte a byte of text, so that several kinds of unit may overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from forebay.arrays import I64, U8, U32, U64
from forebay.errors import PrepareError
from forebay.prepare.compiled import jit
from forebay.prepare.dedup.kernels import character_table, hash128, normalise, scratch_for
from forebay.prepare.dedup.methods import CutMethod, Overlap, Substring, Unit
from forebay.prepare.dedup.pairs import RETAINED
from forebay.prepare.dedup.word_runs import mark_overlap, mark_spans
from forebay.prepare.documents import part_batches, read_items, text_buffers, text_column
from forebay.prepare.filters.points import find
from forebay.storage.store import Store

LINE, SENTENCE = 0, 1
REPEAT = np.uint64(0x9E3779B97F4A7C15)
_KINDS = {"line": LINE, "sentence": SENTENCE}
_STOPS = {"line": (10,), "sentence": (10, 33, 46, 63, 0xE3, 0xEF)}
"""Bytes one of which every end of a unit has."""


def hash_units(texts: pa.LargeStringArray, unit: Unit) -> tuple[U64, I64]:
    """128 bits of each row as uint64 [*, 2], and the rows of each document, int64 [documents]."""
    offsets, data = text_buffers(texts)
    used = data[offsets[0] : offsets[-1]]
    rows = len(texts) + sum(int(np.count_nonzero(used == byte)) for byte in _STOPS[unit.kind])
    hashes, counts = np.empty((rows, 2), np.uint64), np.empty(len(texts), np.int64)
    n = _hash_units(data, offsets, *_settings(unit), scratch_for(offsets), hashes, counts)
    if unit.kind == "line":
        _number_repeats(hashes[:n], counts)
    return hashes[:n], counts


def _number_repeats(hashes: U64, counts: I64) -> None:
    """Change the hash of a line's second, third … occurrence in a document, which then equals that of others alone."""
    documents = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((hashes[:, 0], documents))
    lines = np.column_stack((documents[order].astype(np.uint64), hashes[order]))
    first = np.r_[True, (lines[1:] != lines[:-1]).any(1)][: len(lines)]
    position = np.arange(len(lines))
    hashes[order, 1] ^= (position - np.maximum.accumulate(np.where(first, position, 0))).astype(np.uint64) * REPEAT


def mark_units(texts: pa.LargeStringArray, unit: Unit, cut: U8, removed: U8) -> int:
    """Set `removed`, a byte for each of the texts', where a row is that `cut` marks; how many rows there are.

    `cut` has an entry for each row that `hash_units` hashed. Missing ones count as 0.
    """
    offsets, data = text_buffers(texts)
    return int(_mark_units(data, offsets, *_settings(unit), scratch_for(offsets), cut, removed))


def remove(texts: pa.LargeStringArray, removed: U8) -> tuple[I64, U8]:
    """Offsets and bytes of the texts without those that are marked.

    A document that lost something also loses the line feeds at its end, and all that is left if that is white space.
    """
    offsets, data = text_buffers(texts)
    out, out_offsets = np.empty(len(removed), np.uint8), np.empty(len(offsets), np.int64)
    _copy(data, offsets, removed, out, out_offsets)
    return out_offsets, out[: out_offsets[-1]]


def _settings(unit: Unit) -> tuple[int, int, U32, int]:
    return _KINDS[unit.kind], unit.span, character_table(unit.normalise), unit.min_characters


@jit()
def _closing(data, i, stop):  # type: ignore[no-untyped-def]
    """Where the quotation marks and brackets end that close a sentence, from i on."""
    while i < stop:
        byte = data[i]
        if byte == 33 or byte == 34 or byte == 39 or byte == 41 or byte == 46 or byte == 63 or byte == 93:
            i += 1
        elif byte == 0xE2 and i + 2 < stop and data[i + 1] == 0x80 and (data[i + 2] == 0x99 or data[i + 2] == 0x9D):
            i += 3
        elif byte == 0xC2 and i + 1 < stop and data[i + 1] == 0xBB:
            i += 2
        elif byte == 0xE3 and i + 2 < stop and data[i + 1] == 0x80 and (data[i + 2] == 0x8D or data[i + 2] == 0x8F):
            i += 3
        else:
            break
    return i


@jit()
def next_unit(data, i, stop, kind):  # type: ignore[no-untyped-def]
    """Where the unit that begins at i ends, and where the next one begins.

    A line ends at a line feed; a sentence too, or after `.`, `!`, `?` before white space, or after `。`, `！`, `？`.
    """
    if kind == LINE:
        end = find(data, i, stop, 10)
        return end, min(end + 1, stop)
    while i < stop:
        byte = data[i]
        if byte == 10:
            return i, i + 1
        i += 1
        wide = False
        if (byte == 0xE3 or byte == 0xEF) and i + 1 < stop:
            second, third = data[i], data[i + 1]
            wide = (byte == 0xE3 and second == 0x80 and third == 0x82) or (
                byte == 0xEF and second == 0xBC and (third == 0x81 or third == 0x9F)
            )
        if wide or byte == 46 or byte == 33 or byte == 63:
            end = _closing(data, i + 2 if wide else i, stop)
            if end == stop or wide or data[end] == 32 or 9 <= data[end] <= 13:
                i = end
                while i < stop and (data[i] == 32 or data[i] == 9):
                    i += 1
                return end, i
    return stop, stop


@jit()
def _hash_units(data, offsets, kind, span, table, min_characters, scratch, out, counts):  # type: ignore[no-untyped-def]
    rows = 0
    ring = np.empty((span, 2), np.uint64)
    lengths = np.empty(span, np.int64)
    joined = np.empty(16 * span, np.uint8)
    for d in range(len(offsets) - 1):
        i, stop = offsets[d], offsets[d + 1]
        counts[d] = 0
        seen = 0
        while i < stop:
            unit_end, after = next_unit(data, i, stop, kind)
            n, characters = normalise(data, i, unit_end, table, scratch)
            i = after
            if characters == 0 or (span == 1 and characters < min_characters):
                continue
            if span == 1:
                out[rows] = hash128(scratch, n)
                rows += 1
                counts[d] += 1
                continue
            slot = seen % span
            ring[slot] = hash128(scratch, n)
            lengths[slot] = characters
            seen += 1
            if seen < span or lengths.sum() < min_characters:
                continue
            for k in range(span):
                for j in range(16):
                    word = ring[(seen + k) % span, j >> 3]
                    joined[16 * k + j] = (word >> np.uint64(8 * (j & 7))) & np.uint64(255)
            out[rows] = hash128(joined, 16 * span)
            rows += 1
            counts[d] += 1
    return rows


@jit()
def _mark_units(data, offsets, kind, span, table, min_characters, scratch, cut, removed):  # type: ignore[no-untyped-def]
    rows = 0
    begins = np.empty(span, np.int64)
    lengths = np.empty(span, np.int64)
    for d in range(len(offsets) - 1):
        i, stop = offsets[d], offsets[d + 1]
        seen = 0
        while i < stop:
            unit_end, after = next_unit(data, i, stop, kind)
            characters = normalise(data, i, unit_end, table, scratch)[1]
            begin, i = i, after
            if characters == 0:
                continue
            begins[seen % span], lengths[seen % span] = begin, characters
            seen += 1
            if seen < span or lengths.sum() < min_characters:
                continue
            if rows < len(cut) and cut[rows]:
                removed[begins[seen % span] - offsets[0] : after - offsets[0]] = 1
            rows += 1
    return rows


@jit()
def _copy(data, offsets, removed, out, out_offsets):  # type: ignore[no-untyped-def]
    n = 0
    for d in range(len(offsets) - 1):
        out_offsets[d] = n
        for i in range(offsets[d], offsets[d + 1]):
            if removed[i - offsets[0]] == 0:
                out[n] = data[i]
                n += 1
        if n - out_offsets[d] < offsets[d + 1] - offsets[d]:
            while n > out_offsets[d] and out[n - 1] == 10:
                n -= 1
            last = n
            while last > out_offsets[d] and (out[last - 1] == 32 or 9 <= out[last - 1] <= 13):
                last -= 1
            if last == out_offsets[d]:
                n = last
    out_offsets[len(offsets) - 1] = n


@dataclass(frozen=True)
class Flags:
    """A byte for each of `count` documents (or rows of a unit) of a split, from byte `start` of an object."""

    store: Store
    name: str
    start: int
    count: int

    def load(self, start: int = 0, count: int | None = None) -> U8:
        """uint8 [count]: those of the split from `start` on, by default all."""
        return read_items(self.store, self.name, np.uint8, self.count if count is None else count, self.start + start)


@dataclass(frozen=True)
class Cut:
    """What to cut out of a split: flags of the rows of `method`; of Substring those of windows in `PREFIX.*`."""

    flags: Flags
    method: CutMethod
    prefix: str


@dataclass
class Cutter:
    """Cuts marked lines and spans out of a split's texts, given in the order in which they were signed. Picklable.

    `cuts` is `DedupResult.cut` of the split. Documents that are dropped are given too: drop them after this.
    """

    cuts: Sequence[Cut]

    def cut(self, texts: pa.LargeStringArray, first_row: int) -> pa.LargeStringArray:
        """The texts of the split's rows from `first_row` without what is marked; one that is empty then is ""."""
        if first_row == 0:
            self._used, self._documents = [0] * len(self.cuts), 0
        offsets, _ = text_buffers(texts)
        removed = np.zeros(int(offsets[-1] - offsets[0]), np.uint8)
        for k, cut in enumerate(self.cuts):
            rows = self._mark(cut, texts, self._used[k], removed)
            self._used[k] += rows
            if self._used[k] > cut.flags.count:
                raise PrepareError(
                    f"{cut.flags.name}: expected the {cut.flags.count} rows that were signed, got more. "
                    "The documents have changed since: run the task that signed them again."
                )
        self._documents += len(texts)
        return text_column(*remove(texts, removed)) if removed.any() else texts

    def _mark(self, cut: Cut, texts: pa.LargeStringArray, used: int, removed: U8) -> int:
        remaining = max(cut.flags.count - used, 0)
        if not isinstance(cut.method, Substring):
            # A text of n bytes has at most n rows.
            flags = cut.flags.load(used, min(remaining, len(removed)))
            if isinstance(cut.method, Overlap):
                return mark_overlap(texts, cut.method, flags, removed)
            return mark_units(texts, cut.method, flags, removed)
        store = cut.flags.store
        counts = store.read_array(f"{cut.prefix}.counts", "<u4", len(texts), self._documents)
        rows = int(counts.sum())
        flags = cut.flags.load(used, min(remaining, rows))
        spans = store.read_array(f"{cut.prefix}.spans", "<u4", 2 * rows, 2 * used).astype(np.int64).reshape(-1, 2)
        if len(counts) == len(texts) and len(flags) == len(spans) == rows:
            mark_spans(text_buffers(texts)[0], counts, spans, flags, removed)
            return rows
        return remaining + 1


@dataclass(frozen=True)
class ShareTask:
    """`NAME`: the drop codes of a split's documents; `code` where more than `max_share` is cut, or all."""

    name: str
    prefix: str
    cuts: tuple[Cut, ...]
    drop: Flags
    max_share: float
    code: int


def drop_mostly_cut(task: ShareTask, scale: int) -> list[int]:
    """Run a ShareTask. Returns the documents of each code."""
    codes, store = task.drop.load(), task.drop.store
    cutter = Cutter(task.cuts)
    for start, batch in part_batches(store, f"{task.prefix}.arrow", ["text"]):
        texts = batch.column("text")
        sizes = (np.diff(text_buffers(column)[0]) for column in (texts, cutter.cut(texts, start)))
        before, after = sizes
        here = codes[start : start + len(batch)]
        mostly = (before - after > task.max_share * before) | ((after == 0) & (before > 0))
        here[(here == RETAINED) & mostly] = task.code
    store.write(task.name, codes.tobytes())
    return [int(count) for count in np.bincount(codes, minlength=task.code + 1)]
