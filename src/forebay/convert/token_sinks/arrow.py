"""Tokens to what Hugging Face `datasets` saves with save_to_disk: one row a document, a column of token lists.

Hides: its three kinds of file (Arrow streams, state.json, dataset_info.json) and the features that its schema repeats.
Tokens of U32 are written as int32, which every framework has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from forebay.convert.content import Options, TokenSource, Written
from forebay.convert.streams import settle, shards_of
from forebay.errors import UsageError

_ROWS = 1000  # Of a record batch, as `datasets` writes them.
_MOST_LENGTH = (1 << 31) - 1


def write_arrow(source: TokenSource, out: Path, options: Options) -> Written:
    """Files of at most `slice_bytes`, or of `shard_tokens`."""
    stream = settle(source, options, "rows", signed=True)
    kind, name = ("uint16" if stream.dtype == "U16" else "int32"), options.column or "input_ids"
    features = {name: {"feature": {"dtype": kind, "_type": "Value"}, "_type": "Sequence"}}
    schema = pa.schema(
        [pa.field(name, pa.list_(pa.type_for_alias(kind)))],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    out.mkdir()
    written: list[Path] = []
    for group in shards_of(stream, options.slice_bytes, 4, options.shard_tokens):
        written.append(out / f"{len(written):05d}.arrow")
        with pa.OSFile(str(written[-1]), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for start in range(0, len(group), _ROWS):
                writer.write_batch(_batch(group[start : start + _ROWS], schema))
    names = [f"data-{i:05d}-of-{len(written):05d}.arrow" for i in range(len(written))]
    for path, final in zip(written, names):
        path.rename(out / final)
    state: dict[str, Any] = {
        "_data_files": [{"filename": final} for final in names],
        "_fingerprint": stream.digest.tokens[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    (out / "dataset_info.json").write_text(json.dumps(info, indent=2))
    (out / "state.json").write_text(json.dumps(state, indent=2))
    paths = (*map(Path, names), Path("dataset_info.json"), Path("state.json"))
    return stream.written(paths, stream.num_documents)


def _batch(group: list[NDArray[Any]], schema: Any) -> Any:
    offsets = np.cumsum([0, *map(len, group)], dtype=np.int64)
    if int(offsets[-1]) > _MOST_LENGTH:
        raise UsageError(
            f"arrow: expected at most {_MOST_LENGTH} tokens in {len(group)} rows, got {int(offsets[-1])}. Give "
            "--seq-len N."
        )
    kind = schema.field(0).type
    values = np.concatenate(group)
    flat = pa.array(values if kind.value_type == pa.uint16() else values.view(np.int32))
    return pa.record_batch(
        [pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat, type=kind)], schema=schema
    )
