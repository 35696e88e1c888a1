"""The manifest of a dataset and the table of its slices: reading, writing and validation, as untrusted input.

The dataset id is the SHA-256 of the manifest's canonical JSON without the name. The manifest has the SHA-256 of the
table (`slices.parquet`) and of the documents' lengths, the table the id of each slice (`chunks`), so the id fixes every
byte, in any directory and under any name. A row of the table costs about 60 bytes on disk and 100 in memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from forebay.arrays import I32, I64, U8, DType
from forebay.base import Json
from forebay.dataset.chunks import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, HashedPieces
from forebay.dataset.parquet_pages import Footer, pages, read_footer
from forebay.errors import DatasetError, UsageError

# The manifest has a field `bytes`, which hides the type's name inside the classes.
Bytes: TypeAlias = bytes

FORMAT_VERSION = 3
MANIFEST_FILE = "manifest.json"
TABLE_FILE = "slices.parquet"
LENGTHS_FILE = "lengths.zst"
"""The number of tokens of each document, in the order of the slices; see `lengths`."""
DOCUMENTS_FILE = "documents.parquet"
"""Optional: id and source of each document, in the order of their ends; fixed by the manifest's lineage."""
MAX_FREE_ROWS = 1 << 16
MAX_FREE_BYTES = 64 << 20
MAX_EXPANSION = 16  # bytes in memory for each byte of the file, beyond MAX_FREE_BYTES
MAX_NAME_BYTES = 1024
_MAX_CHUNKS = 1 << 31  # 128 TiB in chunks of 64 KiB
MAX_MANIFEST_BYTES = 256 << 20  # A lineage of a million inputs is about 150 MB.

LAYOUTS = ("tokens", "rows")
TOKEN_DTYPES: dict[str, DType] = {"U16": np.dtype("<u2"), "U32": np.dtype("<u4")}
_COUNTS = ("vocab_size", "tokens", "rows", "documents", "slices", "bytes", "lengths_bytes")
# An empty, `.` or `..` part (so also a leading, trailing or double slash), a backslash, a control character.
_UNSAFE_NAME = re.compile(r"(?:^|/)\.{0,2}(?:/|\Z)|[\\\x00-\x1f\x7f]")
_ENCODINGS = (0, 2, 8)  # PLAIN, and a dictionary's indexes
_COLUMNS = ("name", "bytes", "sha256", "count", "documents")
_PHYSICAL = list(zip(_COLUMNS, (6, 2, 7, 2, 2), (0, 0, 32, 0, 0)))  # BYTE_ARRAY, INT64, FIXED_LEN_BYTE_ARRAY


@dataclass(frozen=True)
class Manifest:
    """A dataset's description.

    `chunk_bytes` is the size of the chunks that are verified by themselves. `dtype` is `U16` or `U32` for layout
    `tokens` and empty for `rows`; `tokens` is 0 for `rows`, `rows` is 0 for `tokens`. `bytes` counts the slice files
    only. `lengths_bytes` and `lengths_sha256` are those of the file of the documents' lengths (`lengths`), 0 and empty
    for `rows`. `lineage["files"]`, if present, maps other files of the dataset (such as tokenizer.json) to their
    sha256, so that the id fixes them too.

    Raises:
        DatasetError: If a field is of another type or the fields contradict each other.
    """

    format: int
    name: str
    layout: str
    dtype: str
    tokenizer: str
    vocab_size: int
    eos_id: int | None
    tokens: int
    rows: int
    documents: int
    slices: int
    bytes: int
    table_sha256: str
    lineage: Json
    chunk_bytes: int
    lengths_bytes: int = 0
    lengths_sha256: str = ""

    def __post_init__(self) -> None:
        _check_manifest(self)

    @classmethod
    def of(
        cls,
        table: SliceTable,
        lineage: Json,
        *,
        name: str,
        layout: str,
        dtype: str = "",
        tokenizer: str = "",
        vocab_size: int = 0,
        eos_id: int | None = None,
        table_sha256: str = "",
        lengths: HashedPieces | None = None,
    ) -> Manifest:
        """The manifest of a dataset of these slices, with the table's totals and hash, and those of `lengths`."""
        totals = {"documents": int(table.documents.sum()), "slices": len(table), "bytes": int(table.bytes.sum())}
        totals |= {"tokens": 0, "rows": 0, layout: int(table.count.sum())}
        name = printable_name(name)
        return cls(
            format=FORMAT_VERSION, name=name, layout=layout, dtype=dtype, tokenizer=tokenizer, vocab_size=vocab_size,
            eos_id=eos_id, table_sha256=table_sha256 or hashlib.sha256(table.to_parquet()).hexdigest(),
            lineage=lineage, chunk_bytes=table.chunk_bytes, lengths_bytes=lengths.num_bytes if lengths else 0,
            lengths_sha256=lengths.sha256 if lengths else "", **totals,
        )  # fmt: skip

    @property
    def id(self) -> str:
        """The dataset id, in hex."""
        plain = {**vars(self)}
        del plain["name"]
        return hashlib.sha256(_canonical(plain)).hexdigest()

    def to_json(self) -> Bytes:
        """Canonical bytes: sorted keys, indent 1, UTF-8, a newline; `check` is their sha256 without it."""
        plain = vars(self)
        return _canonical({**plain, "check": hashlib.sha256(_canonical(plain)).hexdigest()})

    @classmethod
    def from_json(cls, data: Bytes) -> Manifest:
        """The manifest in `data`.

        Raises:
            DatasetError: If it is not canonical JSON, has another format version, lacks or adds a field, or its own
                check does not match (a byte was changed).
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise _manifest_error(f"at most {MAX_MANIFEST_BYTES} bytes", f"{len(data)} bytes")
        try:
            plain = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _manifest_error("JSON", f"{error}. Fetch or prepare the dataset again") from error
        if not isinstance(plain, dict):
            raise _manifest_error("a JSON object", type(plain).__name__)
        _check_format(plain.get("format"))
        check = plain.pop("check", None)
        names = {field.name for field in fields(cls)}
        if set(plain) != names:
            got = f"missing {sorted(names - set(plain))}, extra {sorted(set(plain) - names)}"
            raise _manifest_error(f"fields {sorted(names)}", got)
        manifest = cls(**plain)
        try:
            canonical = manifest.to_json()
        except (ValueError, RecursionError) as error:
            raise _manifest_error("values that JSON can hold", str(error)) from error
        if canonical != data:
            raise _manifest_error("canonical JSON with its own check", f"check {check!r}: a byte was changed")
        if (manifest.layout == "tokens") != bool(manifest.lengths_sha256):
            expected = "lengths_sha256 of layout tokens alone"
            raise _manifest_error(expected, f"{manifest.lengths_sha256!r} of layout {manifest.layout}")
        return manifest

    @property
    def listed_files(self) -> dict[str, str]:
        """The files other than slices and the table that the id fixes: name to SHA-256 in hex."""
        files = self.lineage.get("files", {})
        if not isinstance(files, dict):
            files = {}
        listed = {name: str(sha) for name, sha in files.items() if "/" not in name and name not in ("", ".", "..")}
        return listed | ({LENGTHS_FILE: self.lengths_sha256} if self.lengths_sha256 else {})

    def read_table(self, data: Bytes, location: object) -> SliceTable:
        """The table in `data`. Raises DatasetError unless it has this manifest's hash and totals."""
        if (got := hashlib.sha256(data).hexdigest()) != self.table_sha256:
            raise DatasetError(
                f"{location}: expected sha256 {self.table_sha256}, got {got}. Fetch or publish it again."
            )
        table = SliceTable.from_parquet(data, self.chunk_bytes)
        total = self.tokens if self.layout == "tokens" else self.rows
        # Python integers where 64 bits might overflow: a hostile table may contain anything.
        expected = {"slices": self.slices, "bytes": self.bytes, self.layout: total}
        actual = {"slices": len(table), "bytes": _sum(table.bytes), self.layout: _sum(table.count)}
        if self.layout == "tokens":
            expected["documents"], actual["documents"] = self.documents, _sum(table.documents)
        if expected != actual:
            raise DatasetError(
                f"{TABLE_FILE}: expected the manifest's totals {expected}, got {actual}. Fetch both files again."
            )
        # Readers allocate for so many chunks and tokens before they see a slice.
        if (chunks := _sum(-(-table.bytes // self.chunk_bytes))) > _MAX_CHUNKS or self.tokens > self.bytes:
            raise DatasetError(
                f"{location}: expected at most {_MAX_CHUNKS} chunks and a token a byte, got {chunks} chunks, "
                f"{self.bytes} bytes and {self.tokens} tokens. Fetch it again."
            )
        return table


@dataclass(frozen=True)
class SliceInfo:
    """One row of the table: `count` is tokens or rows by the layout; `sha256` is the slice's id, in hex.

    `offset`: bytes of a file before its first chunk, which `bytes` does not count; none for a slice.
    """

    index: int
    name: str
    bytes: int
    sha256: str
    count: int
    documents: int
    chunk_bytes: int = MAX_CHUNK_BYTES
    offset: int = 0


@dataclass(frozen=True)
class SliceTable:
    """The slices in their order, as columns of S values."""

    names: pa.StringArray  # Arrow string array [S]: paths relative to the dataset's directory, `/` between parts
    bytes: I64  # [S], size of the file
    sha256: U8  # [S, 32], the slice's id: the root of the tree over its chunks
    count: I64  # [S], tokens or rows
    documents: I64  # [S], documents that end in the slice (0 for rows)
    chunk_bytes: int = MAX_CHUNK_BYTES  # of the manifest; of another tool's format the bytes of its largest slice

    @classmethod
    def from_rows(cls, rows: Sequence[SliceInfo], chunk_bytes: int = MAX_CHUNK_BYTES) -> SliceTable:
        """A table of these rows, in this order (`index` and their `chunk_bytes` are ignored)."""
        table = cls(
            names=pa.array([row.name for row in rows], pa.string()),
            bytes=np.array([row.bytes for row in rows], np.int64),
            sha256=np.frombuffer(b"".join(bytes.fromhex(row.sha256) for row in rows), np.uint8).reshape(-1, 32),
            count=np.array([row.count for row in rows], np.int64),
            documents=np.array([row.documents for row in rows], np.int64),
            chunk_bytes=chunk_bytes,
        )
        _check_table(table)
        return table

    def __len__(self) -> int:
        return len(self.names)

    def row(self, index: int) -> SliceInfo:
        """Slice `index`, in [0, S)."""
        if not 0 <= index < len(self):
            raise UsageError(f"slice index: expected 0 to {len(self) - 1}, got {index}")
        sha256, count = self.sha256[index].tobytes().hex(), int(self.count[index])
        name, size = self.names[index].as_py(), int(self.bytes[index])
        return SliceInfo(index, name, size, sha256, count, int(self.documents[index]), self.chunk_bytes)

    def to_parquet(self) -> Bytes:
        """Parquet bytes; the same for the same table and version of pyarrow (which writes itself in)."""
        hashes = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(32), len(self), [None, pa.py_buffer(np.ascontiguousarray(self.sha256))]
        )
        columns = [self.names, self.bytes, hashes, self.count, self.documents]
        table = pa.table(dict(zip(_COLUMNS, [pa.array(column) for column in columns])))
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd", row_group_size=65_536, store_schema=False)
        return sink.getvalue()

    @classmethod
    def from_parquet(cls, data: Bytes, chunk_bytes: int = MAX_CHUNK_BYTES) -> SliceTable:
        """The table in `data`.

        DatasetError if it is not Parquet, lacks a column or has one of another type, holds nulls or negative numbers,
        names a file twice, or names one outside the dataset's directory.
        """
        try:
            _check_expansion(read_footer(data), data)
            # Not read_table, which imports three times as much.
            # From a buffer: a Python file may be released by a thread that outlives the interpreter, which aborts.
            file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=["name"])
            columns = _read_columns(file, len(data))
        except (pa.ArrowException, KeyError, OSError, ValueError) as error:
            raise DatasetError(f"{TABLE_FILE}: expected Parquet with columns {_COLUMNS}, got {error}") from error
        names, sizes, hashes, count, documents = columns
        start = hashes.offset * 32
        raw = np.frombuffer(hashes.buffers()[1] or b"", np.uint8)[start : start + 32 * len(hashes)]
        result = cls(names, sizes.to_numpy(), raw.reshape(-1, 32), count.to_numpy(), documents.to_numpy(), chunk_bytes)
        _check_table(result)
        return result


# Tables are untrusted: only what is cheap to read is accepted.


def _check_expansion(footer: Footer, data: bytes) -> None:
    physical = [(column.name, column.type, column.length) for column in footer.columns]
    if physical != _PHYSICAL or not all(column.is_flat for column in footer.columns):
        raise DatasetError(
            f"{TABLE_FILE}: expected flat columns {_PHYSICAL} (name, type, length), got {str(physical)[:300]}. "
            "Fetch the file again."
        )
    num_bytes, num_rows = len(data), sum(rows for rows, _ in footer.groups)
    max_rows = MAX_FREE_ROWS + num_bytes // 4
    if not footer.num_rows == num_rows <= max_rows:
        raise _expands(f"at most {max_rows} rows in {num_bytes} bytes", f"{max(num_rows, footer.num_rows)}")
    free_bytes = MAX_FREE_BYTES + MAX_EXPANSION * num_bytes
    for rows, chunks in footer.groups:
        for chunk in chunks:
            if chunk.num_values != rows:
                raise DatasetError(f"{TABLE_FILE}: expected {rows} values of each column, got {chunk.num_values}.")
            for page in pages(io.BytesIO(data), chunk.start, chunk.stop):
                free_bytes -= page.bytes
                if page.stop > chunk.stop:
                    raise ValueError("a page that ends beyond its column chunk")
                if page.encoding not in _ENCODINGS:
                    raise DatasetError(f"{TABLE_FILE}: expected plain pages or dictionaries, got {page.encoding}.")
                if free_bytes < 0:
                    raise _expands(f"at most {MAX_EXPANSION} bytes for each of its {num_bytes}", "more")


def _read_columns(file: pq.ParquetFile, num_bytes: int) -> list[pa.Array]:
    """Read the columns of all row groups. Names may be dictionary-encoded, so their total length is counted first."""
    kinds = [pa.string(), pa.int64(), pa.binary(32), pa.int64(), pa.int64()]
    read: list[list[pa.Array]] = [[] for _ in kinds]
    free_bytes = MAX_FREE_BYTES + MAX_EXPANSION * num_bytes
    for number in range(file.num_row_groups):
        table = file.read_row_group(number, list(_COLUMNS), use_threads=False)
        for name, kind, chunks in zip(_COLUMNS, kinds, read):
            column = table.column(name)
            if column.null_count:
                raise DatasetError(f"{TABLE_FILE}: expected no nulls, got {column.null_count} ({name!r}).")
            for chunk in column.chunks:
                if pa.types.is_dictionary(chunk.type) and chunk.type.value_type == kind:
                    chunk.validate(full=True)  # its indexes
                    chunk.dictionary.validate(full=True)
                    lengths = _lengths(chunk.dictionary)
                    if len(lengths) and (longest := int(lengths.max())) > MAX_NAME_BYTES:
                        raise _expands(f"names of at most {MAX_NAME_BYTES} bytes", f"one of {longest}")
                    free_bytes -= int(lengths[chunk.indices.to_numpy()].sum(dtype=np.int64))
                    if free_bytes < 0:
                        raise _expands(f"names that fit the file's {num_bytes} bytes", "longer ones")
                    chunk = chunk.dictionary_decode()
                if chunk.type != kind:
                    raise DatasetError(f"{TABLE_FILE}: expected column {name!r} of {kind}, got {chunk.type}.")
                chunks.append(chunk)
    return [pa.concat_arrays(chunks) if chunks else pa.array([], kind) for chunks, kind in zip(read, kinds)]


def _lengths(values: pa.StringArray) -> I32:
    offsets = np.frombuffer(values.buffers()[1] or bytes(4), np.int32)
    return np.diff(offsets[values.offset : values.offset + len(values) + 1])


def _expands(expected: str, got: str) -> DatasetError:
    text = f"{TABLE_FILE}: expected {expected}, got {got}. It would expand in memory; fetch it from another source."
    return DatasetError(text)


def dataset_id(data: bytes) -> str:
    """The id, in hex, of the dataset whose manifest.json holds `data`. Raises DatasetError if it is malformed."""
    return Manifest.from_json(data).id


def _canonical(plain: Json) -> bytes:
    text = json.dumps(plain, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "strict") + b"\n"


def _manifest_error(expected: str, got: str) -> DatasetError:
    return DatasetError(f"{MANIFEST_FILE}: expected {expected}, got {got}.")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _check_format(version: object) -> None:
    if type(version) is not int or version != FORMAT_VERSION:
        advice = "Prepare the dataset again with this version, or remove the file and import its slices"
        raise _manifest_error(f"format {FORMAT_VERSION}", f"format {version!r}. {advice}")


def printable_name(name: str) -> str:
    """Return what a dataset may have of a name, such as its directory's: its printable characters, up to 255."""
    return "".join(filter(str.isprintable, name))[:255] or "dataset"


def _check_manifest(m: Manifest) -> None:
    _check_format(m.format)
    size = m.chunk_bytes
    if not _is_count(size) or not MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES or size & (size - 1):
        expected = f"chunk_bytes: a power of two from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}"
        raise _manifest_error(expected, repr(size))
    for name in ("name", "layout", "dtype", "tokenizer", "table_sha256", "lengths_sha256"):
        if not isinstance(getattr(m, name), str):
            raise _manifest_error(f"{name}: a string", repr(getattr(m, name)))
    for name in _COUNTS:
        if not _is_count(getattr(m, name)):
            raise _manifest_error(f"{name}: a whole number of at least 0", repr(getattr(m, name)))
    if not m.name or len(m.name) > 255 or not m.name.isprintable() or "/" in m.name:
        raise _manifest_error("a name of 1 to 255 printable characters without '/'", repr(m.name[:300]))
    if m.layout not in LAYOUTS:
        raise _manifest_error(f"layout in {LAYOUTS}", repr(m.layout))
    if m.layout == "tokens" and (m.dtype not in TOKEN_DTYPES or m.rows):
        raise _manifest_error("layout tokens with dtype U16 or U32 and rows 0", f"dtype {m.dtype!r}, rows {m.rows}")
    if m.layout == "rows" and (m.dtype or m.tokens):
        raise _manifest_error("layout rows with dtype '' and tokens 0", f"dtype {m.dtype!r}, tokens {m.tokens}")
    if m.dtype == "U16" and m.vocab_size > 1 << 16:
        raise _manifest_error("a vocabulary of at most 65536 for dtype U16", str(m.vocab_size))
    if m.eos_id is not None and (not _is_count(m.eos_id) or (m.vocab_size and m.eos_id >= m.vocab_size)):
        raise _manifest_error(f"eos_id below vocab_size {m.vocab_size}, or null", repr(m.eos_id))
    for name in ("table_sha256", "lengths_sha256"):
        value = getattr(m, name)
        if not re.fullmatch("[0-9a-f]{64}", value) and (value or name != "lengths_sha256"):
            raise _manifest_error(f"{name}: 64 hex digits", repr(value))
    if m.lengths_bytes > 9 * m.documents + 80 * m.slices:  # Integers that zstd cannot compress have less.
        raise _manifest_error(f"lengths_bytes: the size of {m.documents} lengths", repr(m.lengths_bytes))
    if not isinstance(m.lineage, dict):
        raise _manifest_error("lineage: an object", type(m.lineage).__name__)


def _check_table(table: SliceTable) -> None:
    for name, column in (("bytes", table.bytes), ("count", table.count), ("documents", table.documents)):
        if len(column) != len(table):
            raise DatasetError(f"{TABLE_FILE}: expected {len(table)} values of {name}, got {len(column)}.")
        if len(column) and int(column.min()) < 0:
            raise DatasetError(f"{TABLE_FILE}: expected {name} of at least 0, got {int(column.min())}.")
    if table.sha256.shape != (len(table), 32):
        raise DatasetError(f"{TABLE_FILE}: expected {len(table)} hashes of 32 bytes, got {table.sha256.shape}.")
    names = table.names.to_pylist()
    for name in names:
        if not name.endswith(".safetensors") or _UNSAFE_NAME.search(name):
            raise DatasetError(
                f"{TABLE_FILE}: expected names of .safetensors files inside the directory, got {name!r}. "
                "Do not use this dataset: it refers to files outside its directory."
            )
    if len(set(names)) != len(names):
        raise DatasetError(f"{TABLE_FILE}: expected each slice's name once, got a name twice.")


def _sum(column: Any) -> int:
    if len(column) and int(column.max()) > (1 << 62) // len(column):
        return sum(column.tolist())
    return int(column.sum())
