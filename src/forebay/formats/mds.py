"""MosaicML's MDS, version 2: index.json and shards, raw or compressed, of which one column is tokens.

A shard, little endian: u32 n samples, u32 offsets [n + 1] from the file's first byte, the writer's settings as JSON,
the samples. A sample: u32 size of each column that has no fixed size, then the columns. An `ndarray` column: u8 type
unless said in the encoding, u8 (dimensions << 2 | log2 of a size's bytes) and the sizes unless said, the values.
Source: mosaicml-streaming 0.10, streaming/base/format/mds.

Hides: how tokens are found without reading the samples (where one column alone has no fixed size, the offsets tell all:
4 bytes a sample are read when opening), and the making of one stream of them. One sample is one document; one shard one
slice. A raw shard whose only column is an `ndarray` of fixed type and shape is a view of the map; any other is copied
when its slice opens (and decompressed, and its hash checked), about the size of its tokens in memory.
"""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from forebay.errors import DatasetError, UsageError
from forebay.formats.foreign import (
    U64,
    ForeignDataset,
    Part,
    as_tokens,
    fingerprint,
    head_of,
    relative,
    size_of,
    stored_as,
    token_kind,
)
from forebay.formats.mds_shards import (
    Column,
    Shard,
    Stored,
    can_hash,
    check_hashes,
    count_tokens,
    decompress,
    file_of,
    offsets_of,
    places,
)

INDEX_FILE = "index.json"
_MOST_INDEX_BYTES = 1 << 30
_MOST_SHARD_BYTES = (1 << 32) - 1  # Offsets are u32.
_NAMES = ("tokens", "input_ids")
_VALUES = {
    "uint8": "u1",
    "uint16": "<u2",
    "int16": "<i2",
    "uint32": "<u4",
    "int32": "<i4",
    "uint64": "<u8",
    "int64": "<i8",
}


class MdsDataset(ForeignDataset):
    """The shards of one directory, in the index's order."""

    def __init__(self, path: Path, dtype: Any = None, column: str | None = None) -> None:
        self._shards = read_index(path, dtype, column)
        if not self._shards:
            raise DatasetError(f"{path / INDEX_FILE}: expected at least one shard, got none.")
        with ThreadPoolExecutor(16) as pool:
            counts = list(pool.map(count_tokens, self._shards))
        self._kinds = [kind for kind, _ in counts]
        kinds = {stored_as(kind) for kind in self._kinds}
        if len(kinds) != 1:
            raise DatasetError(
                f"{path}: expected shards of one type of token, got {sorted(map(str, set(self._kinds)))}."
            )
        parts = [
            Part(i, relative(path, shard.raw.path), 0, count, shard.samples, (file_of(shard) or shard.raw).num_bytes)
            for i, (shard, (_, count)) in enumerate(zip(self._shards, counts))
        ]
        files = [shard.raw.path for shard in self._shards]
        with ThreadPoolExecutor(16) as pool:
            marks = list(pool.map(lambda shard: _mark_of(shard, len(files)), self._shards))
        first = self._shards[0].column
        facts = {"column": first.name, "encodings": sorted({shard.column.encoding for shard in self._shards})}
        super().__init__(path, "mds", kinds.pop(), files, marks, parts, facts)

    def _is_there(self, file: int) -> bool:
        return file_of(self._shards[file]) is not None

    def _mark(self, file: int) -> bytes:
        shard = self._shards[file]
        stored = file_of(shard)
        if stored is not None and stored.hashes:
            check_hashes(stored, hash_all=True)
        return _mark_of(shard, len(self.files))

    def _hash_checks(self) -> tuple[str, ...]:
        files = [stored for shard in self._shards if (stored := file_of(shard)) is not None]
        names = [next((name for name in stored.hashes if can_hash(name)), "") for stored in files]
        return (f"{' and '.join(sorted(set(names)))} of every shard",) if names and all(names) else ()

    def _read(self, part: Part) -> tuple[NDArray[Any], U64]:
        shard, kind = self._shards[part.file], self._kinds[part.file]
        column, stored = shard.column, file_of(shard)
        if stored is None:
            raise DatasetError(f"{shard.raw.path}: expected it, or its compressed form, got neither. Fetch it again.")
        plain = stored is shard.raw
        if plain:
            memory = self._map(stored.path, stored.num_bytes)
        else:
            memory = np.frombuffer(decompress(shard), np.uint8)
        offsets = offsets_of(shard, memory.data, len(memory))
        begins, ends = places(shard, memory, offsets, kind)
        documents = np.cumsum((ends - begins) // kind.itemsize).astype(np.uint64)
        if plain and len(column.sizes) == 1 and column.length is not None:
            raw = memory[int(begins[0]) : int(ends[-1])] if len(begins) else memory[:0]
        else:
            check_hashes(stored)
            pieces = [memory[a:b] for a, b in zip(begins.tolist(), ends.tolist())]
            raw = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
        return as_tokens(raw.view(kind), shard.raw.path), documents


def read_index(folder: Path, dtype: Any = None, column: str | None = None) -> list[Shard]:
    """The shards that index.json lists.

    Raises:
        DatasetError: If it is no such index, names files outside its directory, or has no column of tokens.
        UsageError: If the type of the tokens must be said.
    """
    path = folder / INDEX_FILE
    if size_of(path) > _MOST_INDEX_BYTES:
        raise DatasetError(f"{path}: expected at most {_MOST_INDEX_BYTES} bytes, got {size_of(path)}.")
    try:
        index = orjson.loads(head_of(path, _MOST_INDEX_BYTES))
    except ValueError as error:
        raise DatasetError(f"{path}: expected JSON, got {error}. Fetch it again.") from error
    if not isinstance(index, dict) or index.get("version") != 2 or not isinstance(index.get("shards"), list):
        raise DatasetError(f"{path}: expected MosaicML's index of version 2, with shards, got another. Write it again.")
    shards = [_shard(path, i, entry, dtype, column) for i, entry in enumerate(index["shards"])]
    if len({shard.column.name for shard in shards}) > 1:
        raise DatasetError(f"{path}: expected the same columns in every shard, got others.")
    return shards


def is_index(path: Path) -> bool:
    """Whether a directory's index.json may be MosaicML's, by its first 4 KiB and last bytes."""
    index = path / INDEX_FILE
    if not index.is_file():
        return False
    head = head_of(index, 4096).lstrip()
    return head[:1] == b"{" and b'"shards"' in head + head_of(index, 4096, max(0, size_of(index) - 4096))


def _shard(path: Path, i: int, entry: Any, dtype: Any, column: str | None) -> Shard:
    def bad(expected: str, got: object) -> DatasetError:
        return DatasetError(f"{path}: expected {expected} of shard {i}, got {str(got)[:200]}. Write or fetch it again.")

    if not isinstance(entry, dict) or entry.get("format") != "mds" or entry.get("version") != 2:
        raise bad("format 'mds' and version 2", entry)
    columns = tuple(entry.get(f"column_{what}") for what in ("names", "encodings", "sizes"))
    if not all(isinstance(one, list) for one in columns) or len({len(one) for one in columns}) != 1:  # type: ignore[arg-type]
        raise bad("column_names, _encodings and _sizes of one length", columns)
    names, encodings, sizes = columns
    assert names is not None and encodings is not None and sizes is not None
    if not all(isinstance(one, str) for one in [*names, *encodings]):
        raise bad("column_names and _encodings of strings", columns)
    if not all(one is None or _is_size(one, _MOST_SHARD_BYTES) for one in sizes):
        raise bad("column_sizes of numbers or null", sizes)
    samples, compression = entry.get("samples"), entry.get("compression")
    if not isinstance(samples, int) or not _is_size(samples, _MOST_SHARD_BYTES // 4):
        raise bad("samples: a number", samples)
    raw, zipped = (_stored(path.parent, entry.get(key)) for key in ("raw_data", "zip_data"))
    if raw is None or (entry.get("zip_data") is not None and zipped is None):
        raise bad("raw_data and zip_data of basename (inside the directory), bytes and hashes", entry.get("raw_data"))
    if zipped is not None and (not isinstance(compression, str)):
        raise bad("compression: a name", compression)
    # The reference takes a size of 0 for none.
    found = _column(path, names, encodings, tuple(size or None for size in sizes), dtype, column)
    return Shard(samples, raw, zipped, str(compression or "").partition(":")[0], found)


def _stored(folder: Path, entry: Any) -> Stored | None:
    if not isinstance(entry, dict):
        return None
    name, num_bytes, hashes = entry.get("basename"), entry.get("bytes"), entry.get("hashes") or {}
    if not isinstance(name, str) or not isinstance(hashes, dict):
        return None
    if not isinstance(num_bytes, int) or not _is_size(num_bytes, _MOST_SHARD_BYTES):
        return None
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or not name.isprintable():
        return None
    return Stored(folder.joinpath(*parts), num_bytes, {str(k): str(v) for k, v in hashes.items()})


def _column(
    path: Path, names: list[str], encodings: list[str], sizes: tuple[int | None, ...], dtype: Any, column: str | None
) -> Column:
    arrays = [n for n, e in zip(names, encodings) if e.split(":")[0] == "ndarray"]
    wanted = (
        [column] if column is not None else [n for n in _NAMES if n in names] or (arrays if len(arrays) == 1 else [])
    )
    if not wanted or wanted[0] not in names:
        raise DatasetError(
            f"{path}: expected a column of tokens ({column or ' or '.join(_NAMES)}), got "
            f"{', '.join(f'{n}: {e}' for n, e in zip(names, encodings))[:500]}. Say column=…, or tokenize text first "
            "with `forebay prepare`."
        )
    at = names.index(wanted[0])
    kind, length = _encoding(path, wanted[0], encodings[at], dtype)
    if length is not None and kind is not None and sizes[at] != length * kind.itemsize:
        raise DatasetError(f"{path}: expected {length * kind.itemsize} bytes of column {wanted[0]}, got {sizes[at]}.")
    return Column(wanted[0], encodings[at], kind, length, at, sizes)


def _encoding(path: Path, name: str, encoding: str, dtype: Any) -> tuple[np.dtype[Any] | None, int | None]:
    what, *rest = encoding.split(":")
    if what == "bytes" and not rest:
        if dtype is None:
            raise UsageError(
                f"{path}: column {name} is bytes, of no known type. Say it: dtype='int64' (LLM Foundry's), 'uint16' …"
            )
        return token_kind(dtype), None
    if what != "ndarray" or len(rest) > 2 or (rest and rest[0] not in _VALUES):
        raise DatasetError(f"{path}: expected column {name} of integers (ndarray or bytes), got {encoding!r}.")
    kind = np.dtype(_VALUES[rest[0]]) if rest else None
    if len(rest) < 2:
        return kind, None
    shape = rest[1].split(",")
    if not all(n.isascii() and n.isdigit() and 0 < len(n) < 10 for n in shape):
        raise DatasetError(f"{path}: expected a shape of numbers in {encoding!r}.")
    return kind, math.prod(map(int, shape))


def _mark_of(shard: Shard, num_files: int) -> bytes:
    """Of the raw bytes' hashes where the index has some, so that it is the same for raw and compressed shards."""
    stored = file_of(shard)
    if shard.raw.hashes:
        text = repr((shard.raw.num_bytes, shard.samples, sorted(shard.raw.hashes.items())))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return fingerprint((stored or shard.raw).path, num_files)


def _is_size(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
