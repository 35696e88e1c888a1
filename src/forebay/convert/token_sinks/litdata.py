"""Tokens to LitData: `index.json` and `chunk-0-*.bin`, one item a document.

Hides: the chunk's layout (see `formats.litdata`). By default items are bare tokens, which its TokensLoader cuts into
blocks; with `more["items"]` `dict` each is `{"input_ids": tokens}`, and with `tuple` `(tokens,)`, for its usual loader.
Tokens of U16 come as NumPy arrays, those of U32 as int32 tensors: types that every version knows. A chunk is in memory
at a time.
"""

from __future__ import annotations

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
_FORMATS = {"U16": "no_header_numpy:5", "U32": "no_header_tensor:16"}  # uint16; int32.
_LEVEL = 4
_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


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
        raw = _chunk(group, has_sizes=items != "tokens")
        name = f"chunk-0-{len(chunks)}.{'zstd.' if options.compress else ''}bin"
        stored = zstandard.ZstdCompressor(level=_LEVEL).compress(raw) if options.compress else raw
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


def _chunk(group: list[NDArray[Any]], has_sizes: bool) -> bytes:
    """The raw bytes of a chunk; each item with the size of its only leaf before it, where the loader expects it."""
    parts = [tokens.tobytes() for tokens in group]
    if has_sizes:
        parts = [len(value).to_bytes(4, "little") + value for value in parts]
    offsets = np.cumsum([4 * (len(group) + 2), *map(len, parts)], dtype=np.int64)
    if int(offsets[-1]) > _MOST_BYTES:
        raise UsageError(
            f"litdata: expected chunks of at most {_MOST_BYTES} bytes, got {int(offsets[-1])}. Give --slice-bytes "
            "64MiB; a document that is larger needs --seq-len N."
        )
    return b"".join([len(group).to_bytes(4, "little"), offsets.astype("<u4").tobytes(), *parts])
