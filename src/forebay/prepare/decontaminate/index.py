"""The index of evaluation sets: every n-gram of their instances, sorted, in one file that all processes map.

An instance is a record of a set: each of its fields with text is a unit, and so are all of them together, in order. The
file lies in the user's cache, named by a hash of the sets (for a file its size, time and inode, for the hub its commit)
and of the settings, and its bytes depend on the sets' contents and the settings alone. Building takes about 40 bytes of
memory an n-gram, mapping it none of its own. One word of a Bloom filter answers for 98 % of the n-grams that are not in
the index, a binary search for the others.
"""

import hashlib
import json
import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike

from forebay.arrays import I64, U8, U32, U64
from forebay.errors import PrepareError
from forebay.files import atomic_write
from forebay.formats.inputs import ReadOptions
from forebay.formats.records import Record
from forebay.machine import user_cache
from forebay.prepare.compiled import jit
from forebay.prepare.dedup.kernels import character_table, hash_ngrams, read_words
from forebay.prepare.documents import text_buffers
from forebay.prepare.inputs import InputFiles, find_inputs, read_split, split_files
from forebay.prepare.sources import describe_position
from forebay.prepare.tasks.keys import hash_json, source_key

VERSION = 1  # Changed when the same sets would give another index.
MAX_NGRAMS = 100_000_000
SHOWN_CHARACTERS = 200  # Of an instance.
_MAGIC = b"forebay evaluation index\n"
_ALIGNMENT = 64
_DTYPES = ("<u8", "<u8", "<i8", "<u4", "<u4", "<u4", "<u4", "<u4", "<u8", "u1")  # Of an index's arrays.


@dataclass(frozen=True)
class SetCount:
    """A set in an index: its instances, those of fewer words than an n-gram has, and the n-grams of all."""

    name: str
    instances: int
    too_short: int
    ngrams: int


class EvaluationIndex(NamedTuple):
    """A mapped index. N-gram `keys[k]` stands in units `units[starts[k]:starts[k + 1]]` from word `positions[…]` on."""

    sets: list[SetCount]
    keys: U64
    bits: U64
    starts: I64
    units: U32
    positions: U32
    unit_instances: U32
    unit_words: U32
    instance_sets: U32
    text_ends: U64
    texts: U8

    def instance(self, number: int) -> tuple[str, str]:
        """The id of an instance, and the beginning of its text."""
        start, middle, stop = (int(self.text_ends[2 * number + k - 1]) if 2 * number + k else 0 for k in range(3))
        return bytes(self.texts[start:middle]).decode(), bytes(self.texts[middle:stop]).decode()


def set_names(sets: Sequence[str]) -> tuple[str, ...]:
    """What the report calls each set: the name of its file or folder, or of the hub's dataset."""
    names = []
    for entry in sets:
        short = entry.partition("://")[2].removeprefix("datasets/") if "://" in entry else Path(entry).name
        short = short if "://" in entry or Path(entry).is_dir() else short.partition(".")[0] or short
        names.append(entry if short in names or not short else short)
    return tuple(names)


@dataclass(frozen=True)
class SetFiles:
    """The files of the sets as they were found, which name the index."""

    sets: tuple[str, ...]
    files: tuple[InputFiles, ...]
    options: ReadOptions
    ngram: int

    @classmethod
    def find(cls, sets: tuple[str, ...], options: ReadOptions, ngram: int) -> "SetFiles":
        listed = tuple(_list_set(entry, options) for entry in sets)
        for skipped in (item for files in listed for item in files.skipped if item.status == "failed"):
            raise PrepareError(f"{skipped.path}: expected a file of an evaluation set, got {skipped.reason}.")
        return cls(sets, listed, options, ngram)

    @property
    def path(self) -> Path:
        """Where the index lies or will lie."""
        sources = [[source_key(file) for file in files.files] for files in self.files]
        fields = [VERSION, set_names(self.sets), sources, self.options.changed, self.ngram]
        return user_cache() / "evaluation" / hash_json(fields)

    def build(self) -> Path:
        """Write the index unless it exists. Returns its path."""
        if not (path := self.path).exists():
            builder = _Builder(self.ngram)
            for entry, name, files in zip(self.sets, set_names(self.sets), self.files):
                if not builder.add_set(name, self._records(files)):
                    raise PrepareError(f"{entry}: expected instances of an evaluation set, got none. Check the file.")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(path, builder.chunks())
            except OSError as error:
                raise PrepareError(f"{path}: cannot write the index of evaluation sets: {error.strerror}.") from error
        return path

    def _records(self, files: InputFiles) -> Iterator[tuple[str, Record]]:
        for split in split_files(files.files, self.options):
            for record in read_split(split, self.options):
                if record.problem == "blank":
                    continue
                position = describe_position(split, record.index, record.location)
                problem = record.problem or ("" if record.text else "expected text, got none")
                if problem:
                    raise PrepareError(
                        f"{position}: cannot read an instance of an evaluation set: {problem.rstrip('.')}. Fix "
                        "the file, or name its fields in decontaminate.fields."
                    )
                yield record.id or Path(position).name, record


def _list_set(entry: str, options: ReadOptions) -> InputFiles:
    try:
        return find_inputs([entry], options, workers=1)
    except OSError as error:
        raise PrepareError(f"{entry}: cannot read the evaluation set: {str(error).rstrip('.')}.") from error


@lru_cache(maxsize=4)
def open_index(path: str) -> EvaluationIndex:
    """The index in a file; a process maps it once."""
    try:
        with Path(path).open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if not data[: len(_MAGIC)] == _MAGIC:
            raise ValueError("another kind of file")
        end = data.find(b"\n", len(_MAGIC))
        header = json.loads(data[len(_MAGIC) : end])
        views = [
            np.frombuffer(data, dtype, count, _aligned(end + 1) + offset)
            for dtype, (offset, count) in zip(_DTYPES, header["arrays"], strict=True)
        ]
        return EvaluationIndex([SetCount(*row) for row in header["sets"]], *views)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PrepareError(f"{path}: expected an index of evaluation sets, got {error}. Remove the file.") from error


class _Builder:
    def __init__(self, ngram: int) -> None:
        self._ngram = ngram
        self._hashes: list[U64] = []
        self._units: list[tuple[int, int]] = []  # instance and words
        self._instances: list[tuple[int, bytes, bytes]] = []  # set, id and text
        self._sets: list[SetCount] = []
        self._seen: set[bytes] = set()
        self._num_ngrams = 0

    def add_set(self, name: str, records: Iterator[tuple[str, Record]]) -> int:
        """Returns its number of instances."""
        first, before, too_short = len(self._instances), self._num_ngrams, 0
        for id, record in records:
            fields = record.fields or (record.text,)
            units = [*fields, " ".join(fields)] if len(fields) > 1 else fields
            self._instances.append(
                (
                    len(self._sets),
                    id.encode("utf-8", "replace"),
                    record.text[:SHOWN_CHARACTERS].encode("utf-8", "replace"),
                )
            )
            too_short += not sum([self._add_unit(unit) for unit in units])
        count = len(self._instances) - first
        self._sets.append(SetCount(name, count, too_short, self._num_ngrams - before))
        return count

    def _add_unit(self, text: str) -> bool:
        """Whether the text is long enough; one that was added before is not added again."""
        data = expand_ligatures(pa.array([text.encode("utf-8", "replace").decode()], pa.large_string()))
        offsets, buffer = text_buffers(data)
        words = np.empty(len(buffer) + 2, np.uint64)
        _, have = read_words(buffer, int(offsets[0]), int(offsets[1]), character_table("words"), words, 0)
        if have < self._ngram:
            return False
        digest = hashlib.blake2b(words[:have].tobytes(), digest_size=16).digest()
        if digest in self._seen:
            return True
        self._seen.add(digest)
        hashes = np.empty(have, np.uint64)
        count = hash_ngrams(words, have, self._ngram, hashes)
        self._hashes.append(hashes[:count])
        self._units.append((len(self._instances) - 1, have))
        self._num_ngrams += count
        if self._num_ngrams > MAX_NGRAMS:
            raise PrepareError(
                f"decontaminate: expected evaluation sets of at most {MAX_NGRAMS:,} n-grams, got more. Divide "
                "them over several [[decontaminate]] tables."
            )
        return True

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The file."""
        hashes = np.concatenate([np.empty(0, np.uint64), *self._hashes])
        lengths = np.array([len(some) for some in self._hashes], np.int64)
        self._hashes.clear()
        order = np.argsort(hashes, kind="stable")
        keys, firsts = np.unique(hashes[order], return_index=True)
        units = np.repeat(np.arange(len(lengths), dtype=np.uint32), lengths)
        positions = np.arange(len(hashes)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        bits = np.zeros(1 << max(0, math.ceil(math.log2(max(len(firsts), 4) / 4))), np.uint64)
        fill_bits(keys, bits)
        pieces = [piece for _, *texts in self._instances for piece in texts]
        arrays: list[ArrayLike] = [
            keys, bits, np.append(firsts, len(hashes)), units[order], positions[order], [i for i, _ in self._units],
            [words for _, words in self._units], [number for number, *_ in self._instances],
            list(accumulate(map(len, pieces))), np.frombuffer(b"".join(pieces), np.uint8),
        ]  # fmt: skip
        ready = [np.ascontiguousarray(array, dtype) for array, dtype in zip(arrays, _DTYPES)]
        stops = list(accumulate(_aligned(array.nbytes) for array in ready))
        places = [(stop - _aligned(array.nbytes), len(array)) for stop, array in zip(stops, ready)]
        sets = [list(vars(count).values()) for count in self._sets]
        header = _MAGIC + json.dumps({"sets": sets, "arrays": places}).encode() + b"\n"
        yield header.ljust(_aligned(len(header)), b"\0")
        for array in ready:
            yield array.data.cast("B") if array.nbytes else b""
            yield bytes(_aligned(array.nbytes) - array.nbytes)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


_LIGATURES = dict(zip("ﬀﬁﬂﬃﬄﬅﬆ", ("ff", "fi", "fl", "ffi", "ffl", "st", "st")))


def expand_ligatures(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """The texts with `ﬁ` as `fi`: the one compatibility form of several letters that PDFs are full of."""
    data: Any = texts.buffers()[2]
    if data is None or b"\xef\xac" not in memoryview(data).tobytes():
        return texts
    for ligature, letters in _LIGATURES.items():
        texts = pa.compute.replace_substring(texts, ligature, letters)
    return texts


_BLOCK = 2048
_U1, _SIX, _LOW = np.uint64(1), np.uint64(6), np.uint64(63)


@jit(forceinline=True)
def _may_have(h, bits):  # type: ignore[no-untyped-def]
    word = bits[(h >> np.uint64(24)) & np.uint64(len(bits) - 1)]
    return (word >> (h & _LOW)) & (word >> ((h >> _SIX) & _LOW)) & _U1


@jit()
def fill_bits(keys, bits):  # type: ignore[no-untyped-def]
    """Set two bits for each key, both in one word of `bits` uint64 [a power of two]."""
    for h in keys:
        slot = (h >> np.uint64(24)) & np.uint64(len(bits) - 1)
        bits[slot] |= (_U1 << (h & _LOW)) | (_U1 << ((h >> _SIX) & _LOW))


@jit()
def find(keys, h):  # type: ignore[no-untyped-def]
    """The place of a hash in sorted keys, or -1."""
    index = np.searchsorted(keys, h)
    return index if index < len(keys) and keys[index] == h else -1


@jit()
def flag_rows(data, offsets, table, ngram, bits, keys, flags):  # type: ignore[no-untyped-def]
    """Set `flags` bool [rows] of the rows with an n-gram that is one of the sorted `keys`."""
    words = np.empty(_BLOCK + 2, np.uint64)
    hashes = np.empty(_BLOCK + 2, np.uint64)
    for d in range(len(offsets) - 1):
        i, stop = offsets[d], offsets[d + 1]
        have = 0
        while i < stop and not flags[d]:
            i, have = read_words(data, i, stop, table, words, have)
            for j in range(hash_ngrams(words, have, ngram, hashes)):
                if _may_have(hashes[j], bits) and find(keys, hashes[j]) >= 0:
                    flags[d] = True
                    break
            if have >= ngram:
                for j in range(ngram - 1):
                    words[j] = words[have - ngram + 1 + j]
                have = ngram - 1


@jit()
def find_ngrams(hashes, count, bits, keys, out):  # type: ignore[no-untyped-def]
    """The place in `keys` of each of the first `count` hashes, or -1, into `out` int64."""
    for j in range(count):
        out[j] = find(keys, hashes[j]) if _may_have(hashes[j], bits) else -1
