"""Tokens to MosaicML's MDS, version 2, and to LitData: shards (chunks) of samples (items), one a document.

Hides: their common layout, samples behind a table of offsets (see `formats.mds` and `formats.litdata`), and the two
indexes. One shard of `slice_bytes` is in memory at a time.

MDS: one column `tokens`. With `seq_len` that divides the tokens, samples are of fixed shape, which readers map without
copying.

LitData: by default items are bare tokens, which its TokensLoader cuts into blocks; with `more["items"]` `dict` each is
`{"input_ids": tokens}`, and with `tuple` `(tokens,)`, for its usual loader. Tokens of U16 come as NumPy arrays, those
of U32 as int32 tensors: types that every version knows.
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
from forebay.convert.streams import Stream, settle, shards_of
from forebay.errors import UsageError

_MOST_BYTES = (1 << 32) - 1
_RECORD_BYTES = 4 + 4 + 9  # Of MDS: an offset, a size, a shape of at most 8 bytes and the byte that tells it.
_MDS_LEVEL, _LITDATA_LEVEL = 3, 4
_FORMATS = {"U16": "no_header_numpy:5", "U32": "no_header_tensor:16"}  # uint16; int32.
_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


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
        "compression": f"zstd:{_MDS_LEVEL}" if options.compress else None,
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
        raw, name = _block("mds", [_sample(tokens, seq_len) for tokens in group], head), f"shard.{len(shards):05d}.mds"
        zipped = zstandard.ZstdCompressor(level=_MDS_LEVEL).compress(raw) if options.compress else None
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


def _sample(tokens: NDArray[Any], seq_len: int | None) -> bytes:
    value = tokens.tobytes()
    return value if seq_len is not None else _sized(_shape(len(tokens)) + value)


def _shape(count: int) -> bytes:
    """One dimension, in the fewest bytes."""
    code = 0 if count < 1 << 8 else 1 if count < 1 << 16 else 2
    return bytes([1 << 2 | code]) + count.to_bytes(1 << code, "little")


def write_litdata(source: TokenSource, out: Path, options: Options) -> Written:
    """Chunks of at most `slice_bytes`, or of `shard_tokens`; compressed whole where `compress` says."""
    stream = settle(source, options, "rows", signed=True)
    items = options.more.get("items", "tokens")
    if items not in ("tokens", "dict", "tuple"):
        raise UsageError(f"litdata: expected items 'tokens', 'dict' or 'tuple', got {items!r}.")
    out.mkdir()
    chunks: list[dict[str, Any]] = []
    names: list[Path] = []
    for group in shards_of(stream, options.slice_bytes - 8, 8, options.shard_tokens):
        values = [tokens.tobytes() for tokens in group]
        raw = _block("litdata", values if items == "tokens" else list(map(_sized, values)))
        name = f"chunk-0-{len(chunks)}.{'zstd.' if options.compress else ''}bin"
        stored = zstandard.ZstdCompressor(level=_LITDATA_LEVEL).compress(raw) if options.compress else raw
        (out / name).write_bytes(stored)
        names.append(Path(name))
        dim = sum(map(len, group)) if items == "tokens" else None
        chunks.append({"chunk_bytes": len(raw), "chunk_size": len(group), "dim": dim, "filename": name})
    index = {
        "chunks": chunks,
        "config": _config(stream, options, items),
        # Readers keep their caches by it: a number made of what was written.
        "updated_at": str(int(stream.digest.tokens[:12], 16)),
    }
    (out / "index.json").write_text(json.dumps(index, sort_keys=True))
    return stream.written([*names, Path("index.json")], stream.num_documents)


def _config(stream: Stream, options: Options, items: str) -> dict[str, Any]:
    spec: dict[str, Any] = dict(_LEAF)
    if items == "dict":
        keys = json.dumps([options.column or "input_ids"])
        spec = {"type": "builtins.dict", "context": keys, "children_spec": [_LEAF]}
    elif items == "tuple":
        spec = {"type": "builtins.tuple", "context": "null", "children_spec": [_LEAF]}
    return {
        "chunk_bytes": None if options.shard_tokens else options.slice_bytes,
        "chunk_size": options.shard_tokens,
        "compression": "zstd" if options.compress else None,
        "data_format": [_FORMATS[stream.dtype]],
        "data_spec": json.dumps([1, spec]),
        "encryption": None,
        "item_loader": "TokensLoader" if items == "tokens" else "PyTreeLoader",
    }


def _sized(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value


def _block(what: str, samples: list[bytes], settings: bytes = b"") -> bytes:
    """The raw bytes of a shard: how many samples, where each begins and the last ends, settings, samples."""
    offsets = np.cumsum([4 * (len(samples) + 2) + len(settings), *map(len, samples)], dtype=np.int64)
    if int(offsets[-1]) > _MOST_BYTES:
        raise UsageError(
            f"{what}: expected {'shards' if what == 'mds' else 'chunks'} of at most {_MOST_BYTES} bytes, got "
            f"{int(offsets[-1])}. Give --slice-bytes 64MiB; a document that is larger needs --seq-len N."
        )
    return b"".join([len(samples).to_bytes(4, "little"), offsets.astype("<u4").tobytes(), settings, *samples])
