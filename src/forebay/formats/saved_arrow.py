"""A dataset that Hugging Face `datasets` saved with save_to_disk: a column of token lists in Arrow files.

The directory: state.json, which names the files in order, and Arrow streams of record batches (1000 rows each unless
the writer was told otherwise). Source: datasets 2.14, arrow_dataset.py.

Its rows are documents, and its batches are small: those of a file are joined into slices of at least 4 Mi
tokens; a slice of one batch of 2- or 4-byte numbers is a view of the map, any other is copied when it opens.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
from numpy.typing import NDArray

from forebay.errors import DatasetError, UsageError
from forebay.formats.conversion import ConvertOptions, TokenSource, Written
from forebay.formats.external import (
    MAX_COPIED_TOKENS,
    TOKEN_COLUMNS,
    U64,
    ExternalDataset,
    ExternalSlice,
    as_tokens,
    common_dtype,
    fingerprints,
    read_head,
    shown_name,
    unreadable,
)
from forebay.formats.records import batched
from forebay.formats.tables import is_list
from forebay.formats.token_stream import build_stream, documents

STATE_FILE = "state.json"
_MAX_STATE_BYTES = 64 << 20
_MAX_LENGTH = (1 << 31) - 1
_ROWS = 1000  # Of a record batch, as `datasets` writes them.


class SavedDataset(ExternalDataset):
    """The files of one saved dataset, in its order; one row is one document."""

    def __init__(self, path: Path, column: str | None = None) -> None:
        files = files_of(path)
        self._batches = [_batches_of(file, column) for file in files]
        self._runs: dict[tuple[int, int], tuple[int, int]] = {}
        parts: list[ExternalSlice] = []
        kinds: set[np.dtype[Any]] = set()
        for i, (file, batches) in enumerate(zip(files, self._batches)):
            counts = [len(lists.flatten()) for lists in batches]
            start = 0
            for k, (a, b) in enumerate(_join(counts)):
                kind, count, rows = _kind_of(file, batches[a]), sum(counts[a:b]), sum(map(len, batches[a:b]))
                kinds.add(kind)
                self._runs[i, start] = a, b
                parts.append(
                    ExternalSlice(i, f"{shown_name(path, file)}#{k:05d}", start, count, rows, count * kind.itemsize)
                )
                start += count
        super().__init__(
            path, "arrow", common_dtype(path, kinds) if kinds else "U32", files, fingerprints(files), parts
        )

    def _read(self, part: ExternalSlice) -> tuple[NDArray[Any], U64]:
        a, b = self._runs[part.file, part.start]
        path = self.files[part.file]
        batches = self._batches[part.file][a:b]
        lengths = np.concatenate([pc.list_value_length(lists).to_numpy(zero_copy_only=False) for lists in batches])
        values = [lists.flatten() for lists in batches]
        if (lengths < 0).any() or any(value.null_count for value in values):
            raise DatasetError(f"{path}: expected lists of token ids without gaps, got others. Write it again.")
        pieces = [as_tokens(value.to_numpy(zero_copy_only=True), path) for value in values]
        tokens = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return tokens, np.cumsum(lengths, dtype=np.uint64)


def files_of(path: Path) -> list[Path]:
    """Return the files of a saved dataset, in order. Raises DatasetError if state.json is damaged, or selects rows."""
    state_file = path / STATE_FILE
    try:
        state = orjson.loads(read_head(state_file, _MAX_STATE_BYTES))
        names = [file["filename"] for file in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{state_file}: expected the names of a saved dataset's files, got {error!r}.") from error
    if state.get("_indices_files"):
        raise DatasetError(
            f"{path}: expected rows in the order of their files, got a dataset that was shuffled or selected from. "
            "Save it again after flatten_indices()."
        )
    if not all(isinstance(n, str) and n not in ("", ".", "..") and "/" not in n and n.isprintable() for n in names):
        raise DatasetError(f"{state_file}: expected names of files beside it, got {str(names)[:200]}.")
    return [path / name for name in names]


def _batches_of(path: Path, column: str | None) -> list[Any]:
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            names = [column] if column is not None else [n for n in TOKEN_COLUMNS if n in reader.schema.names][:1]
            if not names or names[0] not in reader.schema.names:
                raise DatasetError(
                    f"{path}: expected a column of token lists ({column or ' or '.join(TOKEN_COLUMNS)}), got "
                    f"{', '.join(reader.schema.names)[:500]}. Say column=…, or tokenize text first with "
                    "`forebay prepare`."
                )
            batches = [batch.column(names[0]) for batch in reader if len(batch)]
            for lists in batches:
                _kind_of(path, lists)
                lists.validate()
                if lists.null_count:
                    raise DatasetError(f"{path}: expected a list in every row of {names[0]}, got none in some.")
            return batches
    except OSError as error:
        raise unreadable(path, error) from error
    except (pa.ArrowException, ValueError) as error:
        raise DatasetError(
            f"{path}: expected a stream of Arrow batches, got: {error}. Write or fetch it again."
        ) from error


def _kind_of(path: Path, lists: Any) -> np.dtype[Any]:
    kind = lists.type
    if is_list(kind) and pa.types.is_integer(kind.value_type):
        dtype: np.dtype[Any] = np.dtype(kind.value_type.to_pandas_dtype())
        return dtype
    raise DatasetError(f"{path}: expected lists of integers, got {kind}. Name another column, or write it again.")


def _join(counts: list[int]) -> Iterator[tuple[int, int]]:
    first, total = 0, 0
    for i, count in enumerate(counts):
        total += count
        if total >= MAX_COPIED_TOKENS or i == len(counts) - 1:
            if total:
                yield first, i + 1
            first, total = i + 1, 0


def write_saved_dataset(source: TokenSource, out: Path, options: ConvertOptions) -> Written:
    """Write a dataset as save_to_disk does: files of about `slice_bytes`."""
    stream = build_stream(source, options, "rows", signed=True)
    kind, name = ("uint16" if stream.dtype == "U16" else "int32"), options.column or "input_ids"
    features = {name: {"feature": {"dtype": kind, "_type": "Value"}, "_type": "Sequence"}}
    schema = pa.schema(
        [pa.field(name, pa.list_(pa.type_for_alias(kind)))],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    out.mkdir()
    written: list[Path] = []
    for group in batched(documents(stream.parts()), lambda tokens: tokens.nbytes + 4, options.slice_bytes, _MAX_LENGTH):
        written.append(out / f"{len(written):05d}.arrow")
        with pa.OSFile(str(written[-1]), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for start in range(0, len(group), _ROWS):
                writer.write_batch(_list_batch(group[start : start + _ROWS], schema))
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


def _list_batch(group: list[NDArray[Any]], schema: Any) -> Any:
    offsets = np.cumsum([0, *map(len, group)], dtype=np.int64)
    if int(offsets[-1]) > _MAX_LENGTH:
        raise UsageError(
            f"arrow: expected at most {_MAX_LENGTH} tokens in {len(group)} rows, got {int(offsets[-1])}. Give "
            "--seq-len N."
        )
    kind = schema.field(0).type
    values = np.concatenate(group)
    flat = pa.array(values if kind.value_type == pa.uint16() else values.view(np.int32))
    return pa.record_batch(
        [pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat, type=kind)], schema=schema
    )
