"""Megatron's indexed dataset: NAME.idx says where each sequence of NAME.bin lies.

The index, little endian, without gaps: `MMIDIDX` and two zero bytes, u64 version 1, u8 type of token, u64 S sequences,
u64 D document bounds; then i32 lengths [S] in tokens, i64 pointers [S] in bytes, i64 bounds [D] in sequences (document
d is sequences [bounds[d], bounds[d + 1])), and for multimodal data i8 modes [S], which are not read. Every number is
checked against the file before it is used (0.14 s for 10 million sequences). Tokens of 2 and 4 bytes are views.
Source: megatron-core 0.16, megatron/core/datasets/indexed_dataset.py.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from forebay.arrays import I32, I64, U8, U64, Array, DType
from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.dataset.slices import hash_file
from forebay.errors import DatasetError, UsageError
from forebay.formats import external
from forebay.formats.base import Format
from forebay.formats.conversion import ConvertOptions, TokenSource, Written
from forebay.formats.external import MAX_COPIED_TOKENS, MAX_TOKENS
from forebay.formats.report import Report, check_external
from forebay.formats.token_stream import build_stream

MAGIC = b"MMIDIDX\x00\x00"
_HEADER_BYTES = 34
_KINDS = {code: np.dtype(kind) for code, kind in ((1, "u1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))}
_CHUNK = 1 << 20
_CODES = {"U16": 8, "U32": 4}  # Written: uint16, int32.
_MAX_LENGTH = (1 << 31) - 1
_RUN = 1 << 18


@dataclass(frozen=True)
class Index:
    """One .idx, checked against its .bin: its sequences follow one another from byte 0 to the end."""

    idx: Path
    data: Path
    data_bytes: int  # Of the .bin.
    kind: DType  # Type of a token in it.
    lengths: I32  # [S], of the index's map, not aligned; so are the next two.
    pointers: I64  # [S].
    bounds: I64  # [D].
    num_tokens: int  # In all sequences.

    @property
    def num_documents(self) -> int:
        """Documents; every sequence is one where the index bounds none."""
        return len(self.bounds) - 1 if len(self.bounds) > 1 else len(self.lengths)

    def document_ends(self, first: int, last: int) -> I64:
        """Return the ends of documents [first, last), in tokens from the file's first: int64 [last - first]."""
        has_bounds = len(self.bounds) > 1
        sequences = self.bounds[first + 1 : last + 1] if has_bounds else np.arange(first + 1, last + 1)
        inside = sequences < len(self.lengths)
        stops = np.full(len(sequences), self.num_tokens, np.int64)
        stops[inside] = self.pointers[sequences[inside]] // self.kind.itemsize
        return stops

    def end(self, document: int) -> int:
        """Return the end of one document."""
        return int(self.document_ends(document, document + 1)[0])


class Megatron(Format):
    """Pairs of an index and its tokens; tokens of U32 are written as int32."""

    name = "megatron"
    magics = (MAGIC,)

    def open_tokens(self, path: Path, dtype: Any = None, column: str | None = None) -> external.ExternalDataset:
        pair = pair_of(path)
        if pair is None:
            raise DatasetError(
                f"{path}: expected an index and its data, got {external.file_size(path)} bytes of neither."
            )
        return MegatronDataset(path.parent, [pair])

    def write_tokens(self, source: TokenSource, out: Path, options: ConvertOptions) -> Written:
        stream = build_stream(source, options, "rows", signed=True)
        out.mkdir()
        base = f"{options.name or 'dataset'}_text_document"
        data, idx, lengths = (out / f"{base}{suffix}" for suffix in (".bin", ".idx", ".lengths"))
        before = reached = count = 0
        itemsize = TOKEN_DTYPES[stream.dtype].itemsize
        with data.open("wb") as tokens, lengths.open("wb") as sizes:
            for part in stream.parts():
                tokens.write(np.ascontiguousarray(part.tokens).view(np.uint8).data)
                document_ends = part.document_ends.astype(np.int64) + reached
                document_lengths = np.diff(document_ends, prepend=before)
                if len(document_lengths) and int(document_lengths.max()) > _MAX_LENGTH:
                    raise UsageError(
                        f"megatron: expected documents of at most {_MAX_LENGTH} tokens, got one of "
                        f"{int(document_lengths.max())}. Give --seq-len N, or --set eos_id=N if a token ends each."
                    )
                sizes.write(document_lengths.astype("<i4").tobytes())
                before = int(document_ends[-1]) if len(document_ends) else before
                reached += len(part.tokens)
                count += len(document_ends)
        with lengths.open("rb") as sizes, idx.open("wb") as index:
            index.write(MAGIC + (1).to_bytes(8, "little") + bytes([_CODES[stream.dtype]]))
            index.write(count.to_bytes(8, "little") + (count + 1).to_bytes(8, "little"))
            for _ in range(0, count, _RUN):
                index.write(sizes.read(4 * _RUN))
            sizes.seek(0)
            pointer = 0
            for _ in range(0, count, _RUN):
                num_bytes = np.frombuffer(sizes.read(4 * _RUN), "<i4").astype(np.int64) * itemsize
                stops = np.cumsum(num_bytes) + pointer
                index.write((stops - num_bytes).astype("<i8").tobytes())
                pointer = int(stops[-1])
            for start in range(0, count + 1, _RUN):
                index.write(np.arange(start, min(start + _RUN, count + 1), dtype="<i8").tobytes())
        lengths.unlink()
        return stream.written([Path(data.name), Path(idx.name)])

    def check(self, path: Path, report: Report) -> None:
        check_external(report, lambda: self.open_tokens(path))


class MegatronDataset(external.ExternalDataset):
    """Pairs of .idx and .bin as one dataset, in the order of their names."""

    def __init__(self, path: Path, pairs: Sequence[tuple[Path, Path]]) -> None:
        self._indexes = [read_index(idx, data) for idx, data in pairs]
        dtype = external.common_dtype(path, (index.kind for index in self._indexes))
        # The first document that ends in each slice: a slice's documents are those up to the next slice's.
        self._first: dict[tuple[int, int], int] = {}
        parts = []
        for file, index in enumerate(self._indexes):
            name = external.shown_name(path, index.data)
            for k, (start, stop, first, last) in enumerate(_cut(index)):
                self._first[file, start] = first
                num_bytes, part = (stop - start) * index.kind.itemsize, f"{name}#{k:05d}"
                parts.append(external.ExternalSlice(file, part, start, stop - start, last - first, num_bytes))
        marks = [self._mark(file) for file in range(len(pairs))]
        super().__init__(path, "megatron", dtype, [index.data for index in self._indexes], marks, parts)

    def _mark(self, file: int) -> bytes:
        index = self._indexes[file]
        with external.reading(index.idx):
            return external.fingerprint(index.data, len(self._indexes)) + bytes.fromhex(hash_file(index.idx))

    def _read(self, part: external.ExternalSlice) -> tuple[Array, U64]:
        index = self._indexes[part.file]
        memory = self._map(index.data, index.data_bytes)
        width = index.kind.itemsize
        raw = memory[part.start * width : (part.start + part.count) * width]
        first = self._first[part.file, part.start]
        document_ends = index.document_ends(first, first + part.documents) - part.start
        return external.as_tokens(raw.view(index.kind), index.data), document_ends.astype(np.uint64)


def pair_of(path: Path) -> tuple[Path, Path] | None:
    """Return (.idx, .bin) if `path` is one of the two, or their common name; else None.

    The index is recognized by its first bytes; its data by the index's name.
    """
    candidates = [path, path.with_suffix(".idx"), path.with_name(path.name + ".idx")]
    for idx in candidates:
        if idx.is_file() and is_index(idx):
            data = idx.with_suffix(".bin")
            if not data.is_file():
                raise DatasetError(f"{idx}: expected its data in {data.name} beside it, got none. Fetch it too.")
            return idx, data
    return None


def is_index(path: Path) -> bool:
    """Return whether a file begins as Megatron's index. Raises DatasetError if it cannot be read."""
    return external.read_head(path, len(MAGIC)) == MAGIC


def read_index(idx: Path, data: Path) -> Index:
    """Read an index and check every number in it."""
    data_bytes, memory = external.file_size(data), external.map_file(idx)
    kind, sequences, bounds = _header(idx, memory)
    edges = np.cumsum([_HEADER_BYTES, 4 * sequences, 8 * sequences, 8 * bounds]).tolist()
    columns = zip(pairwise(edges), ("<i4", "<i8", "<i8"))
    lengths, pointers, documents = (memory[start:stop].view(kind) for (start, stop), kind in columns)
    total = before = 0
    for a in range(0, len(lengths), _CHUNK):
        sizes = lengths[a : a + _CHUNK].astype(np.int64)
        expected = (np.cumsum(sizes) - sizes + total) * kind.itemsize
        invalid = (sizes < 0) | (pointers[a : a + _CHUNK] != expected)
        if invalid.any():
            i = int(np.flatnonzero(invalid)[0])
            raise DatasetError(
                f"{idx}: expected sequence {a + i} at byte {expected[i]} of {data.name}, got {sizes[i]} tokens at byte "
                f"{pointers[a + i]}. The index is damaged, or not in the data's order; write it again."
            )
        total += int(sizes.sum())
        if total * kind.itemsize > data_bytes:
            break
    for a in range(0, len(documents), _CHUNK):
        some = documents[a : a + _CHUNK].astype(np.int64)
        rising = bool((some[1:] >= some[:-1]).all()) and int(some[0]) >= before and int(some[-1]) <= sequences
        if not rising or (a == 0 and some[0] != 0):
            raise DatasetError(
                f"{idx}: expected document bounds that rise from 0 to at most {sequences}, got {int(some[0])} to "
                f"{int(some[-1])} at document {a}. The index is damaged; fetch it again."
            )
        before = int(some[-1])
    if total * kind.itemsize != data_bytes:
        raise DatasetError(
            f"{data}: expected {total * kind.itemsize} bytes, as {idx.name} says, got {data_bytes}. "
            "One of the two is of another run, or is truncated; fetch both again."
        )
    return Index(idx, data, data_bytes, kind, lengths, pointers, documents, total)


def _header(idx: Path, memory: U8) -> tuple[DType, int, int]:
    head = memory[:_HEADER_BYTES].tobytes()
    if len(head) < _HEADER_BYTES or head[:9] != MAGIC:
        raise DatasetError(f"{idx}: expected Megatron's index, got {head[:9]!r} in {len(memory)} bytes.")
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    if version != 1:
        raise DatasetError(f"{idx}: expected version 1 of Megatron's index, got {version}.")
    if code not in _KINDS:
        raise DatasetError(
            f"{idx}: expected an integer type of token ({', '.join(f'{c}: {k}' for c, k in _KINDS.items())}), got "
            f"{code}. Write it again."
        )
    sequences, bounds = int.from_bytes(head[18:26], "little"), int.from_bytes(head[26:34], "little")
    expected = _HEADER_BYTES + 12 * sequences + 8 * bounds
    if len(memory) not in (expected, expected + sequences):  # With modes.
        raise DatasetError(
            f"{idx}: expected {expected} bytes for {sequences} sequences and {bounds} document bounds, got "
            f"{len(memory)}. It is truncated or damaged; fetch it again."
        )
    return _KINDS[code], sequences, bounds


def _cut(index: Index) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, first document, last document) of each slice, in tokens and documents that end in it."""
    limit_tokens = MAX_TOKENS if index.kind.itemsize in (2, 4) else MAX_COPIED_TOKENS
    start, document, documents = 0, 0, index.num_documents
    while start < index.num_tokens:
        limit = start + limit_tokens
        last = (
            documents if limit >= index.num_tokens else bisect_right(range(documents), limit, document, key=index.end)
        )
        stop = min(limit, index.num_tokens)
        if stop < index.num_tokens and last > document and index.end(last - 1) > start:
            stop = index.end(last - 1)
        yield start, stop, document, last
        start, document = stop, last
