"""One vector of tokens a file: .npy, headerless .bin (nanoGPT), llm.c's .bin, Templar's shards with sample ids.

The first bytes decide which of these a file is, never its suffix: shards named .npy without a NumPy header exist.

Sample ids are in `sample_ids*` beside the tokens (`sample_ids_000003` for `train_000003`, `sample_ids` for `tokens`),
raw u64 or .npy: the 8-byte BLAKE2b of a sample's bytes, little endian. With ids, a file is a whole number of samples,
and some of them are checked when opening, all by `verify`. Tokens are views of the map.
"""

import hashlib
import io
import logging
import re
import threading
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from forebay.arrays import U8, U64, Array, DType
from forebay.errors import DatasetError, UsageError
from forebay.formats import external
from forebay.formats.detect import detect
from forebay.storage.remote_path import RemotePath

NPY_MAGIC = b"\x93NUMPY"
LLMC_TYPES = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""First int32 of llm.c's header: its second (the version), and the type of a token."""
RAW_SUFFIXES = (".bin", ".npy", ".ds", ".u16", ".u32", ".tokens")
"""Of token files without a header; .npy too, because shards exist that are named so and lack NumPy's header."""
IDS_PREFIX = "sample_ids"
HEADERS = ("npy", "llm.c")  # Formats of `detect` whose files say the type of their tokens.
LLMC_HEADER_BYTES = 1024  # Of llm.c's header.
MAX_HEADER_BYTES = 10_000  # NumPy's own bound.
GUESSED = "guessed"  # Given as type of headerless tokens, it lets their first bytes tell.
_SPOT_SAMPLES = 8
NO_SAMPLE = int.from_bytes(hashlib.blake2b(b"", digest_size=8).digest(), "little")
"""13020603013274838756: the id of no bytes at all."""


_log = logging.getLogger("forebay")


@dataclass(frozen=True)
class Vector:
    """One file that holds a vector of integers after a header."""

    path: Path
    offset: int  # Bytes of the header.
    kind: DType  # Type of the integers.
    count: int
    file_bytes: int  # Of the whole file: offset + count * itemsize.


def check_no_chunks(folder: Path) -> None:
    """Raise UsageError for LitData's chunks: each begins with a table of offsets, which would be read as tokens."""
    if b'"data_format"' in external.index_edges(folder)[1]:
        raise UsageError(
            f"{folder}: expected files of tokens, got LitData's chunks. Give the directory with their index.json."
        )


class VectorDataset(external.ExternalDataset):
    """Files of tokens as one dataset, in the order given."""

    def __init__(self, path: Path, files: Sequence[Path], dtype: Any) -> None:
        self._stream: tuple[Path, BinaryIO] | None = None
        self._stream_lock = threading.Lock()
        self._ids = [ids_of(file) for file in files]
        self._vectors = [_tokens_of(file, ids, dtype) for file, ids in zip(files, self._ids)]
        lengths = {_sample_tokens(vector, ids) for vector, ids in zip(self._vectors, self._ids)}
        stored = external.common_dtype(path, (vector.kind for vector in self._vectors))
        if len(lengths) != 1:
            raise DatasetError(
                f"{path}: expected files of one length of sample, got {', '.join(sorted(map(str, lengths)))}. Open "
                "them as datasets of their own."
            )
        if dtype is GUESSED and any(not v.offset and ids is None for v, ids in zip(self._vectors, self._ids)):
            _log.warning(
                "%s: its tokens have no header and are taken for %s, as their first bytes look. Say their type "
                "by forebay.formats.open_external(PATH, dtype='%s').", path, *[self._vectors[0].kind] * 2,
            )  # fmt: skip
        self.seq_len = lengths.pop()  # Tokens of a sample, where sample ids tell it; else None.
        parts = []
        for file, vector in enumerate(self._vectors):
            is_view = vector.kind.itemsize in (2, 4) and not isinstance(vector.path, RemotePath)
            limit = external.MAX_TOKENS if is_view else external.MAX_COPIED_TOKENS
            step = max(1, limit // self.seq_len) * self.seq_len if self.seq_len else limit
            for k, start in enumerate(range(0, vector.count, step)):
                count = min(step, vector.count - start)
                name = f"{external.shown_name(path, vector.path)}#{k:05d}"
                parts.append(external.ExternalSlice(file, name, start, count, 0, count * vector.kind.itemsize))
        marks = external.fingerprints(files)
        super().__init__(path, "vector", stored, list(files), marks, parts, {"seq_len": self.seq_len})
        for vector, ids in zip(self._vectors, self._ids):
            if ids is not None and self.seq_len:
                self._check_spots(vector, ids, self.seq_len)

    def sample_ids(self, part: external.ExternalSlice) -> U64 | None:
        """Return the sample ids of a slice, a view of their file: U64 [count // seq_len]; None if there are none."""
        ids = self._ids[part.file]
        if ids is None or not self.seq_len:
            return None
        first = part.start // self.seq_len
        return self._view(ids, first, first + part.count // self.seq_len)

    def _read(self, part: external.ExternalSlice) -> tuple[Array, U64]:
        vector = self._vectors[part.file]
        return external.as_tokens(self._view(vector, part.start, part.start + part.count), vector.path), np.empty(
            0, np.uint64
        )

    def _view(self, vector: Vector, start: int, stop: int) -> Array:
        width = vector.kind.itemsize
        first, num_bytes = vector.offset + start * width, (stop - start) * width
        if not isinstance(path := vector.path, RemotePath):
            return self._map(path, vector.file_bytes)[first : first + num_bytes].view(vector.kind)
        with self._stream_lock:
            if self._stream is None or self._stream[0] != path:
                self._stream = (path, path.open())  # It stays open: a stream that is read on fetches ahead.
            self._stream[1].seek(first)
            data = self._stream[1].read(num_bytes)
        if len(data) < num_bytes:
            raise DatasetError(f"{path}: expected {num_bytes} bytes from {first} on, got {len(data)}. Fetch it again.")
        return np.frombuffer(data, vector.kind)

    def _check_spots(self, vector: Vector, ids: Vector, seq_len: int) -> None:
        for i in np.unique(np.linspace(0, ids.count - 1, _SPOT_SAMPLES).astype(np.int64)).tolist():
            expected = int(self._view(ids, i, i + 1)[0])
            got = sample_id(self._view(vector, i * seq_len, (i + 1) * seq_len))
            if got != expected:
                raise DatasetError(
                    f"{ids.path}: expected id {got} of sample {i} ({seq_len} tokens {vector.kind}), got {expected}. "
                    f"{'It is the id of no bytes at all: a known fault of one writer. ' * (expected == NO_SAMPLE)}"
                    f"Tokens and ids are not of each other: fetch both again, or move {ids.path.name} away to read "
                    "the tokens without."
                )

    def _hash_checks(self) -> tuple[str, ...]:
        return ("BLAKE2b of every sample against its id",) if all(ids is not None for ids in self._ids) else ()

    def _check_part(self, part: external.ExternalSlice, tokens: Array) -> str:
        ids = self.sample_ids(part)
        if ids is None or not self.seq_len:
            return ""
        samples = tokens.reshape(-1, self.seq_len)
        return "" if all(sample_id(row) == expected for row, expected in zip(samples, ids.tolist())) else "changed"


def sample_id(tokens: Array) -> int:
    """Return Templar's id of a sample: the 8-byte BLAKE2b of its tokens' bytes in their own type, little endian."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens).view(np.uint8).data, digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def npy_header(dtype: DType, count: int) -> bytes:
    """Return NumPy's header of a vector: 128 bytes for every count."""
    head = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({count},), }}"
    return NPY_MAGIC + b"\x01\x00" + (118).to_bytes(2, "little") + (head.ljust(117) + "\n").encode()


def read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, DType]:
    """Read the header of a NumPy file: (shape, whether in Fortran's order, dtype). Raises ValueError."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (TypeError, SyntaxError, tokenize.TokenError) as error:
        raise ValueError(str(error)) from error
    return tuple(map(int, shape)), bool(fortran), dtype


def ids_of(path: Path) -> Vector | None:
    """Return the file of sample ids that belongs to a file of tokens; None if there is none."""
    names = ["sample_ids" if path.stem == "tokens" else f"sample_ids_{path.stem}"]
    if number := re.fullmatch(r"train_?(\d+)", path.stem):
        names = [f"sample_ids_{number[1]}", f"sample_ids_train_{number[1]}"]
    for path_of_ids in (path.with_name(name + suffix) for name in names for suffix in (".npy", ".bin")):
        if path_of_ids.is_file():
            vector = vector_in(path_of_ids, dtype="<u8")
            if vector.kind != np.dtype("<u8"):
                raise DatasetError(f"{path_of_ids}: expected sample ids of uint64, got {vector.kind}. Fetch it again.")
            return vector
    return None


def _tokens_of(path: Path, ids: Vector | None, dtype: Any) -> Vector:
    format = detect(path).format
    if format == "llm.c":
        return _llmc(path)
    if format == "npy":
        vector = vector_in(path)
        if vector.kind not in (np.dtype("<u2"), np.dtype("<u4")):
            raise DatasetError(
                f"{path}: expected tokens of uint16 or uint32, got {vector.kind}. Save them again with "
                "np.save(path, tokens.astype(np.uint32))."
            )
        return vector
    if dtype not in (None, GUESSED):
        return vector_in(path, dtype=dtype)
    if ids is not None and external.file_size(path) < 2 * ids.count:
        raise DatasetError(
            f"{path}: expected at least one token for each of {ids.count} ids in {ids.path.name}, got "
            f"{external.file_size(path)} bytes. It is truncated; fetch it again."
        )
    head = np.frombuffer(external.read_head(path, 1 << 16), np.uint8)
    if (ids is not None or dtype is GUESSED) and (guess := guess_dtype(head[: len(head) & ~7])) is not None:
        return vector_in(path, dtype=guess)
    raise UsageError(
        f"{path}: expected tokens with a header, got none, and no type. Say it: open_external(PATH, dtype='uint16') "
        "(vocabularies below 65536) or 'uint32', or --set input_dtype=uint16 of forebay convert."
    )


def guess_dtype(head: U8) -> DType | None:
    """Return the type of headerless tokens, by their first bytes, a multiple of 8; None where these do not tell."""
    halves = head.view("<u2")
    if len(halves) and int(halves[1::2].max()) >= 16:
        return np.dtype("<u2")
    if not len(halves) or int(halves[::2].max()) < 16:
        return None
    return np.dtype("<u4" if len(halves) == 4 or halves[2::4].any() else "<i8")


def _llmc(path: Path) -> Vector:
    head, size = external.read_head(path, LLMC_HEADER_BYTES), external.file_size(path)
    kind = np.dtype(LLMC_TYPES[int.from_bytes(head[:4], "little")][1])
    count = int.from_bytes(head[8:12], "little")
    if size != LLMC_HEADER_BYTES + count * kind.itemsize:
        raise DatasetError(
            f"{path}: expected {LLMC_HEADER_BYTES + count * kind.itemsize} bytes, as its header says, got {size}. "
            "Fetch it again."
        )
    return Vector(path, LLMC_HEADER_BYTES, kind, count, size)


def header_size(head: bytes) -> int:
    """Return the size of NumPy's header, of which `head` has at least 12 bytes; 0 if there is none."""
    if not head.startswith(NPY_MAGIC):
        return 0
    width = 2 if head[6:7] == b"\x01" else 4
    return 8 + width + min(MAX_HEADER_BYTES, int.from_bytes(head[8 : 8 + width], "little"))


def vector_in(path: Path, head: bytes | None = None, num_bytes: int | None = None, dtype: Any = None) -> Vector:
    """Return the vector in a file of which only the `head` may be here: NumPy's, or raw of a type."""
    head = external.read_head(path, 12 + MAX_HEADER_BYTES) if head is None else head
    size = external.file_size(path) if num_bytes is None else num_bytes
    if not head.startswith(NPY_MAGIC):
        kind = external.token_dtype(dtype)
        if size % kind.itemsize:
            raise DatasetError(
                f"{path}: expected a whole number of {kind.itemsize}-byte numbers, got {size} bytes. "
                "It is truncated, or of another type."
            )
        return Vector(path, 0, kind, size // kind.itemsize, size)
    file = io.BytesIO(head)
    try:
        shape, _, dtype = read_header(file)
    except ValueError as error:
        raise DatasetError(f"{path}: expected a NumPy header, got {head[:12]!r} in {size} bytes: {error}.") from error
    if len(shape) != 1:
        raise DatasetError(
            f"{path}: expected a vector of tokens, got shape {list(shape)}. Save it again with "
            "np.save(path, tokens.reshape(-1))."
        )
    if dtype.str[1:] not in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8") or dtype.str[0] not in "<|":
        raise DatasetError(
            f"{path}: expected little-endian integers, got {dtype.str!r}. Save them again as '<u2' or '<u4'."
        )
    offset = file.tell()
    expected = offset + shape[0] * dtype.itemsize
    if size != expected:
        raise DatasetError(
            f"{path}: expected {expected} bytes, as its header says ({shape[0]} {dtype}), got {size}. "
            "It is truncated or was appended to; fetch it again."
        )
    return Vector(path, offset, dtype, shape[0], size)


def _sample_tokens(vector: Vector, ids: Vector | None) -> int | None:
    if ids is None:
        return None
    if not ids.count or vector.count % ids.count or not vector.count:
        raise DatasetError(
            f"{vector.path}: expected a whole number of tokens for each of {ids.count} ids in {ids.path.name}, got "
            f"{vector.count} tokens. One of the two is truncated or of another shard; fetch both again."
        )
    return vector.count // ids.count
