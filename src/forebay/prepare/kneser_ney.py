"""Trains an n-gram language model of text: interpolated modified Kneser-Ney, written as ARPA.

What is larger than the vocabulary is in files: an n-gram is numbered by (number of its first n - 1 words, last word),
so that a key fits 64 bits for any order, and the n-grams of an order are sorted in runs and merged. Memory: `CHUNK` x
100 bytes, and 400 bytes x `vocab_limit`; disk: 8 x (`order` + 1) bytes a word of text and about 70 bytes an n-gram.
Source: Chen and Goodman 1998, section 4.1; Heafield et al. 2013 for adjusted counts, discounts and the unknown word.
"""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from forebay.arrays import BOOL, F64, I64, Array
from forebay.errors import PrepareError
from forebay.files import open_atomic, remove_stale, temporary_directory
from forebay.formats.records import batched
from forebay.prepare.compiled import jit
from forebay.prepare.filters.perplexity import spaced
from forebay.prepare.filters.points import hash_points

UNKNOWN, START, END = 0, 1, 2
CHUNK = 1 << 21  # Words held in memory at once.
_BATCH_CHARS = 1 << 20
_LONGEST_WORD = 64  # bytes; what is longer is not prose, and unknown
_DOCUMENT_BYTES = 8 << 20


def read_words(texts: Iterable[str], spill: Path, vocab_limit: int) -> tuple[list[tuple[bytes, int]], int, int]:
    """Spill the hash of each word; the vocabulary as (word, hash), the most frequent first; lines; words."""
    counts: dict[int, int] = {}
    spelled: dict[int, bytes] = {}
    lines = words = 0
    with spill.open("wb") as file:
        for batch in batched(texts, len, _BATCH_CHARS, _BATCH_CHARS):
            _, data = spaced(pa.array(batch, pa.large_string()), _DOCUMENT_BYTES)
            capacity = 3 * len(data) // 2 + 3  # a line of one letter is three: the word, END, START
            hashes, starts = np.empty(capacity, np.uint64), np.empty(capacity, np.int64)
            n = _hash_words(data, hashes, starts)
            file.write(hashes[:n].data)
            unique, first, times = np.unique(hashes[:n], return_index=True, return_counts=True)
            for h, positions, count in zip(unique.tolist(), starts[first].tolist(), times.tolist()):
                if h <= END:
                    lines += count if h == END else 0
                    continue
                words += count
                counts[h] = counts.get(h, 0) + count
                if h not in spelled:
                    spelled[h] = (
                        data[positions : positions + _LONGEST_WORD + 1].tobytes().split(b"\n", 1)[0].split(b" ", 1)[0]
                    )
            if len(counts) > 8 * vocab_limit + 100_000:
                counts = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: 4 * vocab_limit])
                spelled = {h: spelled[h] for h in counts}
    short = ((word, h) for h, word in spelled.items() if len(word) <= _LONGEST_WORD)
    ordered = sorted(short, key=lambda item: (-counts[item[1]], item[0]))
    return ordered[:vocab_limit], lines, words


@jit()
def _hash_words(data, hashes, starts):  # type: ignore[no-untyped-def]
    n = start = 0
    for i in range(len(data)):
        if data[i] != 32 and data[i] != 10:
            continue
        hashes[n], starts[n] = hash_points(data, start, i), start
        n += 1
        start = i + 1
        if data[i] == 10:
            hashes[n], hashes[n + 1] = 2, 1
            starts[n] = starts[n + 1] = i
            n += 2
    return n


def number_words(spill: Path, ids: Path, vocabulary: list[tuple[bytes, int]]) -> int:
    """The file of word ids int64, `<s>` before each line and `</s>` after it; how many are unknown."""
    short = np.array([END, START, *(h for _, h in vocabulary)], np.uint64)
    numbers = np.array([END, START, *range(3, 3 + len(vocabulary))], np.int64)
    by_hash = np.argsort(short)
    short, numbers = short[by_hash], numbers[by_hash]
    hashes = np.memmap(spill, np.uint64, "r")
    unknown = 0
    with ids.open("wb") as file:
        file.write(np.array([START], np.int64).data)
        for start in range(0, len(hashes) - 1, CHUNK):  # the last is the START of a line that does not come
            part = np.asarray(hashes[start : min(start + CHUNK, len(hashes) - 1)])
            index = np.minimum(np.searchsorted(short, part), len(short) - 1)
            numbers_ = np.where(short[index] == part, numbers[index], UNKNOWN)
            unknown += int((numbers_ == UNKNOWN).sum())
            file.write(numbers_.data)
    return unknown


_WORD_BITS = 21
_WORD_MASK = (1 << _WORD_BITS) - 1
_FALLBACK = (0.5, 1.0, 1.5)  # discounts where the counts of counts give none, as lmplz --discount_fallback


@dataclass(frozen=True)
class LmSummary:
    """What was trained: `lines` and `words` (without the ends of lines) were read, `ngrams` written, by order.

    `vocabulary`: words that the model knows, without `<unk>`, `<s>` and `</s>`; `unknown_share`: of the words read,
    those that became `<unk>`.
    """

    order: int
    lines: int
    words: int
    vocabulary: int
    unknown_share: float
    ngrams: tuple[int, ...]


def train_lm(texts: Iterable[str], out: Path, *, order: int = 3, vocab_limit: int = 500_000) -> LmSummary:
    """Train on texts, read once, and write an ARPA file that KenLM and the filter `perplexity` read.

    The same texts give the same bytes. The file appears when it is complete.

    Args:
        texts: Documents; each line is a sentence.
        order: 2 to 8, or fewer if no line has so many words; KenLM as it is usually built reads 2 to 6.
        vocab_limit: The most frequent words are known, up to this; the others are `<unk>`. At most 2 000 000.
    """
    remove_stale(out.parent)
    with temporary_directory(out) as work:
        vocabulary, lines, total = read_words(texts, work / "hashes", vocab_limit)
        if lines == 0:
            raise PrepareError("lm: expected text, got no word in it. Give other inputs.")
        unknown = number_words(work / "hashes", work / "rank1", vocabulary)
        levels = _levels(work, order, len(vocabulary) + 3)
        order = len(levels)
        for n in range(1, order + 1):
            _estimate(work, levels, n)
        words = ["<unk>", "<s>", "</s>", *(word.decode() for word, _ in vocabulary)]
        ngrams = _write(out, levels, words)
    share = unknown / max(total, 1)
    return LmSummary(order, lines, total, len(vocabulary), share, ngrams)


@dataclass
class _Level:
    """The n-grams of one order, by number; arrays are files in memory's clothes.

    `keys` is number of the first n - 1 words << 21 | last word; for order 1 the number is the word.
    """

    order: int
    keys: I64
    counts: I64
    suffix: I64  # number of the last n - 1 words in the order below
    at_start: BOOL  # whether it begins with <s>
    adjusted: I64
    probability: F64
    backoff: F64


def _levels(work: Path, order: int, words: int) -> list[_Level]:
    numbers, counts = np.arange(words), np.full(words, 1 << 62, np.int64)
    none, adjusted = np.zeros(0, np.int64), np.zeros(words, np.int64)
    levels = [_Level(1, numbers, counts, none, numbers == START, adjusted, np.zeros(words), np.ones(words))]
    for n in range(2, order + 1):
        level = _count(work, n, levels[-1], n < order)
        if level is None:  # the last order counts in another way: again, with the one before as the last
            return _levels(work, n - 1, words)
        levels.append(level)
    return levels


def _parts(array: I64) -> Iterator[tuple[int, I64]]:
    for start in range(0, len(array), CHUNK):
        yield start, np.asarray(array[start : start + CHUNK])


def _count(work: Path, n: int, below: _Level, number: bool) -> _Level | None:
    """The n-grams of order n, None if there are none; with `number`, also the file of their numbers by place."""
    ids, ranks = np.memmap(work / "rank1", np.int64, "r"), np.memmap(work / f"rank{n - 1}", np.int64, "r")
    runs: list[tuple[Path, int]] = []
    for start in range(1, len(ids), CHUNK):
        keys = _keys(ids, ranks, start)
        unique, times = np.unique(keys[keys >= 0], return_counts=True)
        runs.append((work / f"run{n}.{len(runs)}", len(unique)))
        with runs[-1][0].open("wb") as file:
            file.write(np.stack([unique, times], 1).data)
    size = _merge(runs, work / f"keys{n}", work / f"counts{n}")
    if not size:
        return None

    def array(name: str, dtype: type = np.int64, mode: Literal["r", "w+"] = "w+") -> Array:
        return np.memmap(work / f"{name}{n}", dtype, mode, shape=(size,))

    keys, counts = array("keys", mode="r"), array("counts", mode="r")
    suffixes, at_start, adjusted = array("suffix"), array("start", np.bool_), array("adjusted")
    probability, backoff = array("probability", np.float64), array("backoff", np.float64)
    level = _Level(n, keys, counts, suffixes, at_start, adjusted, probability, backoff)
    level.backoff[:] = 1
    for start, keys in _parts(level.keys):
        prefix, word = keys >> _WORD_BITS, keys & _WORD_MASK
        suffix = word if n == 2 else _find(below.keys, below.suffix[prefix] << _WORD_BITS | word)
        level.suffix[start : start + CHUNK] = suffix
        level.at_start[start : start + CHUNK] = below.at_start[prefix]
        np.add.at(below.adjusted, suffix, 1)
    for start, counts in _parts(below.counts) if n > 2 else ():
        begins = np.asarray(below.at_start[start : start + CHUNK])
        below.adjusted[start : start + CHUNK][begins] = counts[begins]
    if number:
        with (work / f"rank{n}").open("wb") as file:
            file.write(np.array([-1], np.int64).data)
            for start in range(1, len(ids), CHUNK):
                keys = _keys(ids, ranks, start)
                numbers_ = np.full(len(keys), -1, np.int64)
                numbers_[keys >= 0] = _find(level.keys, keys[keys >= 0])
                file.write(numbers_.data)
    else:
        level.adjusted[:] = level.counts
    return level


def _keys(ids: I64, ranks: I64, start: int) -> I64:
    """Keys of the n-grams that end in [start, start + CHUNK); -1 where none does."""
    stop = min(start + CHUNK, len(ids))
    word, prefix = np.asarray(ids[start:stop]), np.asarray(ranks[start - 1 : stop - 1])
    return np.where((word == START) | (prefix < 0), -1, prefix << _WORD_BITS | word)


def _find(keys: I64, needed: I64) -> I64:
    unique, inverse = np.unique(needed, return_inverse=True)
    numbers_: I64 = np.searchsorted(keys, unique)[inverse]
    return numbers_


def _merge(runs: list[tuple[Path, int]], keys: Path, counts: Path) -> int:
    maps = [np.memmap(path, np.int64, "r", shape=(size, 2)) for path, size in runs if size]
    positions = [0] * len(maps)
    block = max(1024, 2 * CHUNK // max(len(maps), 1))
    written = 0
    with keys.open("wb") as key_file, counts.open("wb") as count_file:
        while any(a < len(m) for a, m in zip(positions, maps)):
            blocks = [np.asarray(m[a : a + block]) for a, m in zip(positions, maps)]
            open_ends = [b[-1, 0] for a, m, b in zip(positions, maps, blocks) if a + block < len(m)]
            limit = min(open_ends) if open_ends else np.iinfo(np.int64).max
            takes = [int(np.searchsorted(b[:, 0], limit, "right")) for b in blocks]
            part = np.concatenate([b[:take] for b, take in zip(blocks, takes)])
            unique, inverse = np.unique(part[:, 0], return_inverse=True)
            total = np.zeros(len(unique), np.int64)
            np.add.at(total, inverse, part[:, 1])
            key_file.write(unique.data)
            count_file.write(total.data)
            written += len(unique)
            positions = [a + take for a, take in zip(positions, takes)]
    for path, _ in runs:
        path.unlink()
    return written


def _discounts(adjusted: I64) -> tuple[float, ...]:
    t = np.zeros(5)
    for _, part in _parts(adjusted):
        t += np.bincount(np.minimum(part, 5), minlength=6)[:5]
    if (t[1:4] == 0).any():
        return _FALLBACK
    y = t[1] / (t[1] + 2 * t[2])
    numbers_ = tuple(float(k - (k + 1) * y * t[k + 1] / t[k]) for k in (1, 2, 3))
    if not all(0 < d <= k for k, d in enumerate(numbers_, 1)):
        return _FALLBACK
    return numbers_


def _estimate(work: Path, levels: list[_Level], n: int) -> None:
    level = levels[n - 1]
    steps = np.array([0.0, *_discounts(level.adjusted)])
    if n == 1:
        counts = level.adjusted
        taken = steps[np.minimum(counts, 3)]
        total = counts.sum()
        level.probability[:] = (counts - taken) / total + taken.sum() / total / (len(counts) - 1)
        return
    below = levels[n - 2]
    totals = np.memmap(work / f"total{n}", np.float64, "w+", shape=below.keys.shape)
    spare = np.memmap(work / f"spare{n}", np.float64, "w+", shape=below.keys.shape)
    for start, keys in _parts(level.keys):
        part = slice(start, start + len(keys))
        counts = np.asarray(level.adjusted[part])
        np.add.at(totals, keys >> _WORD_BITS, counts)
        np.add.at(spare, keys >> _WORD_BITS, steps[np.minimum(counts, 3)])
    for start in range(0, len(totals), CHUNK):
        part = slice(start, start + CHUNK)
        seen = totals[part] > 0
        below.backoff[part][seen] = spare[part][seen] / totals[part][seen]
    for start, keys in _parts(level.keys):
        part = slice(start, start + len(keys))
        counts, prefix = np.asarray(level.adjusted[part]), keys >> _WORD_BITS
        direct = (counts - steps[np.minimum(counts, 3)]) / totals[prefix]
        level.probability[part] = direct + below.backoff[prefix] * below.probability[level.suffix[part]]


def _write(out: Path, levels: list[_Level], words: list[str]) -> tuple[int, ...]:
    sizes = tuple(len(level.counts) for level in levels)
    with open_atomic(out) as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="\n") as file:
        file.write("\\data\\\n" + "".join(f"ngram {n}={size}\n" for n, size in enumerate(sizes, 1)))
        for level in levels:
            file.write(f"\n\\{level.order}-grams:\n")
            for start in range(0, len(level.counts), step := min(CHUNK, 1 << 17)):
                numbers = np.arange(start, min(start + step, len(level.counts)))
                file.writelines(_lines(levels, level, numbers, words))
        file.write("\n\\end\\\n")
    return sizes


def _lines(levels: list[_Level], level: _Level, numbers: I64, words: list[str]) -> Iterator[str]:
    columns = []
    current = numbers
    for upper in reversed(levels[1 : level.order]):
        keys = upper.keys[current]
        columns.append((keys & _WORD_MASK).tolist())
        current = keys >> _WORD_BITS
    columns.append(current.tolist())
    logs = np.log10(np.maximum(level.probability[numbers], 1e-99))
    if level.order == 1:
        logs[numbers == START] = -99
    grams = (" ".join(words[word] for word in gram) for gram in zip(*reversed(columns)))
    if level.order == len(levels):
        return (f"{p:.7g}\t{gram}\n" for p, gram in zip(logs.tolist(), grams))
    backoffs = np.log10(np.maximum(level.backoff[numbers], 1e-99)).tolist()
    return (f"{p:.7g}\t{gram}\t{b:.7g}\n" for p, gram, b in zip(logs.tolist(), grams, backoffs))
