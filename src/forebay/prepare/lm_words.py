"""Text to a file of word ids, and the vocabulary: the first step of training a language model.

Hides: that words are hashes until all text was read, so that it is read once; counts of rare words are forgotten when
more than about 8 x `vocab_limit` different ones are held.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from forebay.prepare.compiled import jit
from forebay.prepare.filters.spacing import spaced
from forebay.prepare.filters.words import hash_points, read_only

UNKNOWN, START, END = 0, 1, 2
_BATCH_CHARS = 1 << 20
_LONGEST_WORD = 64  # bytes; what is longer is not prose, and unknown
_DOCUMENT_BYTES = 8 << 20


def read_words(texts: Iterable[str], spill: Path, vocab_limit: int) -> tuple[list[tuple[bytes, int]], int, int]:
    """Spill the hash of each word; the vocabulary as (word, hash), the most frequent first; lines; words."""
    counts: dict[int, int] = {}
    spelled: dict[int, bytes] = {}
    lines = words = 0
    with spill.open("wb") as file:
        for batch in _batched(texts):
            _, data = spaced(pa.array(batch, pa.large_string()), _DOCUMENT_BYTES)
            room = 3 * len(data) // 2 + 3  # a line of one letter is three: the word, END, START
            hashes, starts = np.empty(room, np.uint64), np.empty(room, np.int64)
            n = _hash_words(read_only(data), hashes, starts)
            file.write(hashes[:n].data)
            unique, first, times = np.unique(hashes[:n], return_index=True, return_counts=True)
            for h, at, count in zip(unique.tolist(), starts[first].tolist(), times.tolist(), strict=True):
                if h <= END:
                    lines += count if h == END else 0
                    continue
                words += count
                counts[h] = counts.get(h, 0) + count
                if h not in spelled:
                    spelled[h] = data[at : at + _LONGEST_WORD + 1].tobytes().split(b"\n", 1)[0].split(b" ", 1)[0]
            if len(counts) > 8 * vocab_limit + 100_000:
                counts = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: 4 * vocab_limit])
                spelled = {h: spelled[h] for h in counts}
    known = ((word, h) for h, word in spelled.items() if len(word) <= _LONGEST_WORD)
    ordered = sorted(known, key=lambda item: (-counts[item[1]], item[0]))
    return ordered[:vocab_limit], lines, words


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    held: list[str] = []
    size = 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= _BATCH_CHARS:
            yield held
            held, size = [], 0
    if held:
        yield held


@jit()
def _hash_words(data, hashes, starts):  # type: ignore[no-untyped-def]
    """Hashes of the words of spaced lines, and where they start; each line ends with END, START."""
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


def number_words(spill: Path, ids: Path, vocabulary: list[tuple[bytes, int]], chunk: int) -> int:
    """The file of word ids int64, `<s>` before each line and `</s>` after it; how many are unknown."""
    known = np.array([END, START, *(h for _, h in vocabulary)], np.uint64)
    numbers = np.array([END, START, *range(3, 3 + len(vocabulary))], np.int64)
    by_hash = np.argsort(known)
    known, numbers = known[by_hash], numbers[by_hash]
    hashes = np.memmap(spill, np.uint64, "r")
    unknown = 0
    with ids.open("wb") as file:
        file.write(np.array([START], np.int64).data)
        for start in range(0, len(hashes) - 1, chunk):  # the last is the START of a line that does not come
            part = np.asarray(hashes[start : min(start + chunk, len(hashes) - 1)])
            place = np.minimum(np.searchsorted(known, part), len(known) - 1)
            found = np.where(known[place] == part, numbers[place], UNKNOWN)
            unknown += int((found == UNKNOWN).sum())
            file.write(found.data)
    return unknown
