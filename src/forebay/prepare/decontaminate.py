"""The stage `decontaminate`: drops or cuts documents that hold instances of evaluation sets.

Two rules. `overlap`: of one field of an instance, or of all together, at least `min_ratio` of the words stand in
n-grams that the document has too. `ngram`: one n-gram is enough. Cost: one rolling hash a word, 60 to 120 MB/s a core,
and some 0.2 ms for each document that shares an n-gram.

The index of evaluation sets: every n-gram of their instances, sorted, in one file that all processes map.

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
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike
from pydantic import Field

from forebay.arrays import I64, U8, U32, U64
from forebay.base import Json
from forebay.errors import PrepareError, PrintableUrl, UsageError
from forebay.files import atomic_write
from forebay.formats.inputs import ALL_FIELDS, ReadOptions
from forebay.formats.records import Record
from forebay.machine import user_cache
from forebay.prepare.clean.spans import replace_rows
from forebay.prepare.compiled import jit
from forebay.prepare.dedup.kernels import character_table, hash_ngrams, locate_words, read_words
from forebay.prepare.documents import Stage, StageResult, keep_all, replace_column, text_buffers
from forebay.prepare.inputs import InputFiles, find_inputs, read_split, split_files
from forebay.prepare.settings import Share, Texts, check_fields
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
                    raise PrepareError(
                        f"{entry}: expected instances of an evaluation set of {self.ngram} words or more, got none. "
                        "Check the file, or set decontaminate.ngram."
                    )
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
        """Return how many instances are looked for."""
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
        return count - too_short

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


_NGRAMS = {"overlap": 8, "ngram": 13}
_SHOWN_CHARACTERS = 300  # Of a matched n-gram.


@dataclass(frozen=True)
class Decontaminate(Stage):
    """Drop documents that hold instances of evaluation sets, or cut these out. `contamination.jsonl` lists each.

    Args:
        sets: Files and folders of any format that is read as text, and hub names (`hf://datasets/NAME:test`). A record
            is an instance.
        fields: Whose texts are looked for; empty: every field with text but the id and the URL. Lists and objects count
            with all their texts.
        method: `overlap`: a document is contaminated if it shares n-grams that cover `min_ratio` of the words of a
            field, or of all fields of an instance together. `ngram`: if it shares one n-gram.
        ngram: Words of an n-gram, after case, punctuation and accents are removed; 0: 8 for `overlap`, 13 for `ngram`.
            A field with fewer words is not looked for; the report counts instances that have none.
        min_ratio: Of `overlap`.
        action: `drop` the document; or `cut` the n-grams, and 200 characters on both sides. A piece of fewer characters
            goes too, and a document that would be left in more than 10 pieces, or in none.

    Source: overlap as in Tülu 3 (Lambert et al. 2024), 3.2: 8-grams, half of an instance's tokens. ngram, and cut, as
    in GPT-3 (Brown et al. 2020), appendix C: 13-grams, 200 characters, 10 pieces.
    """

    name = "decontaminate"
    version = 2
    required = ("sets", "files, folders or hub names of evaluation sets")
    sets: Texts = ()
    fields: Texts = ()
    method: Literal["overlap", "ngram"] = "overlap"
    ngram: Annotated[int, Field(ge=0, le=256)] = 0
    min_ratio: Share = 0.5
    action: Literal["drop", "cut"] = "drop"
    margin: int = field(default=200, init=False)
    max_pieces: int = field(default=10, init=False)

    def __post_init__(self) -> None:
        check_fields(self)
        vars(self)["sets"] = tuple(map(PrintableUrl, self.sets))
        for entry in self.sets:
            if "://" not in entry and not Path(entry).exists():
                raise UsageError(
                    f"sets: expected files, folders or hub names, got {entry!r}, which does not exist. Check the path."
                )

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(f"contaminated_{name}" for name in set_names(self.sets))

    @property
    def ngram_words(self) -> int:
        return self.ngram or _NGRAMS[self.method]

    def files(self) -> tuple[str, ...]:
        """The files of the sets, and the index, which is built here."""
        listed: tuple[str, ...] = getattr(self, "_files", ())
        if listed and any("://" in entry for entry in self.sets):
            return listed  # without asking the hub again
        files = self._find()
        path = str(files.build())
        local = (file.path for source in files.files for file in source.files if "://" not in file.path)
        # Kept beside the fields, so that workers map this index and do not look for the sets again.
        object.__setattr__(self, "_index_path", path)
        object.__setattr__(self, "_files", listed := (*local, path))
        return listed

    def _find(self) -> SetFiles:
        options = ReadOptions(text_key=self.fields or (ALL_FIELDS,))
        return SetFiles.find(self.sets, options, self.ngram_words)

    def index(self) -> EvaluationIndex:
        """The index of the sets; built where it is missing, as on another machine."""
        path = getattr(self, "_index_path", "")
        if not path or not Path(path).exists():
            built = str(self._find().build())
            if path and Path(built).name != Path(path).name:
                raise PrepareError(
                    f"decontaminate: expected the evaluation sets that the run began with, {Path(path).name}, got "
                    f"{Path(built).name}. They have changed: start the run again."
                )
            object.__setattr__(self, "_index_path", path := built)
        return open_index(path)

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        """Counts `cut` documents; `hits` has an entry for each document and set."""
        index = self.index()
        column = expand_ligatures(batch.column("text"))
        offsets, data = text_buffers(column)
        flags, drop = np.zeros(len(batch), bool), keep_all(len(batch))
        flag_rows(data, offsets, character_table("words"), self.ngram_words, index.bits, index.keys, flags)
        hits: list[tuple[int, Json]] = []
        changed: dict[int, str] = {}
        for row in np.flatnonzero(flags).tolist():
            document = _Document(data[offsets[row] : offsets[row + 1]], index, self.ngram_words)
            units = document.units(self.min_ratio if self.method == "overlap" else 0.0)
            if not len(units):
                continue
            matches = list(document.hits(units))
            text = batch.column("text")[row].as_py().encode()
            pieces = document.pieces(text, units, self.margin) if self.action == "cut" else []
            if 0 < len(pieces) <= self.max_pieces:
                changed[row] = "\n\n".join(pieces)
            else:
                drop[row] = matches[0][0]
            hits += [(row, {**hit, "action": "cut" if row in changed else "dropped"}) for _, hit in matches]
        if changed:
            batch = replace_column(batch, "text", replace_rows(batch.column("text"), changed))
        return StageResult(batch, drop, {"cut": len(changed)}, hits=hits)


class _Document:
    """What a document that shares an n-gram with an index shares."""

    def __init__(self, data: U8, index: EvaluationIndex, ngram: int) -> None:
        self._data, self._index, self._ngram = data, index, ngram
        table, size = character_table("words"), len(data)
        words, hashes = np.empty(size + 2, np.uint64), np.empty(size + 2, np.uint64)
        _, have = read_words(data, 0, size, table, words, 0)
        count = hash_ngrams(words, have, ngram, hashes)
        indices = np.empty(count, np.int64)
        find_ngrams(hashes, count, index.bits, index.keys, indices)
        self._places = np.flatnonzero(indices >= 0)  # The first word of each shared n-gram.
        self._keys = indices[self._places]
        self._starts, self._stops = np.empty(have, np.int64), np.empty(have, np.int64)
        locate_words(data, 0, size, table, self._starts, self._stops)
        keys, first = np.unique(self._keys, return_index=True)
        starts = index.starts[keys]
        counts = index.starts[keys + 1] - starts
        entries = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        order = np.lexsort((index.positions[entries], index.units[entries]))
        entries = entries[order]
        self._units, self._positions = index.units[entries], index.positions[entries].astype(np.int64)
        self._entry_keys = np.repeat(keys, counts)[order]
        self._entry_places = np.repeat(self._places[first], counts)[order]

    def units(self, min_ratio: float) -> I64:
        """The units of which at least that share of the words is in shared n-grams; rows of (unit, first entry,
        entries, covered words)."""
        new = np.ones(len(self._units), bool)
        new[1:] = self._units[1:] != self._units[:-1]
        firsts = np.flatnonzero(new)
        covered = np.full(len(self._units), self._ngram)
        covered[:-1] = np.where(new[1:], self._ngram, np.minimum(np.diff(self._positions), self._ngram))
        sums, units = np.add.reduceat(covered, firsts), self._units[firsts].astype(np.int64)
        rows = np.stack([units, firsts, np.diff(np.append(firsts, len(new))), sums], axis=1)
        chosen: I64 = rows[sums >= min_ratio * self._index.unit_words[units]]
        return chosen

    def hits(self, units: I64) -> Iterator[tuple[int, Json]]:
        """The number of each set that the document has instances of, in order, and what the list says about it."""
        index = self._index
        instances = index.unit_instances[units[:, 0]]
        sets = index.instance_sets[instances]
        ratios = units[:, 3] / index.unit_words[units[:, 0]]
        for number in np.unique(sets).tolist():
            here = np.flatnonzero(sets == number)
            best = here[np.lexsort((here, -units[here, 3], -ratios[here]))[0]]
            _, first, count, _ = units[best].tolist()
            word = int(self._entry_places[first : first + count].min())
            text = bytes(self._data[self._starts[word] : self._stops[word + self._ngram - 1]]).decode()
            id, instance = index.instance(int(instances[best]))
            yield number, {
                "set": index.sets[number].name, "instance": id, "instances": len(np.unique(instances[here])),
                "ratio": round(float(ratios[best]), 4), "ngrams": count, "ngram": text[:_SHOWN_CHARACTERS],
                "text": instance,
            }  # fmt: skip

    def pieces(self, text: bytes, units: I64, margin: int) -> list[str]:
        """The text without the n-grams of these units and `margin` characters around them; short pieces left out."""
        # A ligature of two letters is a byte longer than these.
        longer = np.array([match.start() for match in re.finditer(rb"\xef\xac[\x80-\x82\x85\x86]", text)], np.int64)
        longer -= np.arange(len(longer))
        chosen = np.concatenate([np.arange(first, first + count) for _, first, count, _ in units.tolist()])
        places = self._places[np.isin(self._keys, self._entry_keys[chosen])]
        pieces, position = [], 0
        cuts = np.stack([self._starts[places], self._stops[places + self._ngram - 1]], 1)
        for start, stop in [*(cuts + np.searchsorted(longer, cuts)).tolist(), (len(text), 0)]:
            if start > position:
                piece = text[position:start].decode()
                piece = piece[margin if position else 0 : len(piece) - margin if stop else None]
                pieces += [piece.strip()] if len(piece) >= max(margin, 1) and piece.strip() else []
            position = max(position, stop)
        return pieces
