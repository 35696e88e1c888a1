"""Sources in memory with columns of every kind, their reading, and datasets as other libraries write them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.formats.conversion import ConvertOptions, TableSource, TokenPart, TokenSource
from forebay.formats.sources import open_source, open_table
from forebay.formats.token_stream import documents
from support.paths import GOLDEN

FOREIGN = GOLDEN / "foreign"  # A folder for each dataset of another library, all of the same documents:
_CONTENT = json.loads((FOREIGN / "stream.json").read_text())
STREAM = np.array(_CONTENT["tokens"], np.int64)
STOPS = np.cumsum(_CONTENT["lengths"])
DOCUMENTS = [document.tolist() for document in np.split(STREAM, STOPS[:-1])]


NUM_ROWS = 60
ROWS = range(NUM_ROWS)


def column(kind: str) -> np.ndarray:
    """Integers of the whole range of a type."""
    limits = np.iinfo(kind)
    return np.random.default_rng(7).integers(limits.min, limits.max, NUM_ROWS, kind, endpoint=True)


COLUMNS = {
    "text": [f"row {i} “ä”, with a comma,\nand a line" * (i % 3) for i in ROWS],
    **{kind: column(kind) for kind in ("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64")},
    "uint64": np.uint64((1 << 63) - 1) - np.arange(NUM_ROWS, dtype=np.uint64),
    "float16": np.arange(NUM_ROWS, dtype=np.float16) / 3,
    "float32": np.arange(NUM_ROWS, dtype=np.float32) / 7,
    "float64": np.arange(NUM_ROWS) / 7,
    "flag": [i % 2 == 0 for i in ROWS],
    "digits": [f"{i:05d}" for i in ROWS],
    "category": pa.array([f"c{i % 3}" for i in ROWS]).dictionary_encode(),
    "url": [None if i % 5 == 0 else f"u{i}" for i in ROWS],
    "gaps": pa.array([None if i % 5 == 0 else i for i in ROWS], pa.int64()),
    "blob": [bytes([255, i]) * (1 + i % 4) for i in ROWS],
    "ids": pa.array([list(range(i % 7)) for i in ROWS], pa.list_(pa.uint16())),
    "some": [None if i % 3 == 0 else [1.5, None][: i % 3] for i in ROWS],
    "words": [["a", "ä"][: i % 3] for i in ROWS],
    "nested": [{"a": [i, None], "b": {"c": str(i)}} for i in ROWS],
    "pixels": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(360, dtype=np.uint8).reshape(60, 2, 3)),
    "fixed": pa.array([[i, -i] for i in ROWS], pa.list_(pa.int32(), 2)),
    "time": [datetime(2020, 1, 1, tzinfo=UTC)] * NUM_ROWS,
}


def made_table(columns: Mapping[str, Any], batch_rows: int = 400) -> TableSource:
    """Return a table in memory, in batches."""
    table = pa.table(dict(columns))
    return TableSource("made", table.schema, len(table), lambda: iter(table.to_batches(batch_rows)))


def read_table(path: Path) -> pa.Table:
    source = open_table(path)
    return pa.Table.from_batches(list(source.batches()), source.schema)


def made_tokens(tokens: Sequence[int] | np.ndarray, stops: Sequence[int], dtype: str = "U16") -> TokenSource:
    """Return a stream of tokens in memory with the ends of its documents."""
    part = TokenPart(np.asarray(tokens, {"U16": np.uint16, "U32": np.uint32}[dtype]), np.array(stops, np.uint64))
    return TokenSource("made", dtype, len(tokens), len(stops), lambda: iter([part]))


def read_tokens(path: Path, **options: Any) -> list[list[int]]:
    """Return the documents of a file or directory of tokens; all tokens as one if it has none."""
    source = open_source(path, ConvertOptions(**options), "bin")
    assert isinstance(source, TokenSource)
    return [document.tolist() for document in documents(source.parts())]


def _block(samples, settings=b""):
    offsets = np.cumsum([4 * (len(samples) + 2) + len(settings), *map(len, samples)]).astype("<u4")
    return b"".join([len(samples).to_bytes(4, "little"), offsets.tobytes(), settings, *samples])


def write_mds(folder: Path, documents: Sequence[np.ndarray]) -> Path:
    """One shard with its sha256; each document a sample."""
    settings = {
        "column_encodings": ["ndarray:uint16"], "column_names": ["tokens"], "column_sizes": [None], "compression": None,
        "format": "mds", "hashes": ["sha256"], "size_limit": 1 << 26, "version": 2,
    }  # fmt: skip
    samples = []
    for tokens in documents:
        code = 0 if len(tokens) < 1 << 8 else 1
        value = bytes([1 << 2 | code]) + len(tokens).to_bytes(1 << code, "little") + tokens.astype("<u2").tobytes()
        samples.append(len(value).to_bytes(4, "little") + value)
    raw = _block(samples, json.dumps(settings, sort_keys=True).encode())
    folder.mkdir()
    (folder / "shard.00000.mds").write_bytes(raw)
    stored = {"basename": "shard.00000.mds", "bytes": len(raw), "hashes": {"sha256": hashlib.sha256(raw).hexdigest()}}
    shard = {**settings, "samples": len(samples), "raw_data": stored, "zip_data": None}
    (folder / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))
    return folder


def write_saved(folder: Path, documents: Sequence[np.ndarray]) -> Path:
    """One batch, as save_to_disk; each document a row."""
    ids = pa.array([tokens.tolist() for tokens in documents], pa.list_(pa.uint16()))
    return save_table(folder, pa.table({"input_ids": ids}))


def save_table(folder: Path, table: pa.Table) -> Path:
    """Write a table as save_to_disk, in one file."""
    folder.mkdir(parents=True)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder
