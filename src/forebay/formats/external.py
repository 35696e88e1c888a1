"""Datasets in the formats of other tools, opened in place as Forebay's own are: read-only, nothing is converted.

A slice is a run of at most 64 Mi tokens of one file or shard; slices share the maps of files. Hashing terabytes when
opening takes too long, so a slice's `sha256` is that of its file's fingerprint (size, and up to 16 pieces of 4 KiB at
even distances, fewer where there are many files) and its place; the id is the hash of the format, type, counts and
those. Names and paths are not in it. A change between the pieces goes unseen by the id.
"""

import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay import maps
from forebay.arrays import U8, U64, Array, DType
from forebay.base import Json
from forebay.dataset.chunks import MAX_CHUNK_BYTES
from forebay.dataset.manifest import TOKEN_DTYPES, Manifest, SliceTable
from forebay.dataset.reader import Dataset, VerifyReport
from forebay.dataset.slices import Slice, check_document_ends
from forebay.errors import DatasetError, UsageError
from forebay.storage.compression import limit_large_blocks
from forebay.storage.remote_path import RemotePath

TOKEN_COLUMNS = ("input_ids", "tokens")  # Columns that are taken for tokens where none is named.
MAX_TOKENS = 64 << 20  # Of a slice that is a view: 128 or 256 MiB of a file.
MAX_COPIED_TOKENS = 4 << 20  # Of a slice that must be copied: 8 or 16 MiB of memory for each that is open.

REMEDY = "forebay.formats.open_external(PATH, column='{}')"  # Opens the tokens of one column.

_MAX_MAPS = 64
_STRUCTURE_CHECKS = (
    "size of every file",
    "the index, where there is one, against every slice",
    "type and number of tokens, document ends",
    "no token above 2**31 - 1",
)
_PIECE_BYTES = 4096
_MAX_PIECES = 16
_ALL_PIECES = 4096  # Pieces read of all files together, 16 MiB; two of each file where there are more files.


@dataclass(frozen=True)
class ExternalSlice:
    """One slice of an external dataset."""

    file: int  # Index of the file among the dataset's.
    name: str  # For people: the file's name and, where it has several parts, `#` and the part.
    start: int  # First token, counted in the file.
    count: int  # Tokens.
    documents: int  # Documents that end in it.
    num_bytes: int  # Of the file that hold these tokens.


class ExternalDataset(Dataset, ABC):
    """A read-only dataset of layout `tokens` in another tool's format. Subclasses say how a part is read.

    `files` hold the tokens, and `marks` are their fingerprints, 32 bytes each; `parts` are the slices, in order;
    `settings`, JSON values, what else the tokens depend on.
    """

    max_open_slices = 16  # Small, as some slices are copies; a slice that is in use stays open anyway.
    has_hashes = False

    def __init__(
        self,
        path: Path,
        kind: str,
        dtype: str,
        files: Sequence[Path],
        marks: Sequence[bytes],
        parts: Sequence[ExternalSlice],
        settings: Json | None = None,
    ) -> None:
        self.format, self.files, self.parts = kind, list(files), list(parts)
        self._marks = list(marks)
        self._maps: OrderedDict[Path, U8] = OrderedDict()
        self._map_lock = threading.Lock()
        table = _table(self.parts, self._marks)  # A slice is read as a whole, as some are copies.
        digest = hashlib.sha256()
        for column in (table.sha256, table.count, table.documents):
            digest.update(np.ascontiguousarray(column).tobytes())
        what = {"format": kind, "dtype": dtype, "tokens": int(table.count.sum()), "slices": digest.hexdigest()}
        what |= settings or {}
        described = hashlib.sha256(json.dumps(what, sort_keys=True).encode())
        manifest = Manifest.of(
            replace(table, chunk_bytes=MAX_CHUNK_BYTES),
            {"opened": what},
            name=path.resolve().name,
            layout="tokens",
            dtype=dtype,
            table_sha256=digest.hexdigest(),
        )
        super().__init__(path, manifest, table, described.hexdigest())

    def describe(self) -> Json:
        """As of Forebay's own datasets, and `format`: the format's name."""
        checked = "sizes, index and samples of the bytes; `forebay verify` reads all"
        left_out = {"left out": ", ".join(self.left_out)} if self.left_out else {}
        return {**super().describe(), "format": self.format, "checked": checked, **left_out}

    def slice_path(self, index: int) -> Path:
        """The file that holds slice `index`. Raises UsageError if it is outside [0, num_slices)."""
        return self.files[self._part(index).file]

    def map_slice(self, index: int) -> Slice:
        """As `read_slice`: there are no hashes."""
        return self.read_slice(index)

    def read_slice(self, index: int) -> Slice:
        """As of Forebay's own datasets; `tokens` are a view of the file's map where the format allows.

        DatasetError if the file is missing, has another size now, or contradicts what opening found.
        """
        part = self._part(index)
        return self._checked(part, *self._read(part))

    def first_token(self, index: int) -> int:
        return self.parts[index].start

    def all_document_ends(self) -> Iterator[U64]:
        """As of Forebay's own datasets, from the slices: their formats have no lengths beside them."""
        return (self.read_slice(index).document_ends for index in range(self.num_slices))

    def release(self, index: int, opened: Slice) -> None:
        """As of Forebay's own datasets; the pages of the whole file, which has one map."""
        with self._map_lock:
            memory = self._maps.get(self.slice_path(index))
        if memory is not None:
            maps.release_pages(memory)

    def verify(self, on_progress: Callable[[int], None] | None = None, workers: int | None = None) -> VerifyReport:
        """Read every slice and compare with what was found when opening; files that differ are named.

        Checked: sizes, fingerprints, indexes, hashes and sample ids where the format has them, and that no U32 token
        is above 2**31 - 1 (a negative number, or text read as numbers). Arguments as of Forebay's own datasets.
        """
        states: dict[int, str] = {}

        def mark(file: int) -> tuple[int, str]:
            if not self._exists(file):
                return file, "missing"
            try:
                return file, "" if self._mark(file) == self._marks[file] else "changed"
            except DatasetError:
                return file, "changed"

        def check(index: int) -> tuple[int, str]:
            part = self.parts[index]
            if states[part.file]:
                return index, ""
            try:
                with limit_large_blocks(part.count * 4 if part.num_bytes < part.count else 0):
                    tokens = self._checked(part, *self._read(part)).tokens
                    if tokens.dtype.itemsize == 4 and len(tokens) and int(tokens.max()) >> 31:
                        return index, "changed"
                    return index, self._check_part(part, tokens)
            except DatasetError:
                return index, "changed"

        with ThreadPoolExecutor(workers or 4) as pool:
            states.update(pool.map(mark, range(len(self.files))))
            for index, state in pool.map(check, range(len(self.parts))):
                part = self.parts[index]
                states[part.file] = states[part.file] or state
                if on_progress is not None:
                    on_progress(part.num_bytes)
        changed, missing = (
            sorted({shown_name(self.path, self.files[file]) for file, state in states.items() if state == kind})
            for kind in ("changed", "missing")
        )
        differing = sorted([*changed, *missing])
        hashes = self._hash_checks()
        return VerifyReport(
            not differing, differing, changed, missing, has_hashes=bool(hashes), checks=(*_STRUCTURE_CHECKS, *hashes)
        )

    def _hash_checks(self) -> tuple[str, ...]:
        """What `verify` compares with hashes that cover every token; nothing where the format holds none."""
        return ()

    def _part(self, index: int) -> ExternalSlice:
        if not 0 <= index < len(self.parts):
            raise UsageError(f"slice index: expected 0 to {len(self.parts) - 1}, got {index}")
        return self.parts[index]

    @abstractmethod
    def _read(self, part: ExternalSlice) -> tuple[Array, U64]:
        """(tokens U16 or U32 [T], document ends U64 [D]) of a part; raises DatasetError."""

    def _exists(self, file: int) -> bool:
        return self.files[file].is_file()

    def _mark(self, file: int) -> bytes:
        return fingerprint(self.files[file], len(self.files))

    def _check_part(self, part: ExternalSlice, tokens: Array) -> str:
        return ""

    def _checked(self, part: ExternalSlice, tokens: Array, document_ends: U64) -> Slice:
        path = self.files[part.file]
        problem = check_document_ends(document_ends, len(tokens))
        if problem:
            raise DatasetError(f"{path}: document ends of {part.name}: {problem}. The file is damaged; fetch it again.")
        dtype = TOKEN_DTYPES[self.manifest.dtype]
        if (len(tokens), len(document_ends), tokens.dtype) != (part.count, part.documents, dtype):
            raise DatasetError(
                f"{path}: expected {part.count} tokens {dtype} in {part.documents} documents in {part.name}, got "
                f"{len(tokens)} {tokens.dtype} in {len(document_ends)}. It changed since it was opened, or its index "
                "does not fit it; open it again, or fetch it again."
            )
        tokens.flags.writeable = False
        document_ends.flags.writeable = False
        return Slice(
            path,
            {"tokens": tokens, "document_ends": document_ends},
            {"tokens": self.manifest.dtype, "document_ends": "U64"},
        )

    def _map(self, path: Path, num_bytes: int) -> U8:
        with self._map_lock:
            memory = self._maps.pop(path, None)
            check_size(path, num_bytes)
            if memory is None or len(memory) != num_bytes:
                memory = map_file(path)
            self._maps[path] = memory
            while len(self._maps) > _MAX_MAPS:
                self._maps.popitem(last=False)
        return memory


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise DatasetError where the system refuses a file."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> DatasetError:
    """Return the error for a file that the system refuses."""
    return DatasetError(
        f"{path}: cannot be read: {getattr(error, 'strerror', '') or error}. Check the path, or fetch it again."
    )


def map_file(path: Path) -> U8:
    """Return a file as read-only bytes. Raises DatasetError if it cannot be opened."""
    with reading(path), path.open("rb") as file:
        return maps.map_file(file)


def read_head(path: Path, num_bytes: int, start: int = 0) -> bytes:
    """Return up to `num_bytes` bytes of a file from `start`. Raises DatasetError if it cannot be read."""
    with reading(path), path.open("rb") as file:
        file.seek(start)
        return file.read(num_bytes)


def file_size(path: Path) -> int:
    """Return the size of a file. Raises DatasetError if there is none."""
    with reading(path):
        return path.stat().st_size


def index_edges(folder: Path) -> tuple[bytes, bytes]:
    """Return the first 4 KiB and the last 64 of a folder's index.json; nothing where there is none."""
    index = folder / "index.json"
    if not index.is_file():
        return b"", b""
    return read_head(index, 4096), read_head(index, 1 << 16, max(0, file_size(index) - (1 << 16)))


def check_size(path: Path, expected: int) -> None:
    """Raise DatasetError if a file has another size than expected."""
    if (got := file_size(path)) != expected:
        raise DatasetError(f"{path}: expected {expected} bytes, got {got}. Fetch it again.")


def fingerprint(path: Path, num_files: int) -> bytes:
    """Return 32 bytes that identify a file's content by its size and pieces; all of it where it is small.

    Of a file at a URL by its version.
    """
    if isinstance(path, RemotePath):
        return hashlib.sha256(f"{path.num_bytes} {path.version}".encode()).digest()
    pieces = max(2, min(_MAX_PIECES, _ALL_PIECES // max(num_files, 1)))
    with reading(path), path.open("rb") as file:
        size = file_size(path)
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        if size <= pieces * _PIECE_BYTES:
            digest.update(file.read(size))
            return digest.digest()
        for i in range(pieces):
            file.seek((size - _PIECE_BYTES) * i // (pieces - 1))
            digest.update(file.read(_PIECE_BYTES))
        return digest.digest()


def fingerprints(paths: Sequence[Path]) -> list[bytes]:
    """Return the `fingerprint` of each file, by 16 threads: the time is the disk's latency."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda path: fingerprint(path, len(paths)), paths))


def token_dtype(dtype: Any) -> DType:
    """Return the integer type that a user names: `U16`, `uint16`, `int64`, `np.uint32` …; little-endian."""
    try:
        text = dtype.lower() if isinstance(dtype, str) else None
        if text and text[:1] in "ui" and text[1:] in ("16", "32", "64"):
            return np.dtype(f"<{text[0]}{int(text[1:]) // 8}")
        kind = np.dtype(text or dtype)
    except (TypeError, ValueError, AttributeError):
        kind = np.dtype("?")
    if kind.kind not in "iu" or kind.byteorder == ">" or kind.itemsize == 1:
        raise UsageError(f"dtype of tokens: expected uint16, uint32, int32 or int64, got {dtype!r}.")
    return kind


def stored_dtype(kind: DType) -> str:
    """Return `U16` or `U32`: the type in which tokens of an integer type are returned."""
    return "U16" if kind.itemsize <= 2 else "U32"


def common_dtype(path: Path, kinds: Iterable[DType]) -> str:
    """Return `U16` or `U32` of the files of a dataset. Raises DatasetError if they differ, or there are none."""
    distinct = set(kinds)
    names = {stored_dtype(kind) for kind in distinct}
    if len(names) != 1:
        raise DatasetError(
            f"{path}: expected files of one type of token, got {', '.join(sorted(map(str, distinct))) or 'none'}. Open "
            "them as datasets of their own."
        )
    return names.pop()


def as_tokens(array: Array, location: object) -> Array:
    """Return integers as U16 or U32: a view for 2 and 4 bytes, a copy for 1 and 8.

    A view of signed integers takes their bits: a negative one is a token of 2**31 (2**15) and more; `verify` finds
    the former. An 8-byte number outside [0, 2**32) is a DatasetError.
    """
    kind = array.dtype
    if kind.itemsize in (2, 4):
        return array.view(TOKEN_DTYPES[stored_dtype(kind)])
    if kind.itemsize == 8 and len(array) and (int(array.min()) < 0 or int(array.max()) >> 32):
        raise DatasetError(
            f"{location}: expected token ids in [0, 2**32), got {int(array.min())} to {int(array.max())}. "
            "The numbers are of another type, or are no tokens."
        )
    return array.astype(TOKEN_DTYPES[stored_dtype(kind)])


def shown_name(base: Path, path: Path) -> str:
    """Return the name of a file for messages: below `base` if it is there, else its own."""
    return path.relative_to(base).as_posix() if path.is_relative_to(base) and path != base else path.name


def _table(parts: Sequence[ExternalSlice], marks: Sequence[bytes]) -> SliceTable:
    digests = b"".join(
        hashlib.sha256(marks[p.file] + p.start.to_bytes(8, "little") + p.count.to_bytes(8, "little")).digest()
        for p in parts
    )
    return SliceTable(
        names=pa.array([p.name.encode("utf-8", "replace").decode() for p in parts], pa.string()),
        bytes=np.array([p.num_bytes for p in parts], np.int64),
        sha256=np.frombuffer(digests, np.uint8).reshape(-1, 32),
        count=np.array([p.count for p in parts], np.int64),
        documents=np.array([p.documents for p in parts], np.int64),
        chunk_bytes=max((1, *(p.num_bytes for p in parts))),
    )
