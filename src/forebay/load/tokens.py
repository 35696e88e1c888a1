"""Batches of layout `tokens`: rows of seq_len tokens and the label of the last, with what attention masks need.

A plan has, for each row, the ranges of tokens that it consists of; padding is a range of an array of padding. With
masks it has the parts of documents, too, by a search of the document ends. No Python code runs per token or document,
except that `best_fit` packs each section once. 8 x 2048 U16 tokens to int64 take some 15 us, with masks 35 us. An open
slice with masks has 8 bytes for 64 documents in memory, with a filter 16 bytes a run of documents.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from forebay.arrays import I32, I64, Array, DType
from forebay.dataset.manifest import SliceInfo
from forebay.dataset.slices import Slice
from forebay.errors import DatasetError, UsageError
from forebay.load.batch import IGNORE_INDEX, DocumentMasks
from forebay.load.collate import BatchArrays, Collator, MappedArray, RangeCopier, copy_array
from forebay.load.packing import (
    DocumentSubset,
    PackedRows,
    check_ends,
    document_spans,
    merge_spans,
    pack_section,
    section_tokens,
)
from forebay.load.samples import SampleIndex
from forebay.maps import map_offset

_BLOCK = 64  # Document ends.
_READ_TOKENS = 1 << 19  # Copied at once, if a batch has not more.
_CACHED_RANGES = 1 << 22  # Ranges of packed sections, 12 bytes each.


@dataclass(eq=False, slots=True)
class _OpenSlice:
    key: int
    tokens: MappedArray
    padding: MappedArray  # [L + 1], of the tokens' type.
    document_ends: MappedArray | None = None
    marks: I64 | None = None  # Every _BLOCK-th document end, [M].
    # With a document filter: where each run of tokens begins in the filtered stream [R + 1], and less than there [R].
    stream_edges: I64 | None = None
    shifts: I64 | None = None
    # With packing `best_fit`: the first sample and document of each section [C + 1], and arguments of `document_spans`.
    first_samples: I64 | None = None
    first_documents: I64 | None = None
    subset: tuple[DocumentSubset | None, int, int, int] = (None, 0, 0, 0)


class _Ranges(NamedTuple):
    """Ranges of tokens of rows, int64 [G] each: of L + 1 tokens a row, or fewer with padding."""

    rows: I64
    starts: I64
    lengths: Array


class _Documents(NamedTuple):
    """The parts of documents in K rows, D in all; padding is one."""

    first: list[int]  # The first part of each row, [K + 1].
    ids: I32  # Number within the row; -1 for padding.
    edges: Array  # Where it begins in K * L positions; and their end, [D + 1]. int32 if that is enough.
    ignored: I64  # Positions without a label, except for padding.
    first_ignored: list[int]  # The first of them in each row, [K + 1].


class _Plan:
    """K rows of `width` tokens that are copied when they are read, some ahead."""

    def __init__(
        self, sources: Sequence[MappedArray], which: I64, starts: I64, lengths: I64, first_ranges: list[int],
        width: int, dtype: DType,
    ) -> None:  # fmt: skip
        types = {source.array.dtype for source in sources} or {dtype}
        if len(types) > 1:
            raise DatasetError(
                f"tokens: expected one type in all slices, got {sorted(map(str, types))} ({sources[0].path}). Prepare "
                "the dataset again."
            )
        (self._stored,) = types
        itemsize = self._stored.itemsize
        self._ranges = RangeCopier(sources, which, starts * itemsize, lengths * itemsize)
        self._first_ranges, self._width = first_ranges, width
        self._start = self._stop = 0  # The rows in the buffer.
        self._buffer = np.empty((0, width), self._stored)
        self.padded_rows: list[int] = []
        self.padded_columns: list[int] = []  # From which on labels are ignored.
        self.documents: _Documents | None = None

    def read(self, start: int, stop: int) -> Array:
        """Rows [start, stop) as they are stored, a view that is valid until the next call."""
        if not self._start <= start <= stop <= self._stop:
            batches = max(1, _READ_TOKENS // max(1, (stop - start) * self._width))
            end = min(len(self._first_ranges) - 1, start + (stop - start) * batches)
            if end - start > len(self._buffer):
                self._buffer = np.empty((end - start, self._width), self._stored)
            self._start = self._stop = start
            self._ranges.copy(self._first_ranges[start], self._first_ranges[end], self._buffer.ctypes.data)
            self._stop = end
        return self._buffer[start - self._start : stop - self._start]


class TokenCollator(Collator):
    """Inputs and labels [B, L]; without masks two views of one array [B, L + 1], so that each token is written once.

    Labels are -100 on padding, at the end of a slice and, with masks, at the ends of documents. The last label of a
    document that continues in the next sample of its slice is its next token. Without masks labels are the next tokens
    of the stream.
    """

    def __init__(
        self, indexes: Sequence[SampleIndex], *, dtype: Any = np.int64, document_masks: bool,
        pad_id: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(indexes)
        assert indexes[0].seq_len is not None
        self._seq_len = indexes[0].seq_len
        self._dtype = np.dtype(dtype)
        self._fit = indexes[0].packing == "best_fit"
        self._masks = document_masks or self._fit
        self._pad_id = pad_id
        self._padding: dict[tuple[DType, int], MappedArray] = {}
        self._packed: dict[tuple[int, int], PackedRows] = {}  # By key and section; the last used comes last.
        self._num_packed = 0  # Ranges.

    @property
    def is_plain(self) -> bool:
        """Whether samples are consecutive tokens of their slices: opening one reads its header only."""
        return not self._masks and all(index.documents is None for index in self._indexes)

    def num_open_bytes(self, key: int, row: SliceInfo, itemsize: int) -> int:
        reads_ends = self._masks or self._indexes[self._dataset(key)].documents is not None
        return row.bytes - row.count * itemsize - (0 if reads_ends else 8 * row.documents)

    def _open(self, key: int, index: SampleIndex, slice_index: int, slice_: Slice) -> tuple[int, _OpenSlice]:
        tokens, documents = MappedArray(slice_.tokens, slice_.path), index.documents
        pad_id = index.pad_id if self._pad_id is None else self._pad_id
        if (padding := (tokens.array.dtype, pad_id)) not in self._padding:
            if not 0 <= pad_id <= np.iinfo(tokens.array.dtype).max:
                raise UsageError(f"pad_id: expected a token that {tokens.array.dtype} can hold, got {pad_id}.")
            self._padding[padding] = MappedArray(np.full(self._seq_len + 1, *padding[::-1]), "")
        opened = _OpenSlice(key, tokens, self._padding[padding])
        size = num_tokens = len(tokens.array)
        if self._masks or documents is not None:
            opened.document_ends = MappedArray(slice_.document_ends, slice_.path)
            document_ends = copy_array(opened.document_ends)
            check_ends(document_ends, size)
            before, after = index.tokens_beyond[:, slice_index].tolist()
            opened.subset = documents, int(index.first_documents[slice_index]), before, after
            opened.marks = document_ends[::_BLOCK].astype(np.int64)
        if self._fit:
            first, last = index.first_sections[slice_index : slice_index + 2].tolist()
            opened.first_samples = np.append(0, np.cumsum(index.sections[first:last], dtype=np.int64))
            edges = np.arange(last - first, dtype=np.uint64) * np.uint64(section_tokens(self._seq_len))
            opened.first_documents = np.append(document_ends.searchsorted(edges, "right"), len(document_ends))
            return int(opened.first_samples[-1]), opened
        if documents is not None:
            runs = merge_spans(document_spans(document_ends, size, *opened.subset))
            opened.stream_edges = np.append(0, np.cumsum(runs.stops - runs.starts))
            opened.shifts = runs.starts - opened.stream_edges[:-1]
            num_tokens = int(opened.stream_edges[-1])
        return num_tokens // self._seq_len, opened

    def _byte_ranges(self, opened: _OpenSlice, samples: I64) -> tuple[I64, I64]:
        ranges = self._token_ranges([opened], np.zeros(len(samples), np.int64), samples)
        itemsize = opened.tokens.array.itemsize
        starts = map_offset(opened.tokens.array) + ranges.starts * itemsize
        return starts, starts + ranges.lengths * itemsize

    def _token_ranges(self, opened: list[_OpenSlice], which: I64, samples: I64) -> _Ranges:
        """The tokens of samples `samples[i]` of slices `opened[which[i]]`, by row."""
        if not self._fit and all(slice_.stream_edges is None for slice_ in opened):
            starts = samples * self._seq_len
            remaining = np.array([len(slice_.tokens.array) for slice_ in opened], np.int64)[which] - starts
            return _Ranges(np.arange(len(samples)), starts, np.minimum(self._seq_len + 1, remaining))
        by_slice, edges = np.lexsort((samples, which)), _edges_of(which, len(opened)).tolist()
        parts = [_Ranges(*np.empty((3, 0), np.int64))]
        for slice_, low, high in zip(opened, edges, edges[1:]):
            rows = by_slice[low:high]
            parts += (self._packed_ranges if self._fit else self._stream_ranges)(slice_, rows, samples[rows])
        rows, starts, lengths = (np.concatenate(columns) for columns in zip(*parts))
        order = np.argsort(
            rows.astype(np.min_scalar_type(len(samples))), kind="stable"
        )  # Small integers: a radix sort.
        return _Ranges(rows[order], starts[order], lengths[order])

    def _stream_ranges(self, opened: _OpenSlice, rows: I64, samples: I64) -> Iterator[_Ranges]:
        """Consecutive tokens of the documents that a filter leaves, for ascending `samples`."""
        edges, shifts = opened.stream_edges, opened.shifts
        if edges is None or shifts is None:  # This dataset of the mixture has no filter.
            edges, shifts = np.array([0, len(opened.tokens.array)]), np.zeros(1, np.int64)
        starts = samples * self._seq_len
        stops = np.minimum(starts + self._seq_len + 1, edges[-1])
        first = edges.searchsorted(starts, "right") - 1
        counts = edges.searchsorted(stops) - first
        runs, of = _spread(first, counts), np.repeat(np.arange(len(rows)), counts)
        starts = np.maximum(starts[of], edges[runs])
        yield _Ranges(rows[of], starts + shifts[runs], np.minimum(stops[of], edges[runs + 1]) - starts)

    def _packed_ranges(self, opened: _OpenSlice, rows: I64, samples: I64) -> Iterator[_Ranges]:
        """As `_stream_ranges`, for each section: the documents of its rows."""
        assert opened.first_samples is not None
        sections = opened.first_samples.searchsorted(samples, "right") - 1
        samples = samples - opened.first_samples[sections]
        edges = [*np.flatnonzero(np.diff(sections, prepend=-1)).tolist(), len(samples)]
        for low, high in pairwise(edges):
            packed = self._section(opened, int(sections[low]))
            first = packed.first_ranges[samples[low:high]]
            counts = packed.first_ranges[samples[low:high] + 1] - first
            ranges = _spread(first, counts)
            yield _Ranges(rows[low:high].repeat(counts), packed.starts[ranges], packed.lengths[ranges])

    def _section(self, opened: _OpenSlice, section: int) -> PackedRows:
        key = opened.key, section
        packed = self._packed.pop(key, None)
        if packed is None:
            packed = self._pack(opened, section)
            self._num_packed += len(packed.starts)
            while self._packed and self._num_packed > _CACHED_RANGES:
                self._num_packed -= len(self._packed.pop(next(iter(self._packed))).starts)
        self._packed[key] = packed
        return packed

    def _pack(self, opened: _OpenSlice, section: int) -> PackedRows:
        mapped = opened.document_ends
        assert mapped is not None and opened.first_documents is not None and opened.first_samples is not None
        low, high = opened.first_documents[section : section + 2].tolist()
        document_ends = copy_array(MappedArray(mapped.array[max(0, low - 1) : high], mapped.path))
        start = 0
        if low:
            start, document_ends = int(document_ends[0]), document_ends[1:]
        stop = int(document_ends[-1]) if len(document_ends) else start
        if section + 2 == len(opened.first_documents):
            stop = len(opened.tokens.array)
        documents, first_document, before, after = opened.subset
        spans = document_spans(document_ends, stop, documents, first_document + low, 0 if low else before, after, start)
        packed = pack_section(spans, self._seq_len)
        expected = int(opened.first_samples[section + 1] - opened.first_samples[section])
        if len(packed.first_ranges) - 1 != expected:
            raise DatasetError(
                f"{opened.tokens.path}: expected {expected} samples of section {section}, got "
                f"{len(packed.first_ranges) - 1}. The dataset changed since it was opened; verify it."
            )
        return packed

    def _plan(self, opened: list[_OpenSlice], which: I64, samples: I64) -> _Plan:
        num_rows, width = len(samples), self._seq_len + 1
        rows, starts, lengths = self._token_ranges(opened, which, samples)
        source = which[rows]
        missing = width - np.bincount(rows, lengths, num_rows).astype(np.int64)
        padded = np.flatnonzero(missing)
        first_ranges = _edges_of(rows, num_rows)
        after = first_ranges[padded + 1]
        all_lengths = np.insert(lengths, after, missing[padded])
        plan = _Plan(
            [*(slice_.tokens for slice_ in opened), *(slice_.padding for slice_ in opened)],
            np.insert(source, after, which[padded] + len(opened)), np.insert(starts, after, 0), all_lengths,
            (first_ranges + np.append(0, np.cumsum(missing > 0))).tolist(), width, self._dtype,
        )  # fmt: skip
        plan.padded_rows, plan.padded_columns = padded.tolist(), (width - 1 - missing[padded]).tolist()
        if self._masks:
            edges = np.cumsum(all_lengths) - all_lengths
            if not self._fit:
                ranges = np.arange(len(rows)) + np.cumsum(missing > 0)[rows] - (missing > 0)[rows]
                inside, of = _ends_inside(opened, source, starts, starts + lengths)
                edges = np.append(edges, (edges[ranges] - starts)[of] + inside)
                edges.sort(kind="stable")  # Merges two ascending runs.
                edges = edges[np.diff(edges, prepend=-1) > 0]  # Documents may be empty.
            plan.documents = self._documents(edges, missing)
        return plan

    def _documents(self, edges: I64, missing: I64) -> _Documents:
        """`edges`: where parts of documents begin in rows of L + 1 tokens; `missing`: tokens of padding in each row."""
        num_rows, width, size = len(missing), self._seq_len + 1, len(missing) * self._seq_len
        rows = edges // width
        continues = np.diff(rows, append=num_rows) > 0  # In the last token of its row, which is only a label.
        lengths = np.diff(edges, append=num_rows * width) - continues
        chosen = lengths > 0
        rows, starts, lengths, continues = rows[chosen], (edges - rows)[chosen], lengths[chosen], continues[chosen]
        first = _edges_of(rows, num_rows)
        ids = np.arange(len(rows)) - first[rows]
        ids[continues & (missing[rows] > 1)] = -1
        unlabelled = ~continues
        return _Documents(
            first.tolist(), ids.astype(np.int32),
            np.append(starts, size).astype(np.int32 if size < 1 << 31 else np.int64),
            (starts + lengths - 1)[unlabelled], _edges_of(rows[unlabelled], num_rows).tolist(),
        )  # fmt: skip

    def make(self, plan: _Plan, start: int, stop: int) -> BatchArrays:
        stored, documents = plan.read(start, stop), plan.documents
        if documents is None:
            rows = stored.astype(self._dtype)
            inputs, labels = rows[:, :-1], rows[:, 1:]
        else:
            inputs, labels = stored[:, :-1].astype(self._dtype), stored[:, 1:].astype(self._dtype)
        if plan.padded_rows:
            low, high = bisect_left(plan.padded_rows, start), bisect_left(plan.padded_rows, stop)
            for row, column in zip(plan.padded_rows[low:high], plan.padded_columns[low:high]):
                labels[row - start, column:] = IGNORE_INDEX
        if documents is None:
            return BatchArrays(inputs, labels, {})
        offset = start * self._seq_len
        low, high = documents.first_ignored[start], documents.first_ignored[stop]
        labels.reshape(-1)[documents.ignored[low:high] - offset] = IGNORE_INDEX
        low, high = documents.first[start], documents.first[stop]
        edges = (documents.edges[low : high + 1] - offset).astype(np.int32, copy=False)
        return BatchArrays(inputs, labels, {}, DocumentMasks(edges, documents.ids[low:high], inputs.shape))


def _ends_inside(opened: list[_OpenSlice], which: I64, starts: I64, stops: I64) -> tuple[I64, I64]:
    """Document ends inside of ranges of slices `opened[which[i]]`, not at start or stop; and of which range."""
    order = np.lexsort((starts, which))
    which, starts, stops = which[order], starts[order], stops[order]
    # The blocks of each slice from its first range to its last are copied.
    edges, blocks = _edges_of(which, len(opened)).tolist(), np.empty((len(opened), 2), np.int64)
    sources = [slice_.document_ends for slice_ in opened if slice_.document_ends is not None]
    for i, slice_ in enumerate(opened):
        assert slice_.marks is not None
        bounds = starts[edges[i]], stops[edges[i] : edges[i + 1]].max()
        blocks[i] = slice_.marks.searchsorted(bounds, "right")
    first = np.maximum(blocks[:, 0] - 1, 0) * _BLOCK
    num_ends = np.array([len(source.array) for source in sources], np.int64)
    counts = np.minimum(blocks[:, 1] * _BLOCK, num_ends) - first
    document_ends = np.empty(int(counts.sum()), np.int64)  # The stored type is uint64.
    RangeCopier(sources, np.arange(len(opened)), first * 8, counts * 8).copy(0, len(opened), document_ends.ctypes.data)
    offsets = np.arange(len(opened)) << 40  # So that the ends of all slices ascend.
    document_ends += offsets.repeat(counts)
    first = document_ends.searchsorted(starts + offsets[which], "right")
    counts = document_ends.searchsorted(stops + offsets[which]) - first
    first[order], counts[order], which[order] = first.copy(), counts.copy(), which.copy()
    inside = document_ends[_spread(first, counts)] - offsets[which].repeat(counts)
    return inside, np.arange(len(which)).repeat(counts)


def _edges_of(groups: I64, num_groups: int) -> I64:
    """Where each group begins if items are sorted by their groups, and where the last ends: [num_groups + 1]."""
    return np.append(0, np.cumsum(np.bincount(groups, minlength=num_groups)))


def _spread(first: I64, counts: I64) -> I64:
    """The numbers first[i], first[i] + 1, ..., `counts[i]` of them, one range after another."""
    stops = np.cumsum(counts)
    return np.repeat(first - (stops - counts), counts) + np.arange(int(stops[-1]) if len(stops) else 0)
