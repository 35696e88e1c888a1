"""Tokens to MosaicML's MDS, version 2: one sample a document, in one column `tokens`.

Hides: the shard's layout (see `formats.mds`). A shard of `slice_bytes` is in memory at a time. With `seq_len` that
divides the tokens, samples are of fixed shape, which readers map without copying.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from forebay.convert.content import Options, TokenSource, Written
from forebay.convert.streams import settle, shards_of
from forebay.errors import UsageError

_MOST_BYTES = (1 << 32) - 1
_RECORD_BYTES = 4 + 4 + 9  # An offset, a size, a shape of at most 8 bytes and the byte that tells it.
_LEVEL = 3


def write_mds(source: TokenSource, out: Path, options: Options) -> Written:
    """`index.json` and `shard.00000.mds` …, or `.mds.zstd`; the index has the sha256 of each file."""
    stream = settle(source, options, "rows")
    kind = "uint16" if stream.dtype == "U16" else "uint32"
    seq_len = stream.seq_len if stream.seq_len and stream.num_tokens % stream.seq_len == 0 else None
    column = options.column or "tokens"
    settings: dict[str, Any] = {
        "column_encodings": [f"ndarray:{kind}:{seq_len}" if seq_len else f"ndarray:{kind}"],
        "column_names": [column],
        "column_sizes": [seq_len * stream.itemsize if seq_len else None],
        "compression": f"zstd:{_LEVEL}" if options.compress else None,
        "format": "mds",
        "hashes": ["sha256"],
        "size_limit": options.slice_bytes,
        "version": 2,
    }
    head = json.dumps(settings, sort_keys=True).encode()
    out.mkdir()
    shards: list[dict[str, Any]] = []
    names: list[Path] = []
    for group in shards_of(stream, options.slice_bytes - len(head) - 8, _RECORD_BYTES, options.shard_tokens):
        raw, name = _shard(group, head, seq_len), f"shard.{len(shards):05d}.mds"
        zipped = zstandard.ZstdCompressor(level=_LEVEL).compress(raw) if options.compress else None
        stored = name if zipped is None else f"{name}.zstd"
        (out / stored).write_bytes(raw if zipped is None else zipped)
        names.append(Path(stored))
        shards.append(
            {
                **settings,
                "samples": len(group),
                "raw_data": _entry(name, raw),
                "zip_data": None if zipped is None else _entry(stored, zipped),
            }
        )
    (out / "index.json").write_text(json.dumps({"shards": shards, "version": 2}, sort_keys=True))
    return stream.written([*names, Path("index.json")], stream.num_documents)


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {"basename": name, "bytes": len(data), "hashes": {"sha256": hashlib.sha256(data).hexdigest()}}


def _shard(group: list[NDArray[Any]], settings: bytes, seq_len: int | None) -> bytes:
    """The raw bytes of a shard."""
    samples: list[bytes] = []
    for tokens in group:
        value = tokens.tobytes()
        if seq_len is None:
            value = _shape(len(tokens)) + value
            value = len(value).to_bytes(4, "little") + value
        samples.append(value)
    begin = 4 * (len(group) + 2) + len(settings)
    offsets = np.cumsum([begin, *map(len, samples)], dtype=np.int64)
    if int(offsets[-1]) > _MOST_BYTES:
        raise UsageError(
            f"mds: expected shards of at most {_MOST_BYTES} bytes, got {int(offsets[-1])}. Give --slice-bytes 64MiB; "
            "a document that is larger needs --seq-len N."
        )
    return b"".join([len(group).to_bytes(4, "little"), offsets.astype("<u4").tobytes(), settings, *samples])


def _shape(count: int) -> bytes:
    """One dimension, in the fewest bytes."""
    code = 0 if count < 1 << 8 else 1 if count < 1 << 16 else 2
    return bytes([1 << 2 | code]) + count.to_bytes(1 << code, "little")
