"""Datasets as MosaicML Streaming and `datasets` write them, of documents of uint16 tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa


def _block(samples: Sequence[bytes], settings: bytes = b"") -> bytes:
    offsets = np.cumsum([4 * (len(samples) + 2) + len(settings), *map(len, samples)]).astype("<u4")
    return b"".join([len(samples).to_bytes(4, "little"), offsets.tobytes(), settings, *samples])


def write_mds(folder: Path, documents: Sequence[np.ndarray]) -> Path:
    """One shard with its sha256; each document a sample."""
    settings: dict[str, Any] = {
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
    """One file of one batch, as save_to_disk; each document a row."""
    table = pa.table({"input_ids": pa.array([tokens.tolist() for tokens in documents], pa.list_(pa.uint16()))})
    folder.mkdir()
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder
