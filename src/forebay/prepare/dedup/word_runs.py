"""Runs of words that stood in earlier documents: in most of a paragraph (`overlap`), or wherever they begin
(`substring`). Both are exact, without a Bloom filter and without a suffix array.

`overlap` is DCLM's rule. What a shared Bloom filter holds depends on who writes to it first. Here the n-grams of each
document, once each and ascending, are signatures that are sorted like any other, so that an n-gram is marked if, and
only if, an earlier document has it. Paragraphs are lines.

`substring`: a word is in a repeated run of `min_words` words or more if a window of `min_words` words over it occurs
elsewhere. All windows are 16 bytes a word, so a first pass finds those that can: winnowing chooses of each the
(min_words / 2)-gram of the smallest hash, its anchor, and equal windows have equal anchors. Anchors (one in 13 words, 8
bytes) are sorted like any signature; then only windows whose anchor occurs twice are hashed, to 128 bits, and sorted.

Source: Li et al. 2024 (DCLM), 4.2 and appendix L: Bloom filter fuzzy deduplication; Lee et al. 2021 (exact substrings);
Schleimer et al. 2003 (winnowing).
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.arrays import I64, U8, U64
from forebay.prepare.compiled import jit
from forebay.prepare.dedup.kernels import character_table, hash_ngrams, locate_words, mix, read_words
from forebay.prepare.dedup.methods import Overlap, Substring
from forebay.prepare.documents import part_batches, text_buffers
from forebay.prepare.filters.points import copy, find, room_of
from forebay.storage.store import Store

_U0, _U1 = np.uint64(0), np.uint64(1)


def sign_ngrams(texts: pa.LargeStringArray, rule: Overlap) -> tuple[U64, I64]:
    """The n-grams of each text uint64 [*], ascending, each once, and their number int64 [rows]."""
    return _signed(_sign_ngrams, texts, rule.ngram)


def mark_overlap(texts: pa.LargeStringArray, rule: Overlap, seen: U8, removed: U8) -> int:
    """Set `removed`, a byte for each of the texts', in paragraphs and texts of which `rule.share` is `seen`.

    `seen` has an entry for each row of `sign_ngrams`. Returns how many rows there are.
    """
    offsets, data = text_buffers(texts)
    settings = (rule.ngram, rule.share)
    return int(_mark_overlap(data, offsets, character_table("words"), *settings, seen, removed))


@jit()
def _unique(hashes):  # type: ignore[no-untyped-def]
    """The hashes ascending, each once."""
    ascending = np.sort(hashes)
    n = 0
    for j in range(len(ascending)):
        if n == 0 or ascending[j] != ascending[n - 1]:
            ascending[n] = ascending[j]
            n += 1
    return ascending[:n]


@jit()
def _text_ngrams(data, i, stop, table, ngram):  # type: ignore[no-untyped-def]
    """The n-grams of each line, in order; where each line ends, and how many it has."""
    capacity, max_lines = (stop - i) // 2 + 4, 1 + np.count_nonzero(data[i:stop] == 10)
    words, hashes, out = np.empty(capacity, np.uint64), np.empty(capacity, np.uint64), np.empty(capacity, np.uint64)
    line_ends, counts = np.empty(max_lines, np.int64), np.empty(max_lines, np.int64)
    lines = n = 0
    while i < stop:
        line_end = find(data, i, stop, 10)
        _, have = read_words(data, i, line_end, table, words, 0)
        before = n
        for j in range(hash_ngrams(words, have, ngram, hashes)):
            out[n] = max(hashes[j], _U1)
            n += 1
        i = min(line_end + 1, stop)
        line_ends[lines], counts[lines] = i, n - before
        lines += 1
    return out[:n], line_ends[:lines], counts[:lines]


@jit()
def _sign_ngrams(data, offsets, table, ngram, out, counts):  # type: ignore[no-untyped-def]
    n = 0
    for d in range(len(offsets) - 1):
        hashes, _, _ = _text_ngrams(data, offsets[d], offsets[d + 1], table, ngram)
        rows = _unique(hashes)
        n, counts[d] = copy(rows, 0, len(rows), out, n), len(rows)
    return n


@jit()
def _mark_overlap(data, offsets, table, ngram, share, seen, removed):  # type: ignore[no-untyped-def]
    row = 0
    for d in range(len(offsets) - 1):
        begin = offsets[d]
        hashes, line_ends, counts = _text_ngrams(data, begin, offsets[d + 1], table, ngram)
        rows = _unique(hashes)
        if row + len(rows) > len(seen):
            return len(seen) + 1
        j = in_text = 0
        for k in range(len(line_ends)):
            in_line = 0
            for _ in range(counts[k]):
                in_line += seen[row + np.searchsorted(rows, hashes[j])]
                j += 1
            in_text += in_line
            if counts[k] and in_line >= share * counts[k]:
                removed[begin - offsets[0] : line_ends[k] - offsets[0]] = 1
            begin = line_ends[k]
        if len(hashes) and in_text >= share * len(hashes):
            removed[offsets[d] - offsets[0] : offsets[d + 1] - offsets[0]] = 1
        row += len(rows)
    return row


_BASE = np.uint64(0xD6E8FEB86659FD93)


def sign_anchors(texts: pa.LargeStringArray, rule: Substring) -> tuple[U64, I64]:
    """The anchors of each text uint64 [*], in order, and their number int64 [rows]."""
    return _signed(_sign_anchors, texts, rule.min_words)


def _signed(kernel: Any, texts: pa.LargeStringArray, *settings: int) -> tuple[U64, I64]:
    offsets, data = text_buffers(texts)
    out = np.empty(int(offsets[-1] - offsets[0]) // 2 + len(texts), np.uint64)
    counts = np.empty(len(texts), np.int64)
    n = kernel(data, offsets, character_table("words"), *settings, out, counts)
    return out[:n], counts


@jit()
def find_anchors(hashes, count, width, queue, anchors, anchor_of):  # type: ignore[no-untyped-def]
    """The smallest of each `width` hashes in turn, the last of several, once: into `anchors`; how many.

    `anchor_of[w]` is the number of that of window w; `queue` has room for `count`.
    """
    head = tail = n = 0
    last = -1
    for j in range(count):
        while tail > head and hashes[queue[tail - 1]] >= hashes[j]:
            tail -= 1
        queue[tail] = j
        tail += 1
        if queue[head] <= j - width:
            head += 1
        if j >= width - 1:
            if queue[head] != last:
                last = queue[head]
                anchors[n] = max(hashes[last], _U1)
                n += 1
            anchor_of[j - width + 1] = n - 1
    return n


@jit()
def _sign_anchors(data, offsets, table, min_words, out, counts):  # type: ignore[no-untyped-def]
    # Room for the words of the longest text: a letter and a gap each, or a character of two bytes and more.
    capacity = room_of(offsets, offsets[1:]) // 2 + 3
    words, hashes = np.empty(capacity, np.uint64), np.empty(capacity, np.uint64)
    queue, anchor_of = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
    ngram = min_words // 2
    n = 0
    for d in range(len(offsets) - 1):
        _, have = read_words(data, offsets[d], offsets[d + 1], table, words, 0)
        counts[d] = 0
        if have >= min_words:
            count = hash_ngrams(words, have, ngram, hashes)
            counts[d] = find_anchors(hashes, count, min_words - ngram + 1, queue, out[n:], anchor_of)
            n += counts[d]
    return n


@jit()
def _hash_windows(data, i, stop, table, min_words, repeated, out, spans):  # type: ignore[no-untyped-def]
    """The windows of a text whose anchor is `repeated`: hashes uint64 [*, 2], and bytes [start, stop) of the text that
    go if the window is cut; how many windows, and how many anchors the text has."""
    capacity = (stop - i) // 2 + 4
    words, hashes = np.empty(capacity, np.uint64), np.empty(capacity, np.uint64)
    starts, stops = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    _, have = read_words(data, i, stop, table, words, 0)
    if have < min_words:
        return 0, 0
    queue, anchor_of = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
    ngram = min_words // 2
    anchors = np.empty(capacity, np.uint64)
    num_anchors = find_anchors(
        hashes, hash_ngrams(words, have, ngram, hashes), min_words - ngram + 1, queue, anchors, anchor_of
    )
    found_any = False
    for a in range(num_anchors):
        found_any = found_any or repeated[a] != 0
    if not found_any:
        return 0, num_anchors
    locate_words(data, i, stop, table, starts, stops)
    windows = hash_ngrams(words, have, min_words, hashes)
    for j in range(have):
        words[j] = mix(words[j])
    others = anchors
    hash_ngrams(words, have, min_words, others, _BASE)
    n = 0
    for w in range(windows):
        if not repeated[anchor_of[w]]:
            continue
        first = w
        for distance in range(1, min(min_words, w + 1)):  # A copy that it overlaps keeps its own words.
            if hashes[w - distance] == hashes[w] and others[w - distance] == others[w]:
                first = w + min_words - distance
                break
        limit = starts[w + min_words] if w + min_words < have else stop
        end = find(data, stops[w + min_words - 1], limit, 10)
        out[n] = max(hashes[w], _U1), others[w]
        spans[n] = starts[first] - i, end - i
        n += 1
    return n, num_anchors


@jit()
def mark_spans(offsets, counts, spans, cut, removed):  # type: ignore[no-untyped-def]
    """Set `removed`, a byte for each of the texts', where a span lies that `cut` marks."""
    row = 0
    for d in range(len(counts)):
        for _ in range(counts[d]):
            if cut[row]:
                start = offsets[d] - offsets[0]
                removed[start + spans[row, 0] : start + spans[row, 1]] = 1
            row += 1


@dataclass(frozen=True)
class WindowsTask:
    """The windows of a split that may be repeated: `NAME.windows` u64 [*, 2], `NAME.spans` u32 [*, 2], `NAME.counts`
    u32 [documents].

    Args:
        prefix: Of the split's documents and signatures.
        anchors, start: The file that marks repeated anchors, and where the split's begin.
        drop, document: A file with a byte a document, and where the split's begin: others than 0 have no windows.
    """

    name: str
    store: Store
    prefix: str
    anchors: str
    start: int
    drop: str
    document: int
    documents: int
    min_words: int


def sign_windows(task: WindowsTask, scale: int) -> int:
    """Run a WindowsTask. Returns the number of windows."""
    store = task.store
    drop = store.read_array(task.drop, np.uint8, task.documents, task.document)
    counts = store.read_array(f"{task.prefix}.anchor_counts", "<u4")
    repeated: Any = store.read_array(task.anchors, np.uint8, int(counts.sum()), task.start)
    anchor = rows = 0
    with ExitStack() as stack:
        files = {e: stack.enter_context(store.open(f"{task.name}.{e}")) for e in ("windows", "spans", "counts")}
        for start, batch in part_batches(store, f"{task.prefix}.arrow", ["text"]):
            offsets, data = text_buffers(batch.column("text"))
            sizes = np.zeros(len(batch), "<u4")
            for row in range(len(batch)):
                count = int(counts[start + row])
                marks = repeated[anchor : anchor + count]
                anchor += count
                if drop[start + row] or not marks.any():
                    continue
                size = int(offsets[row + 1] - offsets[row]) // 2 + 4
                hashes, spans = np.empty((size, 2), "<u8"), np.empty((size, 2), "<u4")
                stop = int(offsets[row + 1])
                n, _ = _hash_windows(
                    data, int(offsets[row]), stop, character_table("words"), task.min_words, marks, hashes, spans
                )
                files["windows"].write(hashes[:n].data)
                files["spans"].write(spans[:n].data)
                sizes[row] = n
                rows += n
            files["counts"].write(sizes.data)
    return rows
