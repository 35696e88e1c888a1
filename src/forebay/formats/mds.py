"""MosaicML's MDS, version 2: index.json and shards, raw or compressed, of which one column is tokens.

A shard is a block (see `formats.blocks`) whose settings are JSON. A column of tokens is `bytes`, or an `ndarray` whose
encoding names its type: u8 (dimensions << 2 | log2 of a size's bytes) and the sizes unless named, the values.
Source: mosaicml-streaming 0.10, streaming/base/format/mds.

Where one column alone has no fixed size, the offsets tell where the tokens are, and 4 bytes a sample are read when
opening. One sample is one document; one shard one
slice. A raw shard whose only column is an `ndarray` of fixed type and shape is a view of the map; any other is copied
when its slice opens (and decompressed, and its hash checked), about the size of its tokens in memory.
"""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import DatasetError, UsageError
from forebay.formats import blocks
from forebay.formats.base import Format
from forebay.formats.blocks import (
    I64,
    INDEX_FILE,
    MAX_BLOCK_BYTES,
    Block,
    damaged,
    inflate,
    is_size,
    read_offsets,
)
from forebay.formats.external import (
    U64,
    ExternalDataset,
    ExternalSlice,
    as_tokens,
    common_dtype,
    file_size,
    fingerprint,
    map_file,
    read_head,
    reading,
    shown_name,
    token_dtype,
)
from forebay.formats.report import Report, check_external
from forebay.storage.compression import check_unpacked, limit_large_blocks

_NAMES = ("tokens", "input_ids")
_RECORD_BYTES = 4 + 4 + 9  # Of a sample: an offset, a size, a shape of at most 8 bytes and the byte before it.
_VALUES = ("uint8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_MAX_SAMPLES = 1 << 20  # Of a compressed shard of few bytes.


@dataclass(frozen=True)
class Stored:
    """A shard's file: raw or compressed."""

    path: Path
    num_bytes: int
    hashes: dict[str, str]


@dataclass(frozen=True)
class TokenColumn:
    """Where the tokens stand in a sample."""

    name: str
    encoding: str  # As the writer's.
    kind: np.dtype[Any]  # Type of a token.
    length: int | None  # Tokens in a sample, where fixed.
    index: int  # Among all columns.
    sizes: tuple[int | None, ...]  # Bytes of each column, None where each sample says it.

    @property
    def has_header(self) -> bool:
        """Whether each value begins with its type or shape."""
        return self.encoding.startswith("ndarray") and self.length is None


@dataclass(frozen=True)
class MdsShard:
    """One entry of the index, checked."""

    samples: int
    raw: Stored
    zipped: Stored | None
    compression: str
    column: TokenColumn

    @property
    def files(self) -> tuple[Stored | None, ...]:
        """The files that may hold its samples."""
        return self.raw, self.zipped


class Mds(Format):
    """Directories of MDS shards."""

    name = "mds"

    def is_dataset(self, folder: Path) -> bool:
        return blocks.is_index(folder, b'"shards"')

    def open_tokens(self, path: Path, dtype: Any = None, column: str | None = None) -> ExternalDataset:
        return MdsDataset(path, dtype, column)

    def check(self, path: Path, report: Report) -> None:
        try:
            check_external(report, MdsDataset(path, report.options.dtype))
        except UsageError as error:
            report.add_finding("unclear", "index", str(error))
        except DatasetError as error:
            report.add_finding("index-mismatch", "index", str(error))


class MdsDataset(ExternalDataset):
    """The shards of one directory, in the index's order."""

    def __init__(self, path: Path, dtype: Any = None, column: str | None = None) -> None:
        self._shards = shards = read_index(path, dtype, column)
        if not shards:
            raise DatasetError(f"{path / INDEX_FILE}: expected at least one shard, got none.")
        with ThreadPoolExecutor(16) as pool:
            counts = list(pool.map(_count, shards))
            marks = list(pool.map(lambda shard: fingerprint(file_of(shard).path, len(shards)), shards))
        parts = [
            ExternalSlice(i, shown_name(path, shard.raw.path), 0, count, shard.samples, file_of(shard).num_bytes)
            for i, (shard, count) in enumerate(zip(shards, counts))
        ]
        encodings = sorted({shard.column.encoding for shard in shards})
        settings = {"column": shards[0].column.name, "encodings": encodings}
        files = [shard.raw.path for shard in shards]
        super().__init__(
            path, "mds", common_dtype(path, (shard.column.kind for shard in shards)), files, marks, parts, settings
        )

    def _exists(self, file: int) -> bool:
        return any(stored is not None and stored.path.is_file() for stored in self._shards[file].files)

    def _mark(self, file: int) -> bytes:
        stored = file_of(self._shards[file])
        check_hashes(stored)
        return fingerprint(stored.path, len(self.files))

    def _hash_checks(self) -> tuple[str, ...]:
        files = [file_of(shard) for i, shard in enumerate(self._shards) if self._exists(i)]
        names = [_hash_of(stored) for stored in files]
        return (f"{' and '.join(sorted(set(names)))} of every shard",) if names and all(names) else ()

    def _read(self, part: ExternalSlice) -> tuple[NDArray[Any], U64]:
        shard, kind = self._shards[part.file], self._shards[part.file].column.kind
        stored = file_of(shard)
        is_raw = stored is shard.raw
        memory = self._map(stored.path, stored.num_bytes) if is_raw else np.frombuffer(decompress(shard), np.uint8)
        block = _block(shard, memory)
        begins, stops = _places(shard, block)
        if not is_raw or len(shard.column.sizes) > 1 or shard.column.length is None:
            check_hashes(stored)
        documents = np.cumsum((stops - begins) // kind.itemsize).astype(np.uint64)
        return as_tokens(block.values(begins, stops).view(kind), shard.raw.path), documents


def read_index(folder: Path, dtype: Any = None, column: str | None = None) -> list[MdsShard]:
    """Return the shards that index.json lists."""
    path, index = folder / INDEX_FILE, blocks.read_index(folder)
    if index.get("version") != 2 or not isinstance(index.get("shards"), list):
        raise DatasetError(f"{path}: expected MosaicML's index of version 2, with shards, got another. Write it again.")
    shards = [_shard(path, i, entry, dtype, column) for i, entry in enumerate(index["shards"])]
    if len({shard.column.name for shard in shards}) > 1:
        raise DatasetError(f"{path}: expected the same columns in every shard, got others.")
    return shards


def _shard(path: Path, i: int, entry: Any, dtype: Any, column: str | None) -> MdsShard:
    def invalid(expected: str, got: object) -> DatasetError:
        return DatasetError(f"{path}: expected {expected} of shard {i}, got {str(got)[:200]}. Write or fetch it again.")

    if not isinstance(entry, dict) or entry.get("format") != "mds" or entry.get("version") != 2:
        raise invalid("format 'mds' and version 2", entry)
    columns = tuple(entry.get(f"column_{what}") for what in ("names", "encodings", "sizes"))
    if not all(isinstance(value, list) for value in columns) or len({len(value) for value in columns}) != 1:  # type: ignore[arg-type]
        raise invalid("column_names, _encodings and _sizes of one length", columns)
    names, encodings, sizes = columns
    assert names is not None and encodings is not None and sizes is not None
    if not all(isinstance(value, str) for value in [*names, *encodings]):
        raise invalid("column_names and _encodings of strings", columns)
    if not all(value is None or is_size(value) for value in sizes):
        raise invalid("column_sizes of numbers or null", sizes)
    samples, compression = entry.get("samples"), entry.get("compression")
    if not isinstance(samples, int) or not is_size(samples, MAX_BLOCK_BYTES // 4):
        raise invalid("samples: a number", samples)
    raw, zipped = (_stored(path.parent, entry.get(key)) for key in ("raw_data", "zip_data"))
    if raw is None or (entry.get("zip_data") is not None and zipped is None):
        raise invalid(
            "raw_data and zip_data of basename (inside the directory), bytes and hashes", entry.get("raw_data")
        )
    if zipped is not None and (not isinstance(compression, str)):
        raise invalid("compression: a name", compression)
    # The reference takes a size of 0 for none.
    token_column = _column(path, names, encodings, tuple(size or None for size in sizes), dtype, column)
    return MdsShard(samples, raw, zipped, str(compression or "").partition(":")[0], token_column)


def _stored(folder: Path, entry: Any) -> Stored | None:
    if not isinstance(entry, dict):
        return None
    path = blocks.path_inside(folder, entry.get("basename"))
    num_bytes, hashes = entry.get("bytes"), entry.get("hashes") or {}
    if path is None or not isinstance(num_bytes, int) or not is_size(num_bytes) or not isinstance(hashes, dict):
        return None
    return Stored(path, num_bytes, {str(k): str(v) for k, v in hashes.items()})


def _column(
    path: Path, names: list[str], encodings: list[str], sizes: tuple[int | None, ...], dtype: Any, column: str | None
) -> TokenColumn:
    arrays = [n for n, e in zip(names, encodings) if e.split(":")[0] == "ndarray"]
    chosen = (
        [column] if column is not None else [n for n in _NAMES if n in names] or (arrays if len(arrays) == 1 else [])
    )
    if not chosen or chosen[0] not in names:
        raise DatasetError(
            f"{path}: expected a column of tokens ({column or ' or '.join(_NAMES)}), got "
            f"{', '.join(f'{n}: {e}' for n, e in zip(names, encodings))[:500]}. Say column=…, or tokenize text first "
            "with `forebay prepare`."
        )
    index = names.index(chosen[0])
    kind, length = _encoding(path, chosen[0], encodings[index], dtype)
    if length is not None and sizes[index] != length * kind.itemsize:
        raise DatasetError(
            f"{path}: expected {length * kind.itemsize} bytes of column {chosen[0]}, got {sizes[index]}."
        )
    return TokenColumn(chosen[0], encodings[index], kind, length, index, sizes)


def _encoding(path: Path, name: str, encoding: str, dtype: Any) -> tuple[np.dtype[Any], int | None]:
    what, *rest = encoding.split(":")
    if what == "bytes" and not rest:
        if dtype is None:
            raise UsageError(
                f"{path}: column {name} is bytes, of no known type. Say it: dtype='int64' (LLM Foundry's), 'uint16' …"
            )
        return token_dtype(dtype), None
    if what != "ndarray" or len(rest) not in (1, 2) or rest[0] not in _VALUES:
        raise DatasetError(f"{path}: expected column {name} of integers (ndarray:uint16 or bytes), got {encoding!r}.")
    kind = np.dtype(rest[0]).newbyteorder("<")
    if len(rest) < 2:
        return kind, None
    shape = rest[1].split(",")
    if not all(n.isascii() and n.isdigit() and 0 < len(n) < 10 for n in shape):
        raise DatasetError(f"{path}: expected a shape of numbers in {encoding!r}.")
    return kind, math.prod(map(int, shape))


def decompress(shard: MdsShard) -> bytes:
    """Return the raw bytes of a compressed shard, of exactly the index's size."""
    assert shard.zipped is not None
    check_unpacked(shard.zipped.path, shard.zipped.num_bytes, shard.raw.num_bytes + 1)
    if shard.samples > max(_MAX_SAMPLES, shard.zipped.num_bytes):  # Empty ones: each costs memory here.
        raise DatasetError(f"{shard.zipped.path}: expected at most {_MAX_SAMPLES} samples, got {shard.samples}.")
    data = read_head(shard.zipped.path, shard.zipped.num_bytes + 1)
    if len(data) != shard.zipped.num_bytes:
        raise DatasetError(
            f"{shard.zipped.path}: expected {shard.zipped.num_bytes} bytes, got {len(data)}. Fetch it again."
        )
    return inflate(shard.zipped.path, data, shard.compression, shard.raw.num_bytes)


def check_hashes(stored: Stored) -> None:
    """Compare a file with the first of the index's hashes that hashlib has. Raises DatasetError if they differ."""
    name = _hash_of(stored)
    if not name:
        return
    with reading(stored.path), stored.path.open("rb") as file:
        digest = hashlib.file_digest(file, name).hexdigest()
    if digest != stored.hashes[name]:
        raise DatasetError(f"{stored.path}: expected {name} {stored.hashes[name]}, got {digest}. Fetch it again.")


def _hash_of(stored: Stored) -> str:
    return next((name for name in stored.hashes if name in hashlib.algorithms_guaranteed and "shake" not in name), "")


def file_of(shard: MdsShard) -> Stored:
    """Return the file of a shard that exists, raw before compressed. Raises DatasetError if neither is."""
    for stored in shard.files:
        if stored is not None and stored.path.is_file():
            return stored
    raise DatasetError(f"{shard.raw.path}: expected it, or its compressed form, got neither. Fetch it again.")


def _count(shard: MdsShard) -> int:
    """The number of a shard's tokens, from its offsets where these tell, else from its samples."""
    column, stored = shard.column, file_of(shard)
    if file_size(stored.path) != stored.num_bytes:
        raise DatasetError(
            f"{stored.path}: expected {stored.num_bytes} bytes, got {file_size(stored.path)}. Fetch it again."
        )
    if column.length is not None:
        return shard.samples * column.length
    width, is_raw = column.kind.itemsize, stored is shard.raw
    if not is_raw or [i for i, size in enumerate(column.sizes) if size is None] != [column.index]:
        with limit_large_blocks(0 if is_raw else shard.raw.num_bytes):
            memory = map_file(stored.path) if is_raw else np.frombuffer(decompress(shard), np.uint8)
            begins, stops = _places(shard, _block(shard, memory))
            return int((stops - begins).sum()) // width
    head = read_head(stored.path, 4 * (shard.samples + 2))
    offsets = read_offsets(stored.path, head, shard.samples, shard.raw.num_bytes, has_settings=True)
    values = np.diff(offsets) - 4 - sum(size or 0 for size in column.sizes)
    if column.has_header:
        values = _without_header(values, width)
    if len(values) and (int(values.min()) < 0 or bool((values % width).any())):
        raise damaged(stored.path, f"whole tokens {column.kind} in every sample", "others")
    return int(values.sum()) // width


def _block(shard: MdsShard, memory: Any) -> Block:
    path = shard.raw.path
    return Block(path, memory, read_offsets(path, memory, shard.samples, len(memory), has_settings=True))


def _without_header(values: I64, width: int) -> I64:
    """Bytes of the values of one-dimensional arrays, given those with the shape before them; -1 where none fits.

    The byte of dimensions, and 1, 2, 4 or 8 of the size, the fewest that hold it: so one of the four fits.
    """
    sizes = np.full(len(values), -1, np.int64)
    for size_bytes in (1, 2, 4, 8):
        remaining = values - 1 - size_bytes
        count = remaining // width
        fits = (remaining >= 0) & (remaining % width == 0) & (count < 1 << min(8 * size_bytes, 62))
        fits &= (count >= 1 << 4 * size_bytes) | (size_bytes == 1)
        sizes[fits & (sizes < 0)] = remaining[fits & (sizes < 0)]
    return sizes


def _places(shard: MdsShard, block: Block) -> tuple[I64, I64]:
    column, kind = shard.column, shard.column.kind
    begins, stops = block.column(column.index, column.sizes, column.name)
    if column.has_header:
        shapes = block.numbers(begins, 1, stops)
        if (shapes >> 2 != 1).any():
            raise damaged(block.path, "vectors of tokens", f"{int(shapes.max()) >> 2} dimensions")
        begins = begins + 1 + (1 << (shapes & 3))
    if (begins > stops).any() or ((stops - begins) % kind.itemsize).any():
        raise damaged(block.path, f"whole tokens {kind} in every sample", "others")
    return begins, stops
